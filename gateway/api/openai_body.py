"""Checks the bodies of /v1/chat/completions and /v1/completions.

Types and ranges are checked here, so that the container sees only what it can run.  The container itself checks what
needs the model (lengths, token ids).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from gateway.api.http import BadField
from thaw.ids import ActivationId

Check = Callable[[Any], bool]


def _number(low: float, high: float) -> Check:
    return lambda v: type(v) in (int, float) and low <= v <= high


def _whole(low: int, high: int) -> Check:
    return lambda v: type(v) is int and low <= v <= high


def _flag(v: Any) -> bool:
    return isinstance(v, bool)


def _stops(v: Any) -> bool:
    stops = [v] if isinstance(v, str) else v
    return isinstance(stops, list) and len(stops) <= 4 and all(isinstance(s, str) and s for s in stops)


_BIG: Final = 2**31 - 1
_CHECKS: Final[Mapping[str, tuple[Check, str]]] = {
    "temperature": (_number(0, 2), "a number from 0 to 2"),
    "top_p": (lambda v: _number(0, 1)(v) and v > 0, "a number above 0, at most 1"),
    "top_k": (_whole(-1, _BIG), "a whole number, -1 or 0 for all"),
    "min_p": (_number(0, 1), "a number from 0 to 1"),
    "max_tokens": (_whole(1, _BIG), "a whole number of at least 1"),
    "max_completion_tokens": (_whole(1, _BIG), "a whole number of at least 1"),
    "min_tokens": (_whole(0, _BIG), "a whole number of at least 0"),
    "presence_penalty": (_number(-2, 2), "a number from -2 to 2"),
    "frequency_penalty": (_number(-2, 2), "a number from -2 to 2"),
    "repetition_penalty": (lambda v: _number(0, 100)(v) and v > 0, "a number above 0"),
    "seed": (_whole(-(2**63), 2**63 - 1), "a whole number of 64 bits"),
    "stop": (_stops, "a string or up to 4 non-empty strings"),
    "stream": (_flag, "true or false"),
    "ignore_eos": (_flag, "true or false"),
    "stream_options": (lambda v: isinstance(v, dict), "an object"),
    "logit_bias": (lambda v: isinstance(v, dict), "an object of token ids and numbers"),
    "user": (lambda v: isinstance(v, str), "a string"),
}
_ONLY: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
}
"""Parameters that have one value here; null counts as absent."""


def validate(endpoint: str, body: Mapping[str, Any]) -> None:
    """Raises BadField, which names the parameter."""
    for name, allowed in _ONLY.items():
        if body.get(name) is not None and body[name] not in allowed:
            raise BadField(name, f"{name}={body[name]!r:.60} is not supported: leave {name} out.")
    for name, (check, wanted) in _CHECKS.items():
        if body.get(name) is not None and not check(body[name]):
            raise BadField(name, f"{name} must be {wanted}, not {body[name]!r:.60}.")
    if body.get("stream_options") is not None and not body.get("stream"):
        raise BadField("stream_options", "stream_options is only allowed when stream is true.")
    _chat(body) if endpoint == "chat" else _completions(body)


def choose_seed(body: Mapping[str, Any], activation_id: ActivationId) -> int:
    """Return the request's seed, or 31 of the activation's random bits.  An answer that goes on elsewhere uses the same
    random numbers, even if nothing but the activation's id is left of it."""
    seed = body.get("seed")
    return int(activation_id[:8], 16) >> 1 if seed is None else int(seed)


def _chat(body: Mapping[str, Any]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadField("messages", "messages must be a non-empty list of {role, content}.")
    for i, message in enumerate(messages):
        _message(f"messages[{i}]", message)
    if body.get("logprobs") is not None and not _flag(body["logprobs"]):
        raise BadField("logprobs", "logprobs must be true or false.")
    top = body.get("top_logprobs")
    if top is not None and not (_whole(0, 20)(top) and body.get("logprobs")):
        raise BadField("top_logprobs", "top_logprobs must be a whole number from 0 to 20, with logprobs true.")


def _message(path: str, message: Any) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadField(path, f"{path} must be an object with a role.")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise BadField(f"{path}.content", f"{path}.content: only parts of type text are supported.")
    elif not isinstance(content, str):
        raise BadField(f"{path}.content", f"{path}.content must be a string or a list of text parts.")


def _completions(body: Mapping[str, Any]) -> None:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    ids = isinstance(prompt, list) and prompt and all(type(t) is int for t in prompt)
    if not isinstance(prompt, str) and not ids:
        raise BadField("prompt", "prompt must be one string or one list of token ids.")
    top = body.get("logprobs")
    if top is not None and not _whole(0, 20)(top):
        raise BadField("logprobs", "logprobs must be a whole number from 0 to 20.")
