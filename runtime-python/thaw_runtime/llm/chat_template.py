"""Chat templates in the form in which checkpoints ship them: sandboxed Jinja2, with the globals of Hugging Face."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from thaw.errors import BadParameter, BadRequest, ModelUnsupported
from thaw_runtime.llm.tools import HERMES, LLAMA3_JSON, ToolFormat, told_in_words
from thaw_runtime.shown import shown


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's words for training; here it has no effect."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face has it: Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template.  Raises ModelUnsupported when the checkpoint's template does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError, SyntaxError, MemoryError, ValueError) as e:  # Python's compiler, too
            reason = shown(str(e) or type(e).__name__)
            raise ModelUnsupported(f"the chat template does not compile: {reason}") from e
        self._special_tokens = dict(special_tokens)
        parsed = environment.parse(source)
        self._knows_tools = "tools" in meta.find_undeclared_variables(parsed)
        self._wants_parts = any(_is_content(loop.iter) for loop in parsed.find_all(nodes.For))
        self._knows_developers = "developer" in source
        self.tool_format = _tool_format(source) if self._knows_tools else HERMES

    @cached_property
    def refuses_system(self) -> str:
        """Why the template refuses a system message; empty if it takes one."""
        try:
            self.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}], {})
        except BadRequest as e:
            return e.message
        return ""

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], tools: Sequence[Any] = ()
    ) -> str:
        """The prompt, which ends where the assistant's answer begins.  Raises BadRequest if the template objects."""
        try:
            said: list[Mapping[str, Any]] = [self._message(m) for m in messages]
            offered = {"tools": list(tools)} if tools else {}
            if not self._knows_tools:
                takes_system = not tools or not self.refuses_system
                said, offered = told_in_words(said, tools, takes_system=takes_system), {}
            if self._wants_parts:
                said = [{**m, "content": _parts(m["content"])} for m in said]
            return self._template.render(
                {"add_generation_prompt": True, **self._special_tokens, **variables, **offered, "messages": said}
            )
        except BadRequest:
            raise
        except Exception as e:  # a template is a program: it may fail in any way
            raise BadRequest(f"the chat template refuses these messages: {e}") from e

    def render_open(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], tools: Sequence[Any] = ()
    ) -> str:
        """Return the prompt without the text that the template puts after the last message, so that the answer
        continues this message (vLLM's ``continue_final_message``).  Raises BadParameter when the template changes that
        message, BadRequest."""
        said = _text(messages[-1].get("content"))
        last = said.rstrip() if isinstance(said, str) else ""
        mark = secrets.token_hex(16)  # the message's own text may stand anywhere in the prompt
        marked = [*messages[:-1], {**messages[-1], "content": last + mark}]
        prompt, found, _ = self.render(marked, variables, tools).rpartition(mark)
        if not last or not found or not prompt.endswith(last):
            raise BadParameter("continue_final_message", "the last message is empty, or the chat template changes it")
        return prompt

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        made = {**message, "content": _text(message.get("content"))}
        if made.get("tool_calls"):
            made["content"] = made["content"] or ""  # templates add it to other text
            made["tool_calls"] = [_call(call) for call in made["tool_calls"]]
        else:
            made.pop("tool_calls", None)
        if made.get("role") == "developer" and not self._knows_developers:
            made["role"] = "system"  # OpenAI's newer name of it
        return made


def _is_content(node: nodes.Node | None) -> bool:
    """Whether a loop goes over the content of a message, maybe filtered: then the template wants a list of parts, and
    shows nothing of a text.  vLLM decides alike (its ``chat_template_content_format: auto``)."""
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content" and isinstance(node.node, nodes.Name)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value == "content" and isinstance(node.node, nodes.Name)
    return False


def _parts(content: object) -> list[dict[str, object]]:
    return [{"type": "text", "text": content}] if content else []


def _tool_format(source: str) -> ToolFormat | None:
    if "<tool_call>" in source and "<function=" not in source:
        return HERMES
    return LLAMA3_JSON if "<|python_tag|>" in source or '"parameters": ' in source else None


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Templates take the arguments as an object; OpenAI's API has them as text."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as e:
        raise BadRequest(f"the arguments of the call of {function['name']} are not JSON: {e}") from e
    return {**call, "function": {**function, "arguments": arguments}}


def _text(content: object) -> object:
    """Join the text parts of a multi-part message into one string, with one line per part."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest("only text parts are supported in messages[].content")
        parts.append(part["text"])
    return "\n".join(parts)
