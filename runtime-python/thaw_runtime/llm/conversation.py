"""The messages of a request as a chat template gets them, which is how vLLM's server gives them.

A template sees only the fields that vLLM passes on, in its order, because some templates write a message as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from thaw.errors import BadRequest

_TEXT_PARTS: Final = dict.fromkeys(("text", "input_text", "output_text"), "text") | {
    "refusal": "refusal",
    "thinking": "thinking",
}
"""The types of parts that are text, and the field that has it."""


def conversation(
    messages: Sequence[Mapping[str, Any]], *, in_parts: bool, knows_developers: bool
) -> list[dict[str, Any]]:
    """Raises BadRequest for content that is no text."""
    said = [_message(m, in_parts=in_parts) for m in messages]
    if knows_developers or all(m["role"] != "developer" for m in said):
        return said
    for m in said:
        if m["role"] == "developer":  # OpenAI's newer name of it
            m["role"] = "system"
            m.pop("tools", None)
    return _one_system_message(said)


def offered_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """The tools with their fields in vLLM's order.  A template without tools gets None, which is defined."""
    if not tools:
        return None
    return [{"type": "function", "function": _function(tool["function"])} for tool in tools]


def _function(given: Mapping[str, Any]) -> dict[str, Any]:
    made = {name: given.get(name) for name in ("name", "description", "parameters")}
    return made | ({"strict": given["strict"]} if given.get("strict") is not None else {})


def _message(message: Mapping[str, Any], *, in_parts: bool) -> dict[str, Any]:
    role = message.get("role")
    texts = _texts(message.get("content"))
    content: object = "\n".join(texts if in_parts else filter(None, texts))
    if in_parts and role != "tool":  # hardly any template takes the result of a tool in parts
        content = [{"type": "text", "text": text} for text in texts]
    made: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            made["tool_calls"] = [_call(call) for call in calls]
        reasoning = next((r for n in ("reasoning", "reasoning_content") if (r := message.get(n)) is not None), None)
        if reasoning is not None:  # templates know it by the one name or the other
            made |= {"reasoning": reasoning, "reasoning_content": reasoning}
    elif role == "tool" and "tool_call_id" in message:
        made["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        made["name"] = message["name"]
    if role == "developer":
        made["tools"] = message.get("tools")
    return made


def _texts(content: object) -> list[str]:
    if content is None:
        return []
    if not isinstance(content, list):
        return [str(content)]
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXT_PARTS[kind]) if kind in _TEXT_PARTS else part
        if text is None and kind in ("text", "refusal"):
            continue
        if not isinstance(text, str):
            raise BadRequest("only text parts are supported in messages[].content")
        texts.append(text)
    return texts


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Templates take the arguments as an object; OpenAI's API has them as text.  A model may have written arguments
    that are none: this stays in the history, so refusing it would end the whole conversation."""
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = {}
    parsed = arguments if isinstance(arguments, dict) else {}
    made = {"id": call.get("id"), "function": {"arguments": parsed, "name": function["name"]}, "type": call.get("type")}
    return {name: value for name, value in made.items() if value is not None}


def _one_system_message(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where developers' messages became the system's, they may stand anywhere; some templates take one, at the top."""
    system = [m for m in said if m["role"] == "system"]
    if len(system) == 1 and said[0] is system[0]:
        return said
    texts = [c if isinstance(c := m["content"], str) else "\n".join(p["text"] for p in c) for m in system]
    return [
        {"role": "system", "content": "\n\n".join(filter(None, texts))},
        *(m for m in said if m["role"] != "system"),
    ]
