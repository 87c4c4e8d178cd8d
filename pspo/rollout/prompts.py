"""Prompts: problems, encoded with the model's chat template, and the order in which a run draws them."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from transformers import PreTrainedTokenizerBase

from pspo.config import DataConfig
from pspo.tasks import Problem, load_problems
from pspo.tasks.environment import MakeEnvironment
from pspo.tasks.problem import SYSTEM_PROMPT, Messages, check_chat


@dataclass(frozen=True)
class Prompts:
    """Problems and their encoded prompts, index by index."""

    problems: list[Problem]
    ids: list[list[int]]

    def __len__(self) -> int:
        return len(self.problems)

    def take(self, indices: Sequence[int]) -> "Prompts":
        return Prompts([self.problems[i] for i in indices], [self.ids[i] for i in indices])

    def fingerprint(self) -> str:
        """SHA-256 of the encoded prompts, and of the problems' answers, kinds and other fields."""
        parts = [
            (ids, repr(problem.answer), problem.source, problem.category, problem.level, problem.fields)
            for ids, problem in zip(self.ids, self.problems, strict=True)
        ]
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def load_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: str,
    limit: int | None = None,
    room: float = math.inf,
    environment: MakeEnvironment | None = None,
) -> Prompts:
    """Load one split and encode its prompts; those over --data.max_prompt_tokens or over ``room`` are dropped.

    ``limit`` replaces --data.limit; an ``environment`` makes the prompts of the problems. Raises ValueError if none is
    left, or the split does not exist.
    """
    of_prompts = ("system_prompt", "max_prompt_tokens")
    of_problems = {name: value for name, value in vars(config).items() if name not in of_prompts}
    problems = load_problems(split=split, **of_problems | {"limit": config.limit if limit is None else limit})
    texts = [environment().reset(problem) if environment else problem.prompt for problem in problems]
    ids = encode_prompts(tokenizer, texts, config.system_text)
    longest = min(config.max_prompt_tokens, room)
    kept = [i for i in range(len(ids)) if len(ids[i]) <= longest]
    if not kept:
        raise ValueError(
            f"all {len(ids)} {split} prompts of {config.name} are longer than {longest} tokens, the shortest has "
            f"{min(map(len, ids))}: raise --data.max_prompt_tokens, or lower max_completion_tokens if the "
            "model's positions are the limit"
        )
    if len(kept) < len(ids):
        too_long = len(ids) - len(kept)
        print(f"{config.name} {split}: dropped {too_long:,} of {len(ids):,} prompts over {longest} tokens")
    return Prompts(problems, ids).take(kept)


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str | Messages], system_prompt: str = SYSTEM_PROMPT
) -> list[list[int]]:
    """Render prompts with the tokenizer's chat template, up to where the assistant begins.

    A text is the user turn after the system prompt, if that is not ""; a chat with a system turn of its own stays as it
    is. The default is the paper's system prompt, which asks for a number.

    A template that prints the date gets the same one every day, so that a resumed run has the same prompts. Raises
    ValueError if the template fails, as some do on a system turn, or a chat does not end with a user or tool turn.
    """
    what = f"--model.name_or_path: the chat template of {tokenizer.name_or_path}"
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    conversations = []
    for prompt in prompts:
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        check_chat(turns)
        conversations.append(turns if turns[0]["role"] == "system" else [*system, *turns])
    try:
        template = tokenizer.get_chat_template()
        if "strftime_now" in template:
            date = "26 Jul 2024"  # Llama's templates print it if there is no clock
            template = "{% macro strftime_now(format) %}" + date + "{% endmacro %}\n" + template
        encoded = tokenizer.apply_chat_template(
            conversations, chat_template=template, tokenize=True, add_generation_prompt=True, return_dict=True
        )
    except Exception as error:  # a template is a program that comes with the model
        fix = "if it knows no system turn, set --data.system_prompt ''"
        raise ValueError(f"{what} failed ({error}); {fix}") from error
    if not all(encoded["input_ids"]):
        raise ValueError(f"{what} makes a prompt of nothing")
    return encoded["input_ids"]


def prompt_order(n: int, seed: int) -> Iterator[int]:
    """Endless passes over n prompts, each in a new random order."""
    for epoch in count():
        yield from np.random.default_rng((seed, epoch)).permutation(n).tolist()
