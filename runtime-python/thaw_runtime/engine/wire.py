"""The messages between the proxy and its engine process: control frames over a socket pair.

A step's events travel as one message of short arrays (``[request_id, "k", index, token_id, logprob, top, spent,
hops]``, without the values at the end that are empty).  This is the hot path, so a token costs no dictionary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relay.protocol.messages import LlmInit
from thaw import wire
from thaw.errors import ErrorInfo, ProtocolError
from thaw.tracing.hops import HopPath
from thaw_runtime.engine.protocol import (
    Checked,
    Consolidated,
    ConsolidationEnded,
    Embedded,
    EmbedRequest,
    EngineRequest,
    EngineStarted,
    Event,
    Failed,
    Finished,
    Logprobs,
    Token,
    Usage,
)


@dataclass(frozen=True, slots=True)
class EngineStart:
    """Proxy → engine, once.  ``descriptor_socket`` is the path of this container's descriptor socket."""

    init: LlmInit
    descriptor_socket: str


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """Proxy → engine, instead of EngineStart: say whether that start would succeed."""

    init: LlmInit
    descriptor_socket: str


@dataclass(frozen=True, slots=True)
class EngineChecked:
    """Without ``checked`` the start would fail with ``error``."""

    checked: Checked | None
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class Submit:
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Embed:
    request: EmbedRequest


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Consolidate:
    """Proxy → engine: become a whole worker while the pipeline answers."""


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Proxy → engine, with the descriptor of the weights' memory: AdapterFiles.  ``config`` is text.  ``number``
    identifies the load, because one adapter may be loaded again before the first load has ended."""

    number: int
    name: str
    replaces: str
    config: str


@dataclass(frozen=True, slots=True)
class AdapterEnded:
    """Engine → proxy, once for each LoadAdapter; without ``error`` it is loaded."""

    number: int
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class EngineReady:
    started: EngineStarted


@dataclass(frozen=True, slots=True)
class EngineStartFailed:
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class Events:
    events: tuple[tuple[str, Event], ...]


@dataclass(frozen=True, slots=True)
class ConsolidationDone:
    """Engine → proxy, once for each Consolidate."""

    outcome: ConsolidationEnded


Message = (
    EngineStart
    | EngineCheck
    | EngineChecked
    | Submit
    | Embed
    | Abort
    | Consolidate
    | EngineReady
    | EngineStartFailed
    | Events
    | ConsolidationDone
    | LoadAdapter
    | AdapterEnded
)
_PLAIN: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        EngineStart,
        EngineCheck,
        EngineChecked,
        Embed,
        Abort,
        Consolidate,
        EngineReady,
        EngineStartFailed,
        LoadAdapter,
        AdapterEnded,
    )
}
_OUTCOMES: dict[str, type[ConsolidationEnded]] = {cls.__name__: cls for cls in (Consolidated, ErrorInfo)}


def encode(message: Message) -> dict[str, Any]:
    if isinstance(message, Events):
        return {"t": "Events", "events": [_event(request_id, e) for request_id, e in message.events]}
    if isinstance(message, Submit):
        return {"t": "Submit", "request": _request(message.request)}
    if isinstance(message, ConsolidationDone):
        outcome = message.outcome
        return {"t": "ConsolidationDone", "is": type(outcome).__name__, "outcome": wire.to_plain(outcome)}
    return {"t": type(message).__name__, **wire.to_plain(message)}


def decode(plain: Any) -> Message:
    """The message in plain JSON.  Raises ProtocolError."""
    tag = plain.get("t") if isinstance(plain, dict) else None
    try:
        if tag == "Events":
            return Events(tuple(_read_event(e) for e in plain["events"]))
        if tag == "Submit":
            return Submit(_read_request(plain["request"]))
        if tag == "ConsolidationDone":
            return ConsolidationDone(wire.from_plain(_OUTCOMES[plain["is"]], plain["outcome"]))
    except (KeyError, IndexError, TypeError, ValueError) as e:
        raise ProtocolError(f"a damaged {tag} message: {e}") from e
    if tag not in _PLAIN:
        raise ProtocolError(f"not a message of the engine: {plain!r:.80}")
    message: Message = wire.from_plain(_PLAIN[tag], plain)
    return message


def _event(request_id: str, event: Event) -> list[Any]:
    if isinstance(event, Token):
        plain = [request_id, "k", event.index, event.token_id]
        is_first = event.spent is not None or bool(event.hops)
        if event.logprobs is not None or is_first:
            plain += [event.logprobs.logprob, event.logprobs.top] if event.logprobs else [None, ()]
        prompt = [[(one.logprob, one.top, one.rank) for one in event.prompt]] if event.prompt else []
        return [*plain, event.spent, event.hops, *prompt] if is_first else plain
    if isinstance(event, Embedded):
        return [request_id, "v", event.index, event.vector]
    if isinstance(event, Finished):
        usage = event.usage
        return [request_id, "e", event.reason, usage.prompt_tokens, usage.completion_tokens, event.hops]
    return [request_id, "f", event.error.code, event.error.message, event.error.hint]


def _read_event(e: Sequence[Any]) -> tuple[str, Event]:
    if e[1] == "k":
        logprobs = _read_logprobs(e[4], e[5]) if len(e) > 4 and e[4] is not None else None
        spent, hops = (e[6], _read_hops(e[7])) if len(e) > 6 else (None, ())
        prompt = tuple(_read_logprobs(*one) for one in e[8]) if len(e) > 8 else ()
        return e[0], Token(e[2], e[3], logprobs, spent, hops, prompt)
    if e[1] == "v":
        return e[0], Embedded(e[2], e[3])
    if e[1] == "e":
        return e[0], Finished(e[2], Usage(e[3], e[4]), _read_hops(e[5]))
    return e[0], Failed(ErrorInfo(e[2], e[3], e[4]))


def _read_logprobs(logprob: float, top: Sequence[Any], rank: int = 0) -> Logprobs:
    return Logprobs(logprob, tuple((i, p) for i, p in top), rank)


def _read_hops(names: Sequence[str]) -> tuple[HopPath, ...]:
    return tuple(map(HopPath, names))


def _request(r: EngineRequest) -> dict[str, Any]:
    bias = [[token, value] for token, value in r.sampling.logit_bias.items()]  # JSON has no integer keys
    return {**wire.to_plain(r), "sampling": {**wire.to_plain(r.sampling), "logit_bias": {}}, "bias": bias}


def _read_request(plain: Any) -> EngineRequest:
    request = wire.from_plain(EngineRequest, plain)
    request.sampling.logit_bias.update({int(t): float(v) for t, v in plain["bias"]})  # type: ignore[attr-defined]
    return request
