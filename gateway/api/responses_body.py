"""Checks the body of /v1/responses, and makes the chat of it that a container knows.

Only the shapes differ: ``input`` becomes messages, ``text.format`` a response format, and so on.  The values are
checked where the chat's are, and own_words() gives an error the names of this API.  Nothing is kept between two
requests, so a parameter that refers to an earlier response is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.api.bad_field import BadField
from gateway.api.openai_body import NO_EFFECT, validate
from gateway.api.responses_input import messages_of
from thaw.errors import BadRequest

Json = dict[str, Any]

_AS_IN_CHAT: Final = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "seed", "stop", "logit_bias"),
    *("top_k", "min_p", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop_token_ids", "ignore_eos", "chat_template_kwargs"),
    *(NO_EFFECT.keys() - {"store", "prediction"}),
)
_OWN: Final = {
    *("input", "instructions", "max_output_tokens", "text", "tools", "tool_choice", "include", "top_logprobs"),
    *("stream_options", "reasoning", "max_tool_calls"),
}
_NOT_KEPT: Final = "Responses are not kept here: send the whole conversation as input."
ONLY: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "store": ((False,), "Responses are not kept here: leave store out, or send false."),
    "previous_response_id": ((), _NOT_KEPT),
    "conversation": ((), _NOT_KEPT),
    "prompt": ((), "Prompts are not kept here: send instructions and input."),
    "background": ((False,), "A response is computed while its client waits: leave background out."),
    "truncation": (
        ("disabled",),
        'A conversation that is too long is an error here: send "disabled".',
    ),
    "context_management": (([],), "context_management is not supported: leave it out."),
    "moderation": ((), "moderation is not supported: leave it out."),
}
"""Parameters that have one value here, and what to do."""
KNOWN: Final = frozenset((*_AS_IN_CHAT, *_OWN, *ONLY))
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDABLE: Final = (_LOGPROBS, "reasoning.encrypted_content")
"""No answer here has reasoning apart from its text, so there is nothing of it to include."""
_CHAT_NAMES: Final = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    (".function.", "."),
)
_TOOL_KEYS: Final = ("type", "name", "description", "parameters", "strict")


def chat_of(body: Mapping[str, Any]) -> Json:
    """Return the valid body of a chat.  Raises BadField, which names the parameter of the response."""
    for name, value in body.items():
        if value is None:
            continue
        if name in ONLY:
            _check_only(name, value)
        elif name not in KNOWN:
            raise BadField(name, f"Unrecognized request argument supplied: {name}.")
    chat = {name: body[name] for name in _AS_IN_CHAT if body.get(name) is not None}
    chat["messages"] = messages_of(body)
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if (tools := body.get("tools")) is not None:
        chat["tools"] = _tools(tools)
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = _tool_choice(body["tool_choice"])
    chat |= _response_format(body.get("text")) | _logprobs(body)
    _check_unused(body)
    try:
        return validate("chat", chat)
    except BadField as e:
        raise own_words(e) from e


def own_words(error: BadRequest) -> BadField:
    """The error of a chat with the names that its parameters have here."""
    message, param = error.message, getattr(error, "param", None)
    for theirs, ours in _CHAT_NAMES:
        message, param = message.replace(theirs, ours), param and param.replace(theirs, ours)
    code = error.hint if error.hint == "context_length_exceeded" else getattr(error, "openai_code", None)
    return BadField(param, message, code=code)


def _check_only(name: str, value: Any) -> None:
    allowed, advice = ONLY[name]
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise BadField(name, f"{name}={value!r:.60} is not supported. {advice}")


def _tools(tools: Any) -> list[Json]:
    if not isinstance(tools, list):
        raise BadField("tools", "tools must be a list of functions.")
    return [_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)]


def _tool(path: str, tool: Any) -> Json:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise BadField(path, f'{path} must be {{"type": "function", "name", …}}: no other tools run here.')
    for name, value in tool.items():
        if value is not None and name not in _TOOL_KEYS:
            raise BadField(f"{path}.{name}", f"{path}.{name} is not supported: leave it out.")
    known = ("name", "description", "parameters")  # arguments follow the schema, strict or not
    return {"type": "function", "function": {name: tool[name] for name in known if tool.get(name) is not None}}


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        wanted = '"none", "auto", "required", or {"type": "function", "name"} of one of the tools'
        raise BadField("tool_choice", f"tool_choice must be {wanted}, not {choice!r:.60}.")
    return {"type": "function", "function": {"name": choice["name"]}}


def _response_format(text: Any) -> Json:
    if text is None:
        return {}
    if not isinstance(text, dict):
        raise BadField("text", "text must be an object.")
    for name, value in text.items():
        if value is not None and name not in ("format", "verbosity"):
            raise BadField(f"text.{name}", f"Unrecognized request argument supplied: text.{name}.")
    if text.get("verbosity") not in (None, "medium"):
        raise BadField("text.verbosity", "text.verbosity is not supported: leave it out.")
    form = text.get("format")
    if form is None:
        return {}
    if isinstance(form, dict) and form.get("type") == "json_schema":
        named = {name: value for name, value in form.items() if name != "type"}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    return {"response_format": form}


def _logprobs(body: Mapping[str, Any]) -> Json:
    include, top = body.get("include"), body.get("top_logprobs")
    include = [] if include is None else include
    if not isinstance(include, list):
        raise BadField("include", "include must be a list.")
    for i, one in enumerate(include):
        if one not in _INCLUDABLE:
            raise BadField(f"include[{i}]", f"include[{i}]={one!r:.60}: there is nothing of this kind here.")
    if _LOGPROBS not in include:
        if top is not None and (type(top) is not int or top != 0):
            raise BadField("top_logprobs", f'top_logprobs needs "{_LOGPROBS}" in include.')
        return {}
    return {"logprobs": True, "top_logprobs": top}


def _check_unused(body: Mapping[str, Any]) -> None:
    """Check parameters that change no answer here: their values must still be valid."""
    most = body.get("max_tool_calls")
    if most is not None and not (type(most) is int and 1 <= most < 2**31):
        raise BadField("max_tool_calls", f"max_tool_calls must be a whole number of at least 1, not {most!r:.60}.")
    reasoning = body.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, dict):
        raise BadField("reasoning", "reasoning must be an object.")
    for name, value in (reasoning or {}).items():
        if value is not None and not (name == "effort" and value == "none"):
            raise BadField(f"reasoning.{name}", f"reasoning.{name} is not supported: leave it out.")
    options = body.get("stream_options")
    if options is None:
        return
    if not isinstance(options, dict) or not body.get("stream"):
        raise BadField("stream_options", "stream_options must be an object, and is only allowed when stream is true.")
    for name, value in options.items():
        if value is not None and (name != "include_obfuscation" or not isinstance(value, bool)):
            raise BadField(f"stream_options.{name}", f"stream_options.{name}={value!r:.60} is not supported.")
