"""Read the tool calls in a turn of the model, in the form that its chat template writes.

The form is learnt from what the template writes for calls that are known, and `check_calls` refuses a template whose
calls are not read back as they were put in. There are four:

    objects    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>      Hermes, Qwen3, Llama 3, Mistral, Phi-4
    named      [TOOL_CALLS]f[ARGS]{"a": 1}                                      Mistral from v11 on, DeepSeek V3
    tagged     <tool_call><function=f><parameter=a>1</parameter> ...            Qwen3-Coder, GLM 4.5, Nemotron 3
    pythonic   [f(a=1, b='x'), g()]                                             Llama 4, LFM2, Gemma

A tokenizer's own response template goes before these. What the model writes is hostile: reading takes time linear in
the text and raises nothing.
"""

import ast
import contextlib
import itertools
import json
import re
import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from pspo.model.chat import special_pattern
from pspo.tasks.answers import after_thoughts
from pspo.tasks.environment import MakeEnvironment, open_environment

Call = tuple[str, dict[str, Any]]  # a tool's name, and its arguments
CALL_ID = "call00000"  # nine letters and digits, as Mistral's templates demand
MAX_CALLS = 1000  # in a turn: each that is refused costs a pass over the turn
BLANKS = re.compile(r"\s*+")
SEPARATOR = re.compile(r"\s*+[;,]?\s*+")  # of Llama 3's calls
TOOL = r"(?P<tool>[\w.:/-]{1,200}+)"
WORDS = "\ufdd2"  # of the model, before its calls
PROBE = ("a_tool", {"an_argument": "a_value", "another_one": "other_value"})
PYTHON_TOKEN = re.compile(r"""(?s)"(?:[^"\\]++|\\.)*+"|'(?:[^'\\]++|\\.)*+'|[\[({]|[\])}]|,|[^"'\[\](){},]++""")
FAMILIES = {  # by what their templates write
    "<|channel|>": "gpt-oss", "<|tool_call>": "Gemma 4", "<start_function_call>": "FunctionGemma",
    "<|tool_calls_section_begin|>": "Kimi K2", "｜DSML｜": "DeepSeek V3.2", "<｜tool▁call▁begin｜>": "DeepSeek V3",
    "[TOOL_CALLS]": "Mistral", "<parameter=": "Qwen3-Coder", "<arg_key>": "GLM 4.5", "<|tool_call|>": "Phi-4",
    "<invoke": "MiniMax M2", "<|START_ACTION|>": "Command A", "<|python_tag|>": "Llama 3", "<tool_call>": "Hermes",
}  # fmt: skip


class CallForm(NamedTuple):
    """How a chat template writes calls.

    Attributes:
        kind: objects, named, tagged or pythonic.
        opening: text before each call, "" if it stands alone.
        name, arguments: of objects, keys of the tool's name and of its arguments.
        middle: pattern between the tool's name and its arguments.
        key, value, end: of tagged arguments, texts before the key, before the value and behind it.
        close: what follows the last of them.
    """

    kind: str
    opening: str
    name: str = ""
    arguments: str = ""
    middle: str = ""
    key: str = ""
    value: str = ""
    end: str = ""
    close: str = ""


def parse_calls(tokenizer: PreTrainedTokenizerBase, text: str, tools: list[Any] | None = None) -> list[Call]:
    """The calls in a turn of the model, after its thoughts; what is no call in the template's form is skipped.

    Arguments may be an object, a text that is one, or left out.
    """
    text = after_thoughts(text)
    form = CallForm("objects", "call", "name", "arguments")
    try:  # the tokenizer's own response template, which refuses a turn with one bad call, or is not there
        objects = [call["function"] for call in tokenizer.parse_response(text, prefix="", tools=tools)["tool_calls"]]
    except Exception:
        form = call_form(tokenizer, str(tokenizer.chat_template))
        if form is None:
            return []
        if form.kind == "named":
            return list(read_named(text, form))
        if form.kind == "tagged":
            return list(read_tagged(text, form, argument_types(tools)))
        if form.kind == "pythonic":
            return list(read_pythonic(text, form))
        objects = read_objects(tokenizer, text, form)
    calls = []
    for call in objects:
        with contextlib.suppress(LookupError, TypeError, ValueError, RecursionError):
            arguments = call[form.arguments] if len(call) > 1 or not form.opening else {}
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {}
            if isinstance(call[form.name], str) and isinstance(arguments, dict):
                calls.append((call[form.name], arguments))
    return calls


def read_json(text: str, start: int) -> tuple[Any, int]:
    """The JSON that begins here, after blanks, and where it ends; None and ``start`` if there is none."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.JSONDecoder().raw_decode(text, BLANKS.match(text, start).end())
    return None, start


def read_objects(tokenizer: PreTrainedTokenizerBase, text: str, form: CallForm) -> Iterator[Any]:
    """Yield the JSON objects behind each opening; lists are taken apart, and of nested objects it is the one named."""
    if not form.opening:  # Llama 3.1 begins calls with a special token that its template does not write
        text = special_pattern(tokenizer).sub("", text)
    start = text.find(form.opening) + len(form.opening)
    for _ in range(MAX_CALLS):
        if start < len(form.opening):
            break
        value, end = read_json(text, start)
        for part in value if isinstance(value, list) else [value]:
            nested = [part, *part.values()] if isinstance(part, dict) else [part]
            yield next((each for each in nested if isinstance(each, dict) and form.name in each), part)
        start = SEPARATOR.match(text, end).end()
        if value is None or not text.startswith("{", start):  # behind the call, whose texts hold no calls
            start = (text.find(form.opening, end) if form.opening else -1) + len(form.opening)


def blank_tolerant(text: str) -> str:
    """Pattern of a text, with any white space where it has some."""
    return r"\s*+".join(map(re.escape, text.split()))


def read_named(text: str, form: CallForm) -> Iterator[Call]:
    """Yield calls whose tool's name stands before the JSON of their arguments."""
    head = re.compile(rf"{blank_tolerant(form.opening)}\s*+{TOOL}{form.middle}")
    match = head.search(text)
    for _ in range(MAX_CALLS):
        if match is None:
            break
        value, end = read_json(text, match.end())
        if isinstance(value, dict):
            yield match["tool"], value
        match = head.search(text, max(end, match.end()))


def read_tagged(text: str, form: CallForm, types: dict[str, dict[str, set[str]]]) -> Iterator[Call]:
    """Yield calls whose arguments stand between tags, as texts: the tools' schemas say which are none."""
    head = re.compile(rf"{blank_tolerant(form.opening)}\s*+{TOOL}{form.middle}")
    key = re.compile(rf"\s*+{blank_tolerant(form.key)}(?P<key>[\w.-]{{1,200}}+){blank_tolerant(form.value)}")
    match = head.search(text)
    for _ in range(MAX_CALLS):
        if match is None:
            break
        name = match["tool"]
        arguments = {}
        end = match.end()
        while (match := key.match(text, end)) is not None:
            stop = text.find(form.end.strip(), match.end())
            if stop < 0:
                return
            value = text[match.end() : stop]
            value = value.removeprefix("\n") if form.value.endswith("\n") else value
            value = value.removesuffix("\n") if form.end.startswith("\n") else value
            arguments[match["key"]] = typed_value(value, types.get(name, {}).get(match["key"], set()))
            end = stop + len(form.end.strip())
        if text.startswith(form.close, BLANKS.match(text, end).end()):
            yield name, arguments
        match = head.search(text, end)


def read_pythonic(text: str, form: CallForm) -> Iterator[Call]:
    """Yield calls that are written as Python's, with keyword arguments alone."""
    head = re.compile(rf"\s*+,?\s*+{TOOL}\(")
    start = text.find(form.opening)
    for _ in range(MAX_CALLS):
        if start < 0:
            break
        match = head.match(text, start + len(form.opening))
        while match is not None:
            pieces, end = split_arguments(text, match.end())
            if pieces is None:
                return
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
                pairs = [piece.split("=", 1) for piece in pieces]
                yield match["tool"], {key.strip(): python_value(value.strip()) for key, value in pairs}
            start = end
            match = head.match(text, end)
        start = text.find(form.opening, start + 1)


def split_arguments(text: str, start: int) -> tuple[list[str] | None, int]:
    """The arguments up to the `)` of a call, and what follows it; None if there is no such end."""
    pieces = []
    depth = 0
    begin = end = start
    for token in PYTHON_TOKEN.finditer(text, start):
        if token.start() != end:  # a quote that is never closed
            break
        end = token.end()
        if token[0] in "[({":
            depth += 1
        elif token[0] in "])}":
            depth -= 1
        if depth < 0 or (depth == 0 and token[0] == ","):
            pieces.append(text[begin : token.start()])
            begin = end
        if depth < 0:
            return [piece for piece in pieces if piece.strip()], end
    return None, end


def python_value(text: str) -> Any:
    """A literal of JSON or Python; nothing is evaluated."""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    with warnings.catch_warnings(action="ignore"):  # of unknown escapes
        try:
            return ast.literal_eval(text)
        except SyntaxError:  # LFM2.5's template writes the line breaks of texts as they are
            return ast.literal_eval(text.replace("\n", "\\n"))


def typed_value(text: str, types: set[str]) -> Any:
    """A value of a tagged argument: a text where its schema has texts, else a literal of JSON or Python, if it is."""
    if "string" in types and not (text in ("null", "None") and "null" in types):
        return text
    with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return python_value(text.strip())
    return text


def schemas(tools: list[Any] | None) -> list[dict[str, Any]]:
    """The JSON schemas of tools that are functions or such schemas."""
    found = [tool if isinstance(tool, dict) else get_json_schema(tool) for tool in tools or []]
    return [schema.get("function", schema) for schema in found]


def argument_types(tools: list[Any] | None) -> dict[str, dict[str, set[str]]]:
    """JSON types by tool and argument, {} where a schema says none."""
    found = {}
    for schema in schemas(tools):
        arguments = (schema.get("parameters") or {}).get("properties") or {}
        found[schema["name"]] = {name: schema_types(argument) for name, argument in arguments.items()}
    return found


def schema_types(schema: dict[str, Any]) -> set[str]:
    named = schema.get("type") or []
    types = {named} if isinstance(named, str) else {*named}
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        types |= schema_types(choice)
    if schema.get("nullable"):
        types.add("null")
    if any(isinstance(value, str) for value in schema.get("enum", ())):
        types.add("string")
    return types


def tool_call(name: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    return {"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": arguments}}


def common_prefix(one: str, other: str) -> str:
    pairs = zip(one, other, strict=False)
    return "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def write_calls(tokenizer: PreTrainedTokenizerBase, calls: list[Call]) -> str:
    """What the chat template writes for a turn with these calls; ValueError if it writes none, its own error otherwise.

    Arguments are an object, or its JSON for a template that takes text, such as DeepSeek V3's.
    """
    template = tokenizer.get_chat_template(tools=[])  # of several, the one for tools
    turn = {"role": "assistant", "content": WORDS}
    first_error = None
    for content, is_text in itertools.product((WORDS, None), (False, True)):
        turns = [tool_call(name, json.dumps(arguments) if is_text else arguments) for name, arguments in calls]
        last_turns = (turn, {"role": "assistant", "content": content, "tool_calls": turns})
        chats = [[{"role": "user", "content": "-"}, last] for last in last_turns]
        try:
            plain, rendered = tokenizer.apply_chat_template(chats, chat_template=template, tokenize=False)
        except Exception as error:  # a template is a program that comes with the model
            first_error = first_error or error
            continue
        before, _, tail = plain.partition(WORDS)
        written = rendered.rpartition(WORDS)[2].removesuffix(tail)
        if WORDS not in rendered or calls[0][0] not in written:  # without the words, or before them
            written = rendered[len(common_prefix(before, rendered)) :].removesuffix(tail)
        if calls[0][0] in written:
            return written
    raise first_error or ValueError("it writes no calls")


@lru_cache(maxsize=1)
def call_form(tokenizer: PreTrainedTokenizerBase, template: str) -> CallForm | None:
    """The form of calls in the tokenizer's chat template, this text; None if it is none of those that are read."""
    try:
        one = write_calls(tokenizer, [PROBE])
    except Exception:  # a template is a program that comes with the model
        return None
    form, start, end = learn_form(one)
    if form is None or "<|start|>" in one:  # gpt-oss calls in a turn of its own
        return None
    try:
        two = write_calls(tokenizer, [PROBE, PROBE])
    except Exception:  # Llama 3.1's allows one call
        return form
    _, second, _ = learn_form(two[end:])
    if second is not None:  # what outer tags stand before the first alone
        between = two[end : end + second]
        opening = common_prefix(one[:start][::-1], between[::-1])[::-1]
        if opening.strip() and len(opening) < start:
            form = form._replace(opening=opening[max(opening.find("<"), 0) :].strip())
    return form


def learn_form(text: str) -> tuple[CallForm | None, int | None, int]:
    """The form of the first call of `PROBE` in a text; where its name or object begins, and where its arguments end."""
    name, arguments = PROBE
    for brace in re.finditer(r"\{", text):
        value, end = read_json(text, brace.start())
        if value == arguments and name in text[: brace.start()]:
            start = text.rindex(name, 0, brace.start())
            middle = re.escape(text[start + len(name) : brace.start()].strip()).replace(CALL_ID, r"\w{1,64}+")
            return CallForm("named", text[:start].strip(), middle=rf"\s*+{middle}"), start, end
        keys = object_keys(value)
        if keys is not None:
            opening = text[: brace.start()].strip().removesuffix("[").rstrip()  # Mistral writes a list of calls
            return CallForm("objects", opening, *keys), brace.start(), end
    places = []
    end = 0
    for word in (name, *(word for pair in arguments.items() for word in pair)):
        places.append((text.find(word, end), end := text.find(word, end) + len(word)))
    if min(start for start, _ in places) < 0:
        return None, None, 0
    before_key, value, before_next = (text[places[i][1] : places[i + 1][0]] for i in range(3))
    start = places[0][0]
    if before_key.startswith("("):
        return CallForm("pythonic", text[:start].strip()), start, end
    key = common_prefix(before_key[::-1], before_next[::-1])[::-1]
    key = key[max(key.find("<"), 0) :]
    middle = rf"\s*+{re.escape(before_key.removesuffix(key).strip())}"
    tag_end = before_next.removesuffix(key)
    if not (key.strip() and value.strip() and tag_end.strip()):
        return None, None, 0
    behind = text[end:].lstrip().removeprefix(tag_end.strip()).lstrip()
    tags = {"key": key, "value": value, "end": tag_end, "close": behind[: behind.find(">") + 1]}
    return CallForm("tagged", text[:start].strip(), middle=middle, **tags), start, end


def object_keys(value: Any) -> tuple[str, str] | None:
    """Keys of the tool's name and of its arguments in an object that is the call of `PROBE`, or that holds it."""
    if not isinstance(value, dict):
        return None
    keys = {}
    for key, part in value.items():
        with contextlib.suppress(ValueError):
            part = json.loads(part) if isinstance(part, str) and part.startswith("{") else part
        for kind in (0, 1):
            if part == PROBE[kind]:
                keys[kind] = key
    nested = (object_keys(part) for part in value.values())
    return (keys[0], keys[1]) if len(keys) == 2 else next(filter(None, nested), None)


def check_calls(tokenizer: PreTrainedTokenizerBase, make_environment: MakeEnvironment) -> None:
    """ValueError unless calls of the environment's tools that the chat template writes are read as they were put in."""
    with contextlib.ExitStack() as stack:
        tools = getattr(open_environment(make_environment, stack), "tools", None)
    samples = {"integer": 7, "number": 1.5, "boolean": True, "array": ["x", 1], "object": {"k": "x"}}
    calls = []
    for name, types in argument_types(tools).items():
        values = {key: next((samples[t] for t in samples if t in kinds), '7 "é"\nx') for key, kinds in types.items()}
        calls.append((name, values))
    for several in filter(None, (*([call] for call in calls), calls + calls[:1])):
        try:
            text = write_calls(tokenizer, several)
            reason = f"it writes {text!r:.200}"
            is_read = parse_calls(tokenizer, text, tools) == several
        except Exception as error:  # a template is a program that comes with the model
            reason = f"it fails: {error}"
            is_read = len(several) > 1  # Llama 3.1's allows one call
        if not is_read:
            template = str(tokenizer.get_chat_template(tools=[]))
            family = next((f" ({family}'s)" for mark, family in FAMILIES.items() if mark in template), "")
            fix = "use a tokenizer with a response template, another --data.chat_template, or no tools"
            raise ValueError(f"tool calls of the chat template{family} cannot be read back; {reason}: {fix}")
