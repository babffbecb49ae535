"""Makes the messages of a chat from a response's ``instructions`` and ``input``.

An item is a message, a call of a function that an earlier answer had, or that call's result.  Calls belong to the
assistant's message before them, as a chat has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.api.bad_field import BadField

Json = dict[str, Any]
_ROLES: Final = ("user", "assistant", "system", "developer")
_TEXTS: Final = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The kinds of parts that are text, and where they have it."""
_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "message": ("type", "role", "content", "id", "status"),
    "function_call": ("type", "call_id", "name", "arguments", "id", "status"),
    "function_call_output": ("type", "call_id", "output", "id", "status"),
}


def messages_of(body: Mapping[str, Any]) -> list[Json]:
    """Raises BadField."""
    instructions, given = body.get("instructions"), body.get("input")
    if instructions is not None and not isinstance(instructions, str):
        raise BadField("instructions", "instructions must be a string.")
    messages: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise BadField("input", "input must be a string or a non-empty list of items.")
    for i, item in enumerate(given):
        _add(messages, f"input[{i}]", item)
    return messages


def _add(messages: list[Json], path: str, item: Any) -> None:
    kind = item.get("type") if isinstance(item, dict) else ""
    kind = "message" if kind is None else kind
    if not isinstance(kind, str) or kind not in _KEYS:
        raise BadField(path, f"{path} must be an item of the type {', '.join(_KEYS)}.")
    for name, value in item.items():
        if value is not None and name not in _KEYS[kind]:
            raise BadField(f"{path}.{name}", f"{path}.{name} is not supported: leave it out.")
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise BadField(f"{path}.role", f"{path}.role must be one of {', '.join(_ROLES)}.")
        messages.append({"role": item["role"], "content": _content(f"{path}.content", item.get("content"))})
    elif kind == "function_call":
        _add_call(messages, path, item)
    else:
        content = _content(f"{path}.output", item.get("output"))
        messages.append({"role": "tool", "tool_call_id": _string(path, item, "call_id"), "content": content})


def _add_call(messages: list[Json], path: str, item: Mapping[str, Any]) -> None:
    function = {name: _string(path, item, name) for name in ("name", "arguments")}
    call = {"id": _string(path, item, "call_id"), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _content(path: str, content: Any) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadField(path, f"{path} must be a string or a list of text parts.")
    return [{"type": "text", "text": _part(f"{path}[{i}]", part)} for i, part in enumerate(content)]


def _part(path: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
    if not isinstance(text, str):
        raise BadField(path, f"{path}: only parts of the types {', '.join(_TEXTS)} are supported.")
    return text


def _string(path: str, item: Mapping[str, Any], name: str) -> str:
    if not isinstance(item.get(name), str):
        raise BadField(f"{path}.{name}", f"{path}.{name} must be a string.")
    return str(item[name])
