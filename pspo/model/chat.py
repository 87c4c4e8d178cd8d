"""Render chats with the model's template; special tokens in users' texts are broken up."""

import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from pspo.tasks.problem import SYSTEM_PROMPT, Messages, check_chat, check_unicode, content_text

# Fixes the date that templates print, so that a resumed run has the same prompts; Llama's prints it without a clock.
CLOCK = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}\n"


def render_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Messages],
    system_prompt: str = SYSTEM_PROMPT,
    tools: list[Any] | None = None,
) -> list[str]:
    """Render prompts, and tools, with the tokenizer's chat template, up to the beginning of the assistant's turn.

    A text becomes a user turn. The system prompt, unless "", begins each chat that has no system turn. Special tokens
    in texts are broken up. Raises ValueError for a chat that `check_chat` refuses, or if the template fails, as
    some do on a system turn.
    """
    check_unicode(system_prompt, "--data.system_prompt")
    chats = []
    for prompt in prompts:
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        check_chat(turns)
        if system_prompt and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": system_prompt}, *turns]
        chats.append(turns)
    try:
        template = tokenizer.get_chat_template(tools=tools)
        if "strftime_now" in template:
            template = CLOCK + template
        special = special_pattern(tokenizer)
        chats = [break_special_tokens(special, [join_parts(turn) for turn in chat]) for chat in chats]
        return tokenizer.apply_chat_template(
            chats, chat_template=template, tools=tools, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is a program that comes with the model
        fix = "if it knows no system turn, set --data.system_prompt ''; --data.chat_template brings another template"
        raise ValueError(f"the chat template of {tokenizer.name_or_path} failed ({error}); {fix}") from error


def join_parts(turn: dict[str, Any]) -> dict[str, Any]:
    """The turn with its parts joined into one text: some templates write the first part alone."""
    return turn | {"content": content_text(turn)} if isinstance(turn.get("content"), list) else turn


def break_special_tokens(special: re.Pattern, value: Any) -> Any:
    """Put a blank after the first character of each special token, in a text or in all texts of a chat."""
    if isinstance(value, str):
        broken = special.sub(lambda match: f"{match[0][0]} {match[0][1:]}", value)
        return special.sub(" ", broken)  # special tokens of one character remain
    if isinstance(value, list):
        return [break_special_tokens(special, part) for part in value]
    if isinstance(value, dict):
        return {break_special_tokens(special, key): break_special_tokens(special, part) for key, part in value.items()}
    return value


def special_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern:
    """Pattern of the special tokens' texts; where several match, it takes the longest."""
    tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of rendered prompts."""
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
