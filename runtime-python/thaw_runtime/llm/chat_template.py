"""Chat templates in the form in which checkpoints ship them: sandboxed Jinja2, with the globals of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from thaw.errors import BadRequest, ModelUnsupported
from thaw_runtime.shown import shown


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's words for training; here it has no effect."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own filter would escape HTML


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

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt, which ends where the assistant's answer begins.  Raises BadRequest if the template objects."""
        try:
            said = [{**m, "content": _text(m.get("content"))} for m in messages]
            return self._template.render(
                {"add_generation_prompt": True, **self._special_tokens, **variables, "messages": said}
            )
        except BadRequest:
            raise
        except Exception as e:  # a template is a program: it may fail in any way
            raise BadRequest(f"the chat template refuses these messages: {e}") from e


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
