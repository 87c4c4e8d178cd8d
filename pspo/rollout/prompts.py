"""Prompts: problems, encoded with the model's chat template, and the order in which a run draws them."""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from tokenizers.decoders import ByteLevel
from tokenizers.normalizers import NFC
from transformers import PreTrainedTokenizerBase

from pspo.config import DataConfig
from pspo.tasks import Problem, load_problems
from pspo.tasks.environment import MakeEnvironment
from pspo.tasks.problem import SYSTEM_PROMPT, Messages, check_chat


class EncodedTexts(Sequence[list[int]]):
    """Token ids of rendered prompts, each encoded when it is first asked for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
        self.tokenizer, self.texts = tokenizer, texts
        self.encoded: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> list[int]:
        if index not in self.encoded:
            (self.encoded[index],) = encode(self.tokenizer, [self.texts[index]])
        return self.encoded[index]

    def fingerprint(self) -> str:
        """SHA-256 of the texts, and of the vocabulary with which they are encoded."""
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        return hashlib.sha256(json.dumps([self.texts, vocabulary]).encode()).hexdigest()


@dataclass(frozen=True)
class Prompts:
    """Problems and their encoded prompts, index by index."""

    problems: list[Problem]
    ids: Sequence[list[int]]

    def __len__(self) -> int:
        return len(self.problems)

    def take(self, indices: Sequence[int]) -> "Prompts":
        return Prompts([self.problems[i] for i in indices], [self.ids[i] for i in indices])

    def fingerprint(self) -> str:
        """SHA-256 of the prompts, and of the problems' answers, kinds and other fields."""
        prompts = self.ids.fingerprint() if isinstance(self.ids, EncodedTexts) else self.ids
        problems = [
            (repr(problem.answer), problem.source, problem.category, problem.level, problem.fields)
            for problem in self.problems
        ]
        return hashlib.sha256(json.dumps([prompts, problems], default=str).encode()).hexdigest()


def load_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: str,
    limit: int | None = None,
    room: float = math.inf,
    environment: MakeEnvironment | None = None,
) -> Prompts:
    """Load one split and render its prompts; those over --data.max_prompt_tokens or over ``room`` are dropped.

    A prompt is encoded when it is used, or if nothing less shows whether it is too long. ``limit`` replaces
    --data.limit; an ``environment`` makes the prompts of the problems. Raises ValueError if none is left, or the split
    does not exist.
    """
    prompt_fields = ("system_prompt", "max_prompt_tokens")
    problem_fields = {name: value for name, value in vars(config).items() if name not in prompt_fields}
    problems = load_problems(split=split, **problem_fields | {"limit": config.limit if limit is None else limit})
    prompts = [environment().reset(problem) if environment else problem.prompt for problem in problems]
    texts = render_prompts(tokenizer, prompts, config.system_text)
    longest = min(config.max_prompt_tokens, room)
    lengths = most_tokens(tokenizer, texts)
    unknown = [i for i, length in enumerate(lengths) if length > longest]
    for i, ids in zip(unknown, encode(tokenizer, [texts[i] for i in unknown]), strict=True):
        lengths[i] = len(ids)
    kept = [i for i, length in enumerate(lengths) if length <= longest]
    if not kept:
        raise ValueError(
            f"all {len(texts)} {split} prompts of {config.name} are longer than {longest} tokens, the shortest has "
            f"{min(lengths)}: raise --data.max_prompt_tokens, or lower max_completion_tokens if the "
            "model's positions are the limit"
        )
    if len(kept) < len(texts):
        too_long = len(texts) - len(kept)
        print(f"{config.name} {split}: dropped {too_long:,} of {len(texts):,} prompts over {longest} tokens")
    return Prompts([problems[i] for i in kept], EncodedTexts(tokenizer, [texts[i] for i in kept]))


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str | Messages], system_prompt: str = SYSTEM_PROMPT
) -> list[list[int]]:
    """Render and encode prompts, see `render_prompts`."""
    return encode(tokenizer, render_prompts(tokenizer, prompts, system_prompt))


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of rendered prompts, in which the template has written the special tokens."""
    return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []


def render_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str | Messages], system_prompt: str = SYSTEM_PROMPT
) -> list[str]:
    """Render prompts with the tokenizer's chat template, up to where the assistant begins.

    A text is the user turn after the system prompt, if that is not ""; a chat that has a system turn keeps it. The
    default is the paper's system prompt, which asks for a number.

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
        rendered = tokenizer.apply_chat_template(
            conversations, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is a program that comes with the model
        fix = "if it knows no system turn, set --data.system_prompt ''"
        raise ValueError(f"{what} failed ({error}); {fix}") from error
    if not all(rendered):
        raise ValueError(f"{what} makes a prompt of nothing")
    return rendered


def most_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[float]:
    """Upper bound of each text's number of tokens, without encoding it; infinite where none is known.

    Byte-level tokenizers make at most one token of an ASCII character, and encode the parts between special tokens
    separately: those that the template writes around every problem, such as the system prompt, are encoded once.
    """
    backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    if backend is None or not isinstance(backend.decoder, ByteLevel) or not isinstance(backend.normalizer, NFC | None):
        return [math.inf] * len(texts)
    special = sorted((str(token) for token in tokenizer.added_tokens_decoder.values() if token.special), key=len)
    divide = re.compile("|".join(map(re.escape, reversed(special))) or r"(?!)").split
    around = sorted({*divide(texts[0])} & {*divide(texts[-1])})
    known = dict(zip(around, map(len, encode(tokenizer, around)), strict=True))

    def bound(text: str) -> float:
        parts = divide(text)
        if not all(part in known or part.isascii() for part in parts):
            return math.inf
        return len(parts) + sum(known.get(part, len(part) + 1) for part in parts)  # + 1: some put a space before

    return [bound(text) for text in texts]


def prompt_order(n: int, seed: int) -> Iterator[int]:
    """Endless passes over n prompts, each in a new random order."""
    for epoch in count():
        yield from np.random.default_rng((seed, epoch)).permutation(n).tolist()
