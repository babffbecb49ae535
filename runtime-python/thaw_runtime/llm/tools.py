"""The tools of a chat request: puts them into the prompt, makes the grammar of the calls, and finds the calls in the
answer.

A *format* is the text around a call.  Each call is written exactly as the format says, because the grammar lets the
model write nothing else: with ``tool_choice`` auto from the format's trigger on, else from the first token.

::

    <tool_call>⏎{"name": "add", "arguments": {"a": 1}}⏎</tool_call>      hermes (and Qwen)
    {"name": "add", "parameters": {"a": 1}}                              llama3_json
    ╰─ begin ──╯    ╰─ middle ──╯ ╰ object ╯╰── end ──╯

If a model's template does not know tools, the system message describes them, and the model calls them in the first
format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from relay.protocol.messages import CallDelta
from thaw.errors import BadParameter
from thaw_runtime.engine.protocol import Grammar, GrammarKind
from thaw_runtime.llm.grammar_request import check_bounds, grammar_of


@dataclass(frozen=True, slots=True)
class ToolFormat:
    trigger: str
    begin: str
    middle: str
    end: str
    separator: str


HERMES: Final = ToolFormat(
    "<tool_call>", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n"
)
LLAMA3_JSON: Final = ToolFormat('{"name": "', '{"name": "', '", "parameters": ', "}", separator="; ")
FORMATS: Final = {"hermes": HERMES, "llama3_json": LLAMA3_JSON}
_SEPARATORS: Final = " \n;"
_INTRODUCTION: Final = """You can call functions. Their signatures are:
<tools>
{tools}
</tools>
For each call, write a JSON object with the name and the arguments of the function:
<tool_call>
{{"name": NAME, "arguments": ARGUMENTS}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and the rules for calling them.  ``offered`` go into the prompt."""

    offered: tuple[Mapping[str, Any], ...] = ()
    format: ToolFormat | None = None  # the format of calls in the answer
    grammar: Grammar | None = None
    is_named: bool = False  # the request chose the function


def tool_use(body: Mapping[str, Any], known: ToolFormat | None) -> ToolUse:
    """``known`` is the model's format of tool calls, learnt in training or set in the function's config.  Raises
    BadParameter."""
    tools, choice = body.get("tools") or (), body.get("tool_choice") or "auto"
    if not tools or choice == "none":
        return ToolUse(grammar=grammar_of(body))
    free = grammar_of({name: value for name, value in body.items() if name != "response_format"})
    if free is not None:
        raise BadParameter(free.param, "an answer that may call tools has their form, and response_format's")
    if known is None and choice == "auto":
        raise BadParameter(
            "tool_choice",
            "this model's template writes calls in a form that Thaw does not know",
            hint="set engine.tool_parser in the function's config, or tool_choice",
        )
    form = known or HERMES
    is_named = isinstance(choice, dict)
    functions = {f"tools[{i}].function.parameters": tool["function"] for i, tool in enumerate(tools)}
    if isinstance(choice, dict):
        functions = {at: f for at, f in functions.items() if f["name"] == choice["function"]["name"]}
    is_single = is_named or body.get("parallel_tool_calls") is False
    tags, params = [_tag(form, function) for function in functions.values()], list(functions)
    if choice == "auto":
        answer = grammar_of(body)
        rules = _or_text(form, tags, answer, is_single=is_single)
        params = params if answer is None else [answer.param, *params]
    else:
        rules = _calls(form, tags, is_single=is_single)
    text = json.dumps({"type": "structural_tag", "format": rules})
    grammar = Grammar(GrammarKind.STRUCTURAL_TAG, text, "tools", tuple(params))
    check_bounds(grammar)
    return ToolUse(tuple(tools), form, grammar, is_named)


def _tag(form: ToolFormat, function: Mapping[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", **(function.get("parameters") or {"properties": {}})}  # the text is read as an object
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": f"{form.begin}{function['name']}{form.middle}", "content": content, "end": form.end}


def _calls(form: ToolFormat, tags: Sequence[Any], *, is_single: bool) -> dict[str, Any]:
    repeated = {"separator": form.separator, "at_least_one": True, "stop_after_first": is_single}
    return {"type": "tags_with_separator", "tags": tags, **repeated}


def _or_text(form: ToolFormat, tags: Sequence[Any], text: Grammar | None, *, is_single: bool) -> dict[str, Any]:
    """Return rules that allow calls or text: any text, or text in the request's ``response_format``."""
    if text is not None:
        json_text = {"type": "json_schema", "json_schema": json.loads(text.text)}
        return {"type": "or", "elements": [json_text, _calls(form, tags, is_single=is_single)]}
    triggered = {"triggers": [form.trigger], "at_least_one": False, "stop_after_first": is_single}
    return {"type": "triggered_tags", "tags": tags, **triggered}


# ── the prompt of a model whose template knows no tools ──────────────────────────────────────────────────────────


def told_in_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], *, takes_system: bool = True
) -> list[Mapping[str, Any]]:
    """Return the messages with the tools in the system message, or before the first words of the user if the template
    takes none; with calls as text, and with results in one message of the user with what follows them.
    """
    told: list[Mapping[str, Any]] = []
    follows_result = False
    for message in messages:
        one, is_result = _in_words(message), message.get("role") == "tool"
        if told and one.get("role") == told[-1].get("role") == "user" and (is_result or follows_result):
            told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n{one.get('content')}"}
        else:
            told.append(one)
        follows_result = is_result
    if not tools:
        return told
    introduction = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if takes_system:
        has_system = bool(told) and told[0].get("role") == "system"
        first = f"{told[0]['content']}\n\n{introduction}" if has_system else introduction
        return [{"role": "system", "content": first}, *told[1 if has_system else 0 :]]
    at = next((n for n, message in enumerate(told) if message.get("role") == "user"), None)
    if at is None:
        return [{"role": "user", "content": introduction}, *told]
    asked = {**told[at], "content": f"{introduction}\n\n{told[at].get('content')}"}
    return [*told[:at], asked, *told[at + 1 :]]


def _in_words(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content')}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [_written(call["function"]) for call in calls]
    return {"role": message["role"], "content": "\n".join([*filter(None, [message.get("content")]), *written])}


def _written(function: Mapping[str, Any]) -> str:
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return f"{HERMES.begin}{function['name']}{HERMES.middle}{arguments}{HERMES.end}"


# ── the calls in an answer ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer: text outside calls, and parts of calls."""

    text: str
    calls: tuple[CallDelta, ...] = ()


@dataclass(slots=True)
class _Object:
    """Finds the end of a JSON object that comes in pieces."""

    depth: int = 0
    in_string: bool = False
    is_escaped: bool = False

    def takes(self, char: str) -> bool:
        """Return whether the object continues after ``char``."""
        if self.in_string:
            if self.is_escaped:
                self.is_escaped = False
            elif char == "\\":
                self.is_escaped = True
            elif char == '"':
                self.in_string = False
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1
        return self.depth > 0 or char.isspace()


@dataclass(slots=True)
class CallStream:
    """Separates the calls from the text of one answer.  A tail that may begin a call is held back.

    ::

        TEXT ──begin──▶ NAME ──middle──▶ OBJECT ──its last brace──▶ END ──end──▶ TEXT
    """

    form: ToolFormat
    n_calls: int = 0
    _held: str = ""
    _state: str = "text"
    _is_behind_call: bool = False
    _object: _Object = field(default_factory=_Object)

    def push(self, text: str) -> Piece:
        self._held += text
        shown, calls = "", list[CallDelta]()
        while True:
            before = self._state, len(self._held)
            if self._state == "text":
                shown += self._text()
            elif self._state == "name":
                calls += self._name()
            elif self._state == "object":
                calls += self._arguments()
            elif self._held.startswith(self.form.end):
                self._held, self._state, self._is_behind_call = self._held[len(self.form.end) :], "text", True
            if before == (self._state, len(self._held)):
                return Piece(shown, tuple(calls))

    def flush(self) -> str:
        """Return the held-back text, because the answer is over.  A call that was cut off has been shown up to its last
        character."""
        held, self._held = self._held, ""
        return held if self._state == "text" else ""

    def _text(self) -> str:
        if self._is_behind_call:
            self._held = self._held.lstrip(_SEPARATORS)
            self._is_behind_call = not self._held
        at = self._held.find(self.form.begin)
        if at >= 0:
            shown, self._held, self._state = self._held[:at], self._held[at + len(self.form.begin) :], "name"
            return shown
        cut = len(self._held) - _overlap(self._held, self.form.begin)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def _name(self) -> list[CallDelta]:
        name, found, rest = self._held.partition(self.form.middle)
        if not found:
            return []
        self._held, self._state, self._object = rest, "object", _Object()
        self.n_calls += 1
        return [CallDelta(self.n_calls - 1, name, "")]

    def _arguments(self) -> list[CallDelta]:
        for i, char in enumerate(self._held):
            if not self._object.takes(char):
                part, self._held, self._state = self._held[: i + 1], self._held[i + 1 :], "end"
                break
        else:
            part, self._held = self._held, ""
        return [CallDelta(self.n_calls - 1, "", part)] if part else []


def _overlap(text: str, wanted: str) -> int:
    """The length of the longest tail of ``text`` that begins ``wanted``."""
    return next((n for n in range(min(len(wanted) - 1, len(text)), 0, -1) if text.endswith(wanted[:n])), 0)
