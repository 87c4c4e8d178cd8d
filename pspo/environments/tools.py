"""Read the tool calls in a turn of the model, in the form that its chat template writes.

    objects    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>      Hermes, Qwen3, Llama 3, Mistral, Phi-4
    named      [TOOL_CALLS]f[ARGS]{"a": 1}                                      Mistral from v11 on, DeepSeek V3
    tagged     <tool_call><function=f><parameter=a>1</parameter> ...            Qwen3-Coder, GLM 4.5, Nemotron 3
    pythonic   [f(a=1, b='x'), g()]                                             Llama 4, LFM2, Gemma

`call_reader` chooses what reads a known call back: the tokenizer's response template, or else one of these forms.
`check_calls` refuses a tokenizer if neither does. Reading takes time linear in the text and raises nothing.
"""

import ast
import contextlib
import itertools
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from pspo.tasks.answers import after_thoughts
from pspo.tasks.problem import MakeEnvironment, open_environment

Call = tuple[str, dict[str, Any]]  # a tool's name, and its arguments
Schemas = dict[str, dict[str, Any]]  # JSON schemas of arguments, by tool and argument
CALL_ID = "call00000"  # nine letters and digits, as Mistral's templates demand
MAX_CALLS = 100  # read in a turn: each head that is refused costs a pass over the turn
SEPARATOR = re.compile(r"[\s;,]*+")  # between JSON objects, such as Llama 3's calls
TOOL = r"\s*+(?P<tool>[\w.:/-]{1,200}+)"
KEY = r"(?P<key>[\w.-]{1,200}+)"
PARAMETER = rf"\s*+(?:<parameter={KEY}>\n?(?P<value>.*?)\n?</parameter>|(?P<close></function>))"
ARG_KEY = rf"\s*+(?:<arg_key>{KEY}</arg_key>\s*+<arg_value>(?P<value>.*?)</arg_value>|(?P<close></tool_call>))"
WORDS = "\ufdd2"  # stands for words of the model; JSON leaves it as it is
PROBE = ("a_tool", {"an_argument": "a_value", "another_one": "other_value"})
JSON_WORDS = {"true": True, "false": False, "null": None}
UNREADABLE = (ValueError, LookupError, SyntaxError, AttributeError, TypeError, RecursionError, MemoryError)
FAMILIES = {  # model families by a mark in their chat templates
    "<|channel|>": "gpt-oss", "<|tool_call>": "Gemma 4", "<start_function_call>": "FunctionGemma",
    "<|tool_calls_section_begin|>": "Kimi K2", "｜DSML｜": "DeepSeek V3.2", "<｜tool▁call▁begin｜>": "DeepSeek V3",
    "[TOOL_CALLS]": "Mistral", "<parameter=": "Qwen3-Coder", "<arg_key>": "GLM 4.5", "<|tool_call|>": "Phi-4",
    "<invoke": "MiniMax M2", "<|START_ACTION|>": "Command A", "<|python_tag|>": "Llama 3", "<tool_call>": "Hermes",
}  # fmt: skip


class JsonWords(ast.NodeTransformer):
    """Turn JSON's words into constants for `ast.literal_eval`, which evaluates no names."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_WORDS[node.id]) if node.id in JSON_WORDS else node


def read_json(text: str, start: int) -> tuple[list[Any], int]:
    """The JSON values from ``start`` on, a list's one by one, and the place where the last one ends."""
    values = []
    with contextlib.suppress(ValueError, RecursionError):
        while True:
            value, start = json.JSONDecoder().raw_decode(text, SEPARATOR.match(text, start).end())
            values += value if isinstance(value, list) else [value]
    return values, start


def read_objects(head: re.Match, schemas: Schemas) -> tuple[list[Any], int]:
    """Read calls as JSON objects; behind a head with the tool's name, read one object as its arguments."""
    values, end = read_json(head.string, head.end())
    if "tool" in head.re.groupindex:
        values = [{"name": head["tool"], "arguments": value} for value in values[:1]]
    return values, end


def read_tagged(argument: str, head: re.Match, schemas: Schemas) -> tuple[list[Any], int]:
    """Read arguments between tags: as texts where their schema takes texts, else as literals if they are literals."""
    end = head.end()
    arguments = {}
    while (match := re.compile(argument, re.DOTALL).match(head.string, end)) is not None:
        end = match.end()
        if match["close"]:
            return [{"name": head["tool"], "arguments": arguments}], end
        value = match["value"]
        if not takes_text(schemas.get(head["tool"], {}).get(match["key"], {})):
            with contextlib.suppress(*UNREADABLE):
                value = ast.literal_eval(JsonWords().visit(ast.parse(value.strip(), mode="eval")))
        arguments[match["key"]] = value
    return [], end


def read_pythonic(head: re.Match, schemas: Schemas) -> tuple[list[Any], int]:
    """Read a list of calls in Python, with keyword arguments, up to the last bracket of the text."""
    text = head.string
    source = text[head.start() : text.rfind("]") + 1]
    nodes = []
    for written in (source, source.replace("\n", "\\n")):  # some templates write line breaks of texts as they are
        with warnings.catch_warnings(action="ignore"), contextlib.suppress(*UNREADABLE):  # warnings of unknown escapes
            nodes = nodes or ast.parse(written, mode="eval").body.elts
    calls = []
    for node in nodes:
        with contextlib.suppress(*UNREADABLE):
            arguments = {each.arg: ast.literal_eval(JsonWords().visit(each.value)) for each in node.keywords}
            if not node.args and None not in arguments:  # None is the key of **
                calls.append({"name": ast.unparse(node.func), "arguments": arguments})
    return calls, len(text)


class Form(NamedTuple):
    """How chat templates write calls."""

    head: str  # pattern of what stands before a call, or before its arguments if the head has the tool's name
    read: Callable[[re.Match, Schemas], tuple[list[Any], int]]  # calls behind a head, as objects, and where they end
    key: str = "arguments"  # key of the arguments in these objects


FORMS = (  # `call_reader` adds objects behind whatever the template writes before them
    Form(rf"\[TOOL_CALLS\]{TOOL}(?:\[CALL_ID\]\w++)?\[ARGS\]", read_objects),
    Form(rf"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?{TOOL}(?:\s*+```json|<｜tool▁sep｜>)", read_objects),
    Form(rf"<function={TOOL}>", partial(read_tagged, PARAMETER)),
    Form(rf"<tool_call>{TOOL}", partial(read_tagged, ARG_KEY)),
    Form(r"\[(?=\s*+[\w.]++\()", read_pythonic),
)


def read_calls(text: str, form: Form, schemas: Schemas) -> list[Call]:
    """The calls that a text holds in a form."""
    calls = []
    end = 0
    for _ in range(MAX_CALLS):
        head = re.compile(form.head).search(text, end)
        if head is None:
            break
        values, end = form.read(head, schemas)
        calls += [call for value in values for call in object_calls(value, form.key)]
    return calls


def object_calls(value: Any, key: str) -> list[Call]:
    """The call in an object or in its "function", as a list, empty without one; arguments may be JSON in a text."""
    value = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(value, dict):
        return []
    arguments = value.get(key)
    if isinstance(arguments, str):
        arguments = next(iter(read_json(arguments, 0)[0]), None)
    is_call = isinstance(value.get("name"), str) and isinstance(arguments, dict)
    return [(value["name"], arguments)] if is_call else []


@dataclass(frozen=True)
class CallReader:
    """Reads the calls in turns of the model."""

    schemas: Schemas  # the tools' arguments
    form: Form | None  # the chat template's
    parse_response: Callable[[str], dict[str, Any]] | None  # the tokenizer's response template, tried first

    def read(self, text: str) -> list[Call]:
        """The calls in a turn behind its thoughts; anything that is no call is skipped."""
        text = after_thoughts(text)
        if self.parse_response is not None:
            with contextlib.suppress(*UNREADABLE):  # a response template refuses a turn with one bad call
                calls = self.parse_response(text).get("tool_calls") or []
                return [call for each in calls for call in object_calls(each, "arguments")]
        return [] if self.form is None else read_calls(text, self.form, self.schemas)


def argument_schemas(tools: list[Any] | None) -> Schemas:
    """Schemas of tools that are functions or JSON schemas."""
    schemas = {}
    for tool in tools or []:
        schema = tool if isinstance(tool, dict) else get_json_schema(tool)
        schema = schema.get("function", schema)
        schemas[schema["name"]] = (schema.get("parameters") or {}).get("properties") or {}
    return schemas


def takes_text(schema: dict[str, Any]) -> bool:
    """True if a JSON schema allows texts."""
    choices = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return any("string" in (choice.get("type") or ()) for choice in choices)


def tool_call(name: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    return {"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": arguments}}


def write_calls(tokenizer: PreTrainedTokenizerBase, calls: list[Call]) -> str:
    """What the chat template writes for a turn with these calls; ValueError if it writes none."""
    template = tokenizer.get_chat_template(tools=[])  # the one for tools, if there are several
    first_error = None
    for content, is_text in itertools.product(("", None), (False, True)):  # DeepSeek V3's takes arguments as JSON
        turns = [tool_call(name, json.dumps(arguments) if is_text else arguments) for name, arguments in calls]
        last_turns = ({"content": WORDS}, {"content": content, "tool_calls": turns})
        chats = [[{"role": "user", "content": "-"}, {"role": "assistant"} | turn] for turn in last_turns]
        try:
            plain, rendered = tokenizer.apply_chat_template(chats, chat_template=template, tokenize=False)
        except Exception as error:  # a template is a program that comes with the model
            first_error = first_error or error
            continue
        written = rendered.removeprefix(plain.partition(WORDS)[0].rstrip())
        if calls[0][0] in written:
            return written
    raise first_error or ValueError("it writes no calls")


def call_reader(tokenizer: PreTrainedTokenizerBase, tools: list[Any]) -> CallReader:
    """The reader of calls as the tokenizer's chat template writes them; it reads none if it does not know the form."""
    try:
        written = write_calls(tokenizer, [PROBE])
    except Exception:  # a template is a program that comes with the model
        written = ""
    opening = written.partition("{")[0].rstrip("[ \n").split()[-1:]
    head = re.escape(opening[0]) if opening else r"\A\s*+(?:<\|python_tag\|>)?"  # Llama 3.1's token, in no template
    objects = (Form(head, read_objects, key) for key in ("arguments", "parameters"))
    form = next((form for form in (*objects, *FORMS) if read_calls(written, form, {}) == [PROBE]), None)
    schemas = argument_schemas(tools)
    by_responses = CallReader(schemas, None, partial(tokenizer.parse_response, prefix="", tools=tools))
    return CallReader(schemas, form, by_responses.parse_response if by_responses.read(written) == [PROBE] else None)


def check_calls(tokenizer: PreTrainedTokenizerBase, make_environment: MakeEnvironment) -> CallReader | None:
    """The reader of calls of the environment's tools, if any; ValueError if it cannot read what the template writes."""
    with contextlib.ExitStack() as stack:
        environment = open_environment(make_environment, stack)
        if not hasattr(environment, "tools"):
            return None
        reader = call_reader(tokenizer, environment.tools)
    samples = {"integer": 7, "number": 1.5, "boolean": True, "array": ["x", 1], "object": {"k": "x"}}
    calls = []
    for name, schemas in reader.schemas.items():
        values = {key: samples.get(str(schema.get("type")), '7 "é"\nx') for key, schema in schemas.items()}
        calls.append((name, values))
    for several in filter(None, (*([call] for call in calls), calls + calls[:1])):
        try:
            text = write_calls(tokenizer, several)
            reason = f"it writes {text!r:.200}"
            is_read = reader.read(text) == several
        except Exception as error:  # a template is a program that comes with the model
            reason = f"it fails: {error}"
            is_read = len(several) > 1  # Llama 3.1's template allows one call
        if not is_read:
            template = str(tokenizer.get_chat_template(tools=[]))
            family = next((f" ({family}'s)" for mark, family in FAMILIES.items() if mark in template), "")
            fix = "use a tokenizer with a response template, another --data.chat_template, or no tools"
            raise ValueError(f"tool calls of the chat template{family} cannot be read back; {reason}: {fix}")
    return reader
