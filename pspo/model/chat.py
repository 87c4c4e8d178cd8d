"""Chats: rendered with the model's template, and encoded so that special tokens in what users bring are text."""

import copy
import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken
from tokenizers.decoders import ByteLevel
from tokenizers.normalizers import NFC
from transformers import PreTrainedTokenizerBase

from pspo.config import SpecialTokens
from pspo.tasks.problem import SYSTEM_PROMPT, Messages, check_chat

MARK = "\ufdd0"  # stands for no character (Unicode, noncharacters): tells special tokens from text that reads like them


def render_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Messages],
    system_prompt: str = SYSTEM_PROMPT,
    special_tokens: SpecialTokens = "text",
    tools: list[Any] | None = None,
) -> list[str]:
    """Render prompts, and tools, with the tokenizer's chat template, up to where the assistant begins.

    A text is the user turn after the system prompt, if that is not ""; a chat that has a system turn keeps it. The
    default is the paper's system prompt, which asks for a number. Special tokens in either are marked, for `encode` to
    take them as text, unless ``special_tokens`` is "allow".

    A template that prints the date gets the same one every day, so that a resumed run has the same prompts. Raises
    ValueError if the template fails, as some do on a system turn, or a chat does not end with a user or tool turn.
    """
    what = f"--model.name_or_path: the chat template of {tokenizer.name_or_path}"
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    special = any_of(special_tokens_of(tokenizer) if special_tokens == "text" else ())
    conversations = []
    for prompt in prompts:
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        check_chat(turns)
        turns = turns if turns[0]["role"] == "system" else [*system, *turns]
        conversations.append(mark_special_tokens(special, turns))
    try:
        template = tokenizer.get_chat_template()
        if "strftime_now" in template:
            date = "26 Jul 2024"  # Llama's templates print it if there is no clock
            template = "{% macro strftime_now(format) %}" + date + "{% endmacro %}\n" + template
        *before, last = conversations[0]
        asks_more = [*before, last | {"content": last["content"] + "?"}]
        *rendered, probe = tokenizer.apply_chat_template(
            [*conversations, asks_more], chat_template=template, tools=tools, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is a program that comes with the model
        fix = "if it knows no system turn, set --data.system_prompt ''"
        raise ValueError(f"{what} failed ({error}); {fix}") from error
    if probe == rendered[0]:
        raise ValueError(f"{what} leaves the last turn out: all prompts would be alike")
    return rendered


def drops_thoughts(tokenizer: PreTrainedTokenizerBase, role: str) -> bool:
    """True if the chat template leaves thoughts of the assistant's out once a turn of this role has followed."""
    turns = (("user", "-"), ("assistant", "<think>\n\0\n</think>\n\n-"), (role, "-"))
    (rendered,) = render_prompts(tokenizer, [[{"role": role, "content": text} for role, text in turns]], "")
    return "\0" not in rendered


def mark_special_tokens(special: re.Pattern, value: Any) -> Any:
    """Put `MARK` after the first character of each special token, in a text or in all texts of a chat."""
    if isinstance(value, str):
        return special.sub(lambda token: with_mark(token[0]), value.replace(MARK, ""))
    if isinstance(value, list):
        return [mark_special_tokens(special, part) for part in value]
    if isinstance(value, dict):
        return {mark_special_tokens(special, key): mark_special_tokens(special, part) for key, part in value.items()}
    return value


def with_mark(token: str) -> str:
    return token[0] + MARK + token[1:]


def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Ids of the special tokens by their texts."""
    return {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def any_of(texts: Iterable[str]) -> re.Pattern:
    """Pattern of the texts, of several at one place the longest."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of rendered prompts, in which the template has written the special tokens."""
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return [encode_marked(tokenizer, text) if MARK in text else ids for text, ids in zip(texts, encoded, strict=True)]


def encode_marked(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a rendered prompt with marks: the special tokens that have one are text, the template's are tokens.

    The copy has the special tokens again, after a mark, and takes all others as text: so it divides the text where the
    tokenizer itself does, and any other text has the same ids with both.
    """
    special, (marking, ids) = special_tokens_of(tokenizer), marking_copy(tokenizer)
    forms = {token: MARK + token for token in special} | {with_mark(token): token for token in special}
    as_text = {special[token] for token in special if with_mark(token) in text}
    text = any_of(forms).sub(lambda token: forms[token[0]], text)
    encoded = marking(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    if not tokenizer.is_fast or as_text.intersection(encoded) - {tokenizer.unk_token_id}:
        raise ValueError(
            f"--model.name_or_path: the tokenizer of {tokenizer.name_or_path} cannot encode special tokens as text: "
            "remove them from the problems, or set --data.special_tokens allow"
        )
    return [ids.get(i, i) for i in encoded]


@lru_cache(maxsize=1)
def marking_copy(tokenizer: PreTrainedTokenizerBase) -> tuple[PreTrainedTokenizerBase, dict[int, int]]:
    """A copy of the tokenizer with each special token a second time, after `MARK`; and the first one's id by its."""
    marking, ids = copy.deepcopy(tokenizer), {}
    for i, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word", "normalized")}
            marking.add_tokens(AddedToken(MARK + token.content, **flags))
            ids[marking.convert_tokens_to_ids(MARK + token.content)] = i
    return marking, ids


def completion_texts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], completions: list[list[int]]
) -> list[str]:
    """Completions as text, without special tokens; with the `<think>` that a template writes at the prompt's end."""
    ends = tokenizer.batch_decode([ids[-10:] for ids in prompts])  # ten tokens hold it in any vocabulary
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    return ["<think>" * end.rstrip().endswith("<think>") + text for end, text in zip(ends, texts, strict=True)]


def most_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[float]:
    """Upper bound of each text's number of tokens, without encoding it; infinite where none is known.

    Byte-level tokenizers make at most one token of an ASCII character, and encode the parts between special tokens
    separately: those that the template writes around every problem, such as the system prompt, are encoded once.
    """
    backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    if backend is None or not isinstance(backend.decoder, ByteLevel) or not isinstance(backend.normalizer, NFC | None):
        return [math.inf] * len(texts)
    divide = any_of(special_tokens_of(tokenizer)).split
    around = sorted({*divide(texts[0])} & {*divide(texts[-1])})
    known = dict(zip(around, map(len, encode(tokenizer, around)), strict=True))

    def bound(text: str) -> float:
        parts = divide(text)
        if not all(part in known or part.isascii() for part in parts):
            return math.inf
        return len(parts) + sum(known.get(part, len(part) + 1) for part in parts)  # + 1: some put a space before

    return [bound(text) for text in texts]
