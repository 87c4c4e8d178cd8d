"""Read the tool calls in a turn of the model, in the format of its own chat template."""

import contextlib
import json
import re
from functools import lru_cache
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from pspo.model.chat import special_pattern
from pspo.tasks.answers import after_thoughts

Call = tuple[str, dict[str, Any]]  # a tool's name, and its arguments
CALL_ID = "call00000"  # nine letters and digits, as Mistral's templates demand
MAX_CALLS = 1000  # in a turn: each that is refused costs a pass over the turn
BLANKS = re.compile(r"\s*+")


class CallFormat(NamedTuple):
    """Form of a call in a chat template: what stands before its JSON, `<tool_call>` in Qwen's, and the JSON's keys."""

    opening: str
    name: str
    arguments: str


def parse_calls(tokenizer: PreTrainedTokenizerBase, text: str, tools: list[Any] | None = None) -> list[Call]:
    """The calls in a turn of the model, after its thoughts; what is no call in the template's format is skipped.

    Arguments may be an object, a text that is one, or left out.
    """
    text = after_thoughts(text)
    form = CallFormat("call", "name", "arguments")
    try:  # the tokenizer's own response template, which refuses a turn with one bad call, or is not there
        objects = [call["function"] for call in tokenizer.parse_response(text, prefix="", tools=tools)["tool_calls"]]
    except Exception:
        form = call_format(tokenizer)
        objects = [] if form is None else read_objects(tokenizer, text, form.opening)
    calls = []
    for call in objects:
        with contextlib.suppress(LookupError, TypeError, ValueError, RecursionError):
            arguments = call[form.arguments] if len(call) > 1 or not form.opening else {}
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {}
            if isinstance(call[form.name], str) and isinstance(arguments, dict):
                calls.append((call[form.name], arguments))
    return calls


def read_objects(tokenizer: PreTrainedTokenizerBase, text: str, opening: str) -> list[Any]:
    """What stands as JSON behind each opening, None where it is none; lists are taken apart."""
    if not opening:  # Llama 3.1 begins calls with a special token that its template does not write
        text = special_pattern(tokenizer).sub("", text)
    objects = []
    start = text.find(opening)
    while start >= 0 and len(objects) < MAX_CALLS:
        start += len(opening)
        value = None
        with contextlib.suppress(ValueError, RecursionError):
            value, start = json.JSONDecoder().raw_decode(text, BLANKS.match(text, start).end())
        objects += value if isinstance(value, list) else [value]
        start = text.find(opening, start) if opening else -1  # behind the call, whose texts hold no calls
    return objects


@lru_cache(maxsize=1)
def call_format(tokenizer: PreTrainedTokenizerBase) -> CallFormat | None:
    """The format of the tokenizer's chat template; None if it writes no call as JSON."""
    name = "a_tool"
    arguments = {"an_argument": "a_value"}
    call = {"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": arguments}}
    turn = {"role": "assistant", "content": "\0"}
    chats = [[{"role": "user", "content": "-"}, last] for last in (turn, turn | {"tool_calls": [call]})]
    try:
        template = tokenizer.get_chat_template(tools=[])  # of several, the one for tools
        plain, rendered = tokenizer.apply_chat_template(chats, chat_template=template, tokenize=False)
        _, content, rest = rendered.rpartition("\0")
        if not content:  # the call is written without the words
            rest = rendered[plain.index("\0") :]
        before, brace, after = rest.partition("{")
        written, _ = json.JSONDecoder().raw_decode(brace + after)
        keys = {str(value): key for key, value in written.items()}
        opening = before.strip().removesuffix("[").rstrip()  # Mistral writes a list of calls
        return CallFormat(opening, keys[str(name)], keys[str(arguments)])
    except Exception:  # a template is a program that comes with the model
        return None
