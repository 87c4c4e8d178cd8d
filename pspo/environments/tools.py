"""Calls of tools, read in the format in which the model's own chat template writes them."""

import json
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from pspo.model.chat import pattern_of, special_token_ids
from pspo.tasks.answers import after_thoughts

Call = tuple[str, dict[str, Any]]  # a tool's name, and its arguments


def parse_calls(tokenizer: PreTrainedTokenizerBase, text: str) -> list[Call]:
    """The calls in a turn of the model's, after its thoughts; what is no call in the template's format is skipped."""
    found = call_format(tokenizer)
    if found is None:
        return []
    opening, name, arguments = found
    text, calls = after_thoughts(text), []
    for part in text.split(opening)[1:] if opening else [text]:
        try:
            call, _ = json.JSONDecoder().raw_decode(part.lstrip())
        except (ValueError, RecursionError):
            continue
        if isinstance(call, dict) and isinstance(call.get(name), str) and isinstance(call.get(arguments), dict):
            calls.append((call[name], call[arguments]))
    return calls


@lru_cache(maxsize=1)
def call_format(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str, str] | None:
    """The text before a call's JSON, and its keys of the name and the arguments; None if the template has no such form.

    `<tool_call>`, "name" and "arguments" in Qwen's; "", "name" and "parameters" in Llama's.
    """
    name, arguments = "a_tool", {"an_argument": "a_value"}
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
            opening = pattern_of(special_token_ids(tokenizer)).sub("", rest[:start]).strip() if content else ""
            return opening, keys[json.dumps(name)], keys[json.dumps(arguments)]
    return None
