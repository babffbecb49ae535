"""Checks the tools of a chat, and which of them the answer may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from gateway.api.bad_field import BadField

MOST_TOOLS: Final = 128
NOT_BESIDE: Final = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


def check_tools(body: Mapping[str, Any]) -> None:
    """Raises BadField."""
    tools = body.get("tools")
    if tools is not None and (not isinstance(tools, list) or len(tools) > MOST_TOOLS):
        raise BadField("tools", f"tools must be a list of at most {MOST_TOOLS} functions.")
    names = [_name(f"tools[{i}]", tool) for i, tool in enumerate(tools or [])]
    if len(set(names)) < len(names):
        raise BadField("tools", "tools must have different names.")
    choice = body.get("tool_choice")
    if choice is not None and not (choice in ("none", "auto", "required") or _chosen(choice) in names):
        wanted = '"none", "auto", "required", or {"type": "function", "function": {"name"}} of one of the tools'
        raise BadField("tool_choice", f"tool_choice must be {wanted}, not {choice!r:.60}.")
    if choice not in (None, "none", "auto") and not names:
        raise BadField("tool_choice", "tool_choice is only allowed when tools are specified.")
    form = body.get("response_format")
    if choice not in (None, "none", "auto") and form is not None and form.get("type") != "text":
        raise BadField("response_format", "response_format has no effect on an answer that must call a tool.")


def _name(path: str, tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise BadField(path, f'{path} must be {{"type": "function", "function": {{"name", …}}}}.')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadField(f"{path}.function.name", f"{path}.function.name must be 1 to 64 letters, digits, _, . or -.")
    if parameters is not None and not isinstance(parameters, dict):
        raise BadField(f"{path}.function.parameters", f"{path}.function.parameters must be a JSON Schema.")
    if isinstance(parameters, dict):
        _object_alone(f"{path}.function.parameters", parameters)
    if not isinstance(function.get("description", ""), str | None):
        raise BadField(f"{path}.function.description", f"{path}.function.description must be a string.")
    return name


def _object_alone(path: str, schema: Mapping[str, Any]) -> None:
    """Arguments must be an object.  With one of these keywords in the schema, nothing would enforce that."""
    if schema.get("type", "object") != "object":
        raise BadField(f"{path}.type", f'{path}.type must be "object", not {schema["type"]!r:.60}.')
    for name in NOT_BESIDE:
        if name in schema:
            raise BadField(f"{path}.{name}", f"{path} must be an object with properties: {name} may stand inside them.")


def _chosen(choice: Any) -> object:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    return function.get("name") if isinstance(function, dict) else None
