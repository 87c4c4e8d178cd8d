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

from pspo.tasks.problem import SYSTEM_PROMPT, Messages, check_chat

# Stands for no character (Unicode, noncharacters). Inside a special token of a user's text it says that this is text:
# the template puts its own special tokens, which have none, around such texts.
MARK = "\ufdd0"


def render_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Messages],
    system_prompt: str = SYSTEM_PROMPT,
    tools: list[Any] | None = None,
) -> list[str]:
    """Render prompts, and tools, with the tokenizer's chat template, up to where the assistant begins.

    A text is the user turn after the system prompt, if that is not ""; a chat that has a system turn keeps it. The
    default is the paper's system prompt, which asks for a number. Special tokens in either are marked, for `encode` to
    take them as text.

    A template that prints the date gets the same one every day, so that a resumed run has the same prompts. Raises
    ValueError if the template fails, as some do on a system turn, or a chat does not end with a user or tool turn.
    """
    source = f"--model.name_or_path: the chat template of {tokenizer.name_or_path}"
    special = pattern_of(special_token_ids(tokenizer))
    conversations = []
    for prompt in prompts:
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        check_chat(turns)
        if system_prompt and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": system_prompt}, *turns]
        conversations.append(mark_special_tokens(special, turns))
    *before, last = conversations[0]
    changed_turn = last | {"content": last["content"] + "?"}
    try:
        template = tokenizer.get_chat_template()
        if "strftime_now" in template:
            date = "26 Jul 2024"  # Llama's templates print it if there is no clock
            template = "{% macro strftime_now(format) %}" + date + "{% endmacro %}\n" + template
        *rendered, changed = tokenizer.apply_chat_template(
            [*conversations, [*before, changed_turn]],
            chat_template=template,
            tools=tools,
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception as error:  # a template is a program that comes with the model
        fix = "if it knows no system turn, set --data.system_prompt ''"
        raise ValueError(f"{source} failed ({error}); {fix}") from error
    if changed == rendered[0]:
        raise ValueError(f"{source} leaves the last turn out: all prompts would be alike")
    return rendered


def drops_thoughts(tokenizer: PreTrainedTokenizerBase, role: str) -> bool:
    """True if the chat template leaves thoughts of the assistant's out once a turn of this role has followed."""
    turns = [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": "<think>\n\0\n</think>\n\n-"},
        {"role": role, "content": "-"},
    ]
    (rendered,) = render_prompts(tokenizer, [turns], system_prompt="")
    return "\0" not in rendered


def mark_special_tokens(special: re.Pattern, value: Any) -> Any:
    """Put `MARK` after the first character of each special token, in a text or in all texts of a chat."""
    if isinstance(value, str):
        return special.sub(lambda match: mark_token(match[0]), value.replace(MARK, ""))
    if isinstance(value, list):
        return [mark_special_tokens(special, part) for part in value]
    if isinstance(value, dict):
        return {mark_special_tokens(special, key): mark_special_tokens(special, part) for key, part in value.items()}
    return value


def mark_token(token: str) -> str:
    return token[0] + MARK + token[1:]


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Ids of the special tokens by their texts."""
    return {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def pattern_of(texts: Iterable[str]) -> re.Pattern:
    """Pattern of the texts, of several at one place the longest."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of rendered prompts, in which the template has written the special tokens."""
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return [encode_marked(tokenizer, text) if MARK in text else ids for text, ids in zip(texts, encoded, strict=True)]


def encode_marked(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a rendered prompt with marks: the special tokens that have one are text, the template's are tokens.

    Marks and tokens change places first. The twin tokenizer knows the marked tokens alone, and so divides the text
    where the tokenizer itself does; text that is divided and encoded piece by piece has other ids where a tokenizer
    puts a space before the first word. Raises ValueError for a tokenizer that cannot encode special tokens as text.
    """
    special = special_token_ids(tokenizer)
    swapped = {token: MARK + token for token in special} | {mark_token(token): token for token in special}
    twin, original_ids = marked_twin(tokenizer)
    twin_text = pattern_of(swapped).sub(lambda match: swapped[match[0]], text)
    ids = twin(twin_text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    text_ids = {special[token] for token in special if mark_token(token) in text} - {tokenizer.unk_token_id}
    if not tokenizer.is_fast or text_ids.intersection(ids):
        raise ValueError(
            f"--model.name_or_path: the tokenizer of {tokenizer.name_or_path} cannot encode special tokens as text: "
            "remove them from the problems"
        )
    return [original_ids.get(i, i) for i in ids]


@lru_cache(maxsize=1)
def marked_twin(tokenizer: PreTrainedTokenizerBase) -> tuple[PreTrainedTokenizerBase, dict[int, int]]:
    """A copy of the tokenizer that also has each special token after a `MARK`; and the special ones' ids by these."""
    twin = copy.deepcopy(tokenizer)
    original_ids = {}
    for i, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            marked = AddedToken(
                MARK + token.content,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                single_word=token.single_word,
                normalized=token.normalized,
            )
            twin.add_tokens(marked)
            original_ids[twin.convert_tokens_to_ids(marked.content)] = i
    return twin, original_ids


def completion_texts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], completions: list[list[int]]
) -> list[str]:
    """Completions as text, without special tokens; with the `<think>` that a template writes at the prompt's end."""
    ends = tokenizer.batch_decode([ids[-10:] for ids in prompts])  # ten tokens hold it in any vocabulary
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    opened = ["<think>" if end.rstrip().endswith("<think>") else "" for end in ends]
    return [start + text for start, text in zip(opened, texts, strict=True)]


def max_token_counts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[float]:
    """Upper bound of each text's number of tokens, without encoding it; infinite where there is none.

    Byte-level tokenizers make at most one token of an ASCII character, and encode the parts between special tokens
    separately: those that the template writes around every problem, such as the system prompt, are encoded once.
    """
    backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    if backend is None or not isinstance(backend.decoder, ByteLevel) or not isinstance(backend.normalizer, NFC | None):
        return [math.inf] * len(texts)
    split = pattern_of(special_token_ids(tokenizer)).split
    shared = sorted({*split(texts[0])} & {*split(texts[-1])})
    shared_counts = dict(zip(shared, map(len, encode(tokenizer, shared)), strict=True))

    def max_count(text: str) -> float:
        parts = split(text)
        if not all(part in shared_counts or part.isascii() for part in parts):
            return math.inf
        special = len(parts) - 1
        return special + sum(shared_counts.get(part, len(part) + 1) for part in parts)  # + 1: a space before, say

    return [max_count(text) for text in texts]
