"""Chat templates in the form in which checkpoints ship them: sandboxed Jinja2, with the globals of Hugging Face.

What a template may use, and what it is given, is what transformers and vLLM have; the test
tests/thaw_runtime/test_text_conformance.py renders the same with both.  The one thing that is Thaw's own: a template
that knows no tools is told of them in words (tools.py), which vLLM would leave out.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from thaw.errors import BadParameter, BadRequest, ModelUnsupported
from thaw_runtime.llm.content_format import wants_parts
from thaw_runtime.llm.conversation import conversation, offered_tools
from thaw_runtime.llm.tools import HERMES, LLAMA3_JSON, ToolFormat, told_in_words
from thaw_runtime.shown import shown


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's words for training.  Here it has no effect, but
    that of any block that is called: what is set in it is not set behind it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node | list[Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


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
        self._wants_parts = wants_parts(parsed)
        self._knows_developers = '"developer"' in source or "'developer'" in source
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
        return self._rendered(self._conversation(messages, tools), variables, tools)

    def render_open(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], tools: Sequence[Any] = ()
    ) -> str:
        """Return the prompt without the text that the template puts after the last message, so that the answer
        continues this message (``continue_final_message`` of transformers).  Raises BadParameter when the template
        changes that message, BadRequest."""
        said = self._conversation(messages, tools)
        mark = f"{secrets.token_hex(16)} "  # the message's own text may stand anywhere in the prompt
        last = said[-1] = {**said[-1]}
        if isinstance(last["content"], list):
            *first, part = last["content"] or [{"text": ""}]
            text, last["content"] = part["text"], [*first, {**part, "text": part["text"] + mark}]
        else:
            text, last["content"] = last["content"], last["content"] + mark
        whole = self._rendered(said, {**variables, "add_generation_prompt": False}, tools)
        prompt, found, rest = whole.rpartition(mark.rstrip())
        if not found or text.strip() not in whole:
            raise BadParameter("continue_final_message", "the chat template changes the last message")
        return prompt if rest.startswith(" ") else prompt.rstrip()  # or the template strips messages

    def _conversation(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
        """Raises BadRequest."""
        is_told = not self._knows_tools and (
            tools or any(m.get("tool_calls") or m.get("role") == "tool" for m in messages)
        )
        in_parts = self._wants_parts and not is_told
        said = conversation(messages, in_parts=in_parts, knows_developers=self._knows_developers)
        if not is_told:
            return said
        told = told_in_words(said, tools, takes_system=not tools or not self.refuses_system)
        return [
            {**m, "content": [{"type": "text", "text": m["content"]}] if self._wants_parts else m["content"]}
            for m in told
        ]

    def _rendered(self, said: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], tools: Sequence[Any]) -> str:
        offered = offered_tools(tools) if self._knows_tools else None
        given = {"documents": None, "add_generation_prompt": True, **self._special_tokens, **variables}
        try:
            return self._template.render({**given, "tools": offered, "messages": said})
        except Exception as e:  # a template is a program: it may fail in any way
            raise BadRequest(f"the chat template refuses these messages: {e}") from e


def _tool_format(source: str) -> ToolFormat | None:
    if "<tool_call>" in source and "<function=" not in source:
        return HERMES
    return LLAMA3_JSON if "<|python_tag|>" in source or '"parameters": ' in source else None
