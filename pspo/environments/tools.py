"""Calls of tools, read in the format in which the model's own chat template writes them."""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from pspo.model.chat import pattern_of, special_token_ids
from pspo.tasks.answers import after_thoughts

Call = tuple[str, dict[str, Any]]  # a tool's name, and its arguments


@dataclass(frozen=True)
class CallFormat:
    """How a chat template writes a call.

    Attributes:
        opening: the text before a call's JSON: `<tool_call>` in Qwen's, none in Llama's.
        name, arguments: its keys: "name", and "arguments" in Qwen's, "parameters" in Llama's.
    """

    opening: str
    name: str
    arguments: str


def parse_calls(tokenizer: PreTrainedTokenizerBase, text: str) -> list[Call]:
    """The calls in a turn of the model, after its thoughts; what is no call in the template's format is skipped."""
    form = call_format(tokenizer)
    if form is None:
        return []
    text = after_thoughts(text)
    parts = text.split(form.opening)[1:] if form.opening else [text]
    calls = []
    for part in parts:
        try:
            call, _ = json.JSONDecoder().raw_decode(part.lstrip())
        except (ValueError, RecursionError):
            continue
        if not isinstance(call, dict):
            continue
        name = call.get(form.name)
        arguments = call.get(form.arguments)
        if isinstance(name, str) and isinstance(arguments, dict):
            calls.append((name, arguments))
    return calls


@lru_cache(maxsize=1)
def call_format(tokenizer: PreTrainedTokenizerBase) -> CallFormat | None:
    """The format of the tokenizer's chat template; None if it writes no call as JSON."""
    name = "a_tool"
    arguments = {"an_argument": "a_value"}
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    turn = {"role": "assistant", "content": "\0", "tool_calls": [call]}
    try:
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": "-"}, turn], tokenize=False)
    except Exception:  # a template is a program that comes with the model
        return None
    _, content, rest = rendered.rpartition("\0")
    for start in (i for i, character in enumerate(rest) if character == "{"):
        try:
            written, _ = json.JSONDecoder().raw_decode(rest[start:])
        except ValueError:
            continue
        keys = {json.dumps(value): key for key, value in written.items()}
        if json.dumps(name) in keys and json.dumps(arguments) in keys:
            opening = ""
            if content:
                opening = pattern_of(special_token_ids(tokenizer)).sub("", rest[:start]).strip()
            return CallFormat(opening, keys[json.dumps(name)], keys[json.dumps(arguments)])
    return None
