"""Calls of tools, read in the format in which the model's own chat template writes them."""

import json
from functools import lru_cache
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from pspo.model.chat import special_pattern
from pspo.tasks.answers import after_thoughts

Call = tuple[str, dict[str, Any]]  # a tool's name, and its arguments


class CallFormat(NamedTuple):
    """Form of a call in a chat template: what stands before its JSON, `<tool_call>` in Qwen's, and the JSON's keys."""

    opening: str
    name: str
    arguments: str


def parse_calls(tokenizer: PreTrainedTokenizerBase, text: str) -> list[Call]:
    """The calls in a turn of the model, after its thoughts; what is no call in the template's format is skipped."""
    form = call_format(tokenizer)
    if form is None:
        return []
    text = after_thoughts(text)
    if not form.opening:  # Llama 3.1 begins calls with a special token that its template does not write
        text = special_pattern(tokenizer).sub("", text)
    parts = text.split(form.opening)[1:] if form.opening else [text]
    calls = []
    for part in parts:
        try:
            call, _ = json.JSONDecoder().raw_decode(part.lstrip())
        except (ValueError, RecursionError):
            continue
        if isinstance(call, dict):
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
        chat = [{"role": "user", "content": "-"}, turn]
        template = tokenizer.get_chat_template(tools=[])  # of several, the one for tools
        rendered = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
        _, content, rest = rendered.rpartition("\0")
        before, brace, after = rest.partition("{")
        written, _ = json.JSONDecoder().raw_decode(brace + after)
        keys = {str(value): key for key, value in written.items()}
        return CallFormat(before.strip() if content else "", keys[str(name)], keys[str(arguments)])
    except Exception:  # a template is a program that comes with the model
        return None
