"""Checks the messages of a chat, with the calls of tools and their results in its history."""

from __future__ import annotations

from typing import Any, Final

from gateway.api.bad_field import BadField

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")

_KEYS: Final = {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning_content", "reasoning"}
"""Templates read the name and the reasoning; clients send a refusal back with null or beside the content."""


def check_messages(messages: Any) -> None:
    """Raises BadField."""
    if not isinstance(messages, list) or not messages:
        raise BadField("messages", "messages must be a non-empty list of {role, content}.")
    for i, message in enumerate(messages):
        _message(f"messages[{i}]", message)


def _message(path: str, message: Any) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadField(path, f"{path} must be an object with a role.")
    role, content = message["role"], message.get("content")
    if role not in _ROLES:
        raise BadField(f"{path}.role", f"{path}.role must be one of {', '.join(_ROLES)}, not {role!r:.60}.")
    for name, value in message.items():
        if value is not None and name not in _KEYS:
            raise BadField(f"{path}.{name}", f"{path}.{name} is not supported: leave it out.")
    calls = message.get("tool_calls")
    if calls is not None:
        _calls(f"{path}.tool_calls", role, calls)
    answered = message.get("tool_call_id")
    if role == "tool" and not isinstance(answered, str):
        raise BadField(f"{path}.tool_call_id", f"{path}.tool_call_id must be the id of the call that this answers.")
    if role != "tool" and answered is not None:
        raise BadField(f"{path}.tool_call_id", f"{path}.tool_call_id belongs to a message of a tool: leave it out.")
    if content is None and calls:
        return
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise BadField(f"{path}.content", f"{path}.content: only parts of type text are supported.")
    elif not isinstance(content, str):
        raise BadField(f"{path}.content", f"{path}.content must be a string or a list of text parts.")


def _calls(path: str, role: str, calls: Any) -> None:
    if role != "assistant" or not isinstance(calls, list):
        raise BadField(path, f"{path} must be a list, in a message of the assistant.")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        fits = isinstance(function, dict) and call.get("type", "function") == "function"
        if not fits or not all(isinstance(function.get(k), str) for k in ("name", "arguments")):  # type: ignore[union-attr]
            wanted = '{"id", "type": "function", "function": {"name", "arguments"}}, the arguments as text'
            raise BadField(f"{path}[{i}]", f"{path}[{i}] must be {wanted}.")
