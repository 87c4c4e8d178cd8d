"""Prompts: problems, encoded with the model's chat template, and the order in which a run draws them."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.config import DataConfig, TrainConfig
from pspo.model.chat import encode, render_prompts, special_pattern
from pspo.tasks import Problem
from pspo.tasks.datasets import read_problems
from pspo.tasks.problem import SYSTEM_PROMPT, MakeEnvironment, Messages, make_prompts


@dataclass(frozen=True)
class Prompts:
    """Problems and their encoded prompts."""

    problems: list[Problem]
    ids: list[list[int]]
    texts: list[str | Messages] = field(default_factory=list)  # an environment's prompts; [] without an environment

    def __len__(self) -> int:
        return len(self.problems)

    def take(self, indices: Sequence[int]) -> "Prompts":
        texts = [self.texts[i] for i in indices] if self.texts else []
        return Prompts([self.problems[i] for i in indices], [self.ids[i] for i in indices], texts)

    def record(self, i: int) -> dict[str, Any]:
        """`Problem.record`, with the prompt that the model sees."""
        return self.problems[i].record() | ({"prompt": self.texts[i]} if self.texts else {})

    def fingerprint(self) -> str:
        """SHA-256 of the prompts, and of the problems' answers, kinds and other fields."""
        problems = [
            (repr(problem.answer), problem.source, problem.category, problem.level, problem.fields)
            for problem in self.problems
        ]
        return hashlib.sha256(json.dumps([self.ids, problems], default=str).encode()).hexdigest()


def load_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: str,
    limit: int | None = None,
    room: float = math.inf,
    make_environment: MakeEnvironment | None = None,
) -> Prompts:
    """Load one split and encode its prompts; drop prompts over --data.max_prompt_tokens or ``room`` tokens.

    ``limit`` replaces --data.limit; an environment writes its own prompts for the problems. Raises ValueError if no
    prompt is left, or the split does not exist.
    """
    problems = read_problems(config if limit is None else replace(config, limit=limit), split)
    prompts = [problem.prompt for problem in problems]
    tools = None
    if make_environment is not None:
        prompts, tools = make_prompts(make_environment, problems)
    texts = render_prompts(tokenizer, prompts, config.system_text, tools)
    if render_prompts(tokenizer, ["@@"], config.system_text and "@@")[0].count("@@") < 1 + bool(config.system_text):
        fix = "set --data.system_prompt '', or give another template by --data.chat_template"
        raise ValueError(f"the chat template leaves the system prompt or the question out of the prompts: {fix}")
    if tools:
        without_tools = render_prompts(tokenizer, prompts, config.system_text, [])
        if any(text == other for text, other in zip(texts, without_tools, strict=True)):
            fix = "use a model whose template writes tools, or give such a template by --data.chat_template"
            raise ValueError(f"the chat template leaves the environment's tools out of the prompts: {fix}")
    ids = encode(tokenizer, texts)
    longest = min(config.max_prompt_tokens, room)
    fits = [i for i in range(len(ids)) if len(ids[i]) <= longest]
    if not fits:
        fix = "raise --data.max_prompt_tokens, or lower max_completion_tokens if the model's positions are the limit"
        raise ValueError(f"all {len(texts)} {split} prompts of {config.name} are longer than {longest} tokens: {fix}")
    if too_long := len(texts) - len(fits):
        print(f"{config.name} {split}: dropped {too_long:,} of {len(texts):,} prompts over {longest} tokens")
    special = special_pattern(tokenizer)
    sources = [json.dumps([config.system_text, prompts[i]], ensure_ascii=False, default=str) for i in fits]
    if broken := sum(special.search(source) is not None for source in sources):
        print(f"{config.name} {split}: special tokens in {broken:,} of {len(fits):,} prompts are broken by a blank")
    return Prompts(problems, ids, [] if make_environment is None else prompts).take(fits)


def completion_columns(max_completion_tokens: int, has_environment: bool) -> int:
    """Columns that may follow a prompt: each turn of an episode is drawn until the batch's longest turn ends."""
    return 2 * max_completion_tokens if has_environment else max_completion_tokens


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str | Messages], system_prompt: str = SYSTEM_PROMPT
) -> list[list[int]]:
    return encode(tokenizer, render_prompts(tokenizer, prompts, system_prompt))


def prompt_order(n: int, seed: int, first_epoch: int = 0) -> Iterator[int]:
    """Endless passes over n prompts, each in a new random order, from ``first_epoch`` on."""
    for epoch in count(first_epoch):
        yield from np.random.default_rng((seed, epoch)).permutation(n).tolist()


class PromptStream:
    """Training prompts in the order in which a run draws them; ``position`` counts the prompts drawn by all ranks."""

    def __init__(self, prompts: Prompts, config: TrainConfig) -> None:
        self.prompts = prompts
        self.config = config
        self.fingerprint = prompts.fingerprint()
        self.n_ranks = dist.world_size()
        self.seek(0)

    def next(self, n: int) -> tuple[list[int], Prompts]:
        """Indices and prompts of this rank's share of the next n prompts."""
        self.position += n
        indices = list(islice(self.order, n))
        if self.n_ranks > 1:
            minibatches = self.config.algorithm.minibatches if n == self.config.rollout.prompts else 1
            indices = dist.take_rank_share(indices, minibatches)
        return indices, self.prompts.take(indices)

    def peek(self, n: int) -> tuple[list[int], Prompts]:
        """The result that `next` will return at its next call."""
        position = self.position
        share = self.next(n)
        self.seek(position)
        return share

    def seek(self, position: int) -> None:
        self.position = position
        epoch, drawn = divmod(position, len(self.prompts))
        self.order = islice(prompt_order(len(self.prompts), self.config.run.seed, epoch), drawn, None)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "fingerprint": self.fingerprint}

    def fork_state(self, state: dict[str, Any], changes: dict[str, tuple[Any, Any]]) -> dict[str, Any] | None:
        """The parent run's position; None if the problems have changed."""
        return None if "data problems" in changes else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seek(state["position"])
