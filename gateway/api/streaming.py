"""Streamed answers of /v1 as server-sent events, and the clients that go on with one (``Last-Event-ID``).

A stream runs on its request's thread and ends with its client, as most clients hang up to cancel.  One that asks to be
resumable runs beside its request (serving/streams.py) and outlasts it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Protocol

from flask import Response, request

from gateway import metrics
from gateway.api.bad_field import BadField
from gateway.api.http import ACTIVATION_HEADER, json_response, openai_error
from gateway.api.openai_body import choose_seed
from gateway.core import Gateway
from gateway.serving.answers.event_ids import EventId, UnknownEvent, fingerprint
from gateway.serving.answers.openai_format import Chunks, aggregate
from gateway.serving.call import Call
from gateway.serving.hangup import ClientGone, Hangup, watched
from gateway.serving.outcome import outcome_of
from gateway.serving.reconnect import Way
from gateway.serving.runs import Outcome, llm_tokens
from gateway.serving.streams import Reader, cutting
from relay.protocol.messages import RunFinished, RunToken
from relay.state.api_keys import Subject
from thaw.action import Action
from thaw.activation import ActivationStatus
from thaw.clock import wall_ms
from thaw.errors import ThawError
from thaw.ids import ActivationId, random_hex_id
from thaw.tracing.trace import Phase

RESUMABLE_HEADER: Final = "X-Thaw-Resumable"
START_HEADER: Final = "X-Thaw-Start"
LAST_EVENT_HEADER: Final = "Last-Event-ID"
SSE: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_COMMENTS: Final = {
    Way.HERE: "going on with the answer",
    Way.TAKEN_OVER: "going on with another gateway's answer",
    Way.COMPUTED_AGAIN: "computing the answer again",
}
_SKEW_S: Final = 1
"""Ids have whole seconds, and the clocks of two gateways differ a little."""
Step = str | RunToken | RunFinished


class Answer(Protocol):
    """The texts of a streamed answer.  A token may have none."""

    def token(self, token: RunToken) -> str: ...
    def comment(self, sentence: str) -> str: ...
    def over(self, finished: RunFinished) -> str: ...
    def failed(self, error: dict[str, Any]) -> str: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A request whose body is valid."""

    action: Action
    subject: Subject
    endpoint: str
    body: Mapping[str, Any]

    def call(self, hangup: Hangup, activation_id: ActivationId | None = None) -> Call:
        known = activation_id or ActivationId(random_hex_id())
        seed = choose_seed(self.body, known)
        call = Call(known, self.action, self.subject, self.body, hangup, self.endpoint, seed)
        call.trace(Phase.RECEIVED)
        return call


def how_started(call: Call) -> str:
    """``warm``, or ``cold`` with the seconds to the first token, for a call that has one."""
    if not call.cold:
        return "warm"
    begun = next((e for e in call.events if e.name is Phase.FIRST_TOKEN), None)
    return "cold" if begun is None else f"cold; ttft={(begun.mono_ns - call.events[0].mono_ns) / 1e9:.3f}"


def last_event(core: Gateway, asked: Asked) -> EventId | None:
    """The event after which the client goes on.  Raises BadField, UnknownEvent.

    An id is of use for as long as its stream may be kept, so that nobody can have an activation computed again later,
    without a limit and after its record.
    """
    text = request.headers.get(LAST_EVENT_HEADER)
    if text is None:
        return None
    if not asked.body.get("stream"):
        raise BadField(LAST_EVENT_HEADER, f"{LAST_EVENT_HEADER} is only allowed when stream is true.")
    had = core.event_ids.read(text, asked.subject.namespace)
    if wall_ms() / 1000 > had.started_s + asked.action.limits.timeout / 1000 + core.settings.reconnect_s + _SKEW_S:
        raise UnknownEvent
    return had


def begin(core: Gateway, asked: Asked) -> Response:
    """Answer a request whose client has nothing yet."""
    resumable = request.headers.get(RESUMABLE_HEADER) == "1" and core.settings.reconnect_s > 0
    with ExitStack() as entered:
        hangup = watching(core, entered)
        call = asked.call(Hangup() if resumable else hangup)
        body = fingerprint(call.action, call.endpoint, call.payload)
        prefix = _prefix(core, call, call.received_ms // 1000, body.digest)
        chunks = Chunks(call, prefix if RESUMABLE_HEADER in request.headers else None)
        if not resumable:
            return written(call, chunks, counted(core, call, entered))
        core.throttle.enter(asked.subject.namespace)  # the count is the stream's from here on
        reader = core.streams.begin(call, hangup, _cut(), body_bytes=body.n_bytes)
        return _read(core, reader, reader.steps(), chunks, entered.pop_all().close, resumable=lambda: chunks.has_id)


def counted(core: Gateway, call: Call, entered: ExitStack) -> Generator[Step, None, None]:
    """The steps of a run that counts in its namespace's throttle.  ``entered`` is closed at their end.  Raises
    Throttled."""
    entered.enter_context(core.throttle.counted(call.subject.namespace))
    return recorded(core, call, entered.pop_all().close)


def written(call: Call, answer: Answer, steps: Generator[Step, None, None]) -> Response:
    """Answer with a stream that ends with its client."""
    return _response(call, _Texts(answer, steps, steps.close))


def go_on(core: Gateway, asked: Asked, had: EventId) -> Response:
    """Answer a client that has the events up to ``had``."""
    resumable = request.headers.get(RESUMABLE_HEADER) != "0"
    with ExitStack() as entered:
        hangup = watching(core, entered)
        way, reader = core.reconnects.go_on(had, asked.call(Hangup(), had.activation_id), hangup, _cut())
        metrics.RECONNECTS.labels(way).inc()
        call = reader.stream.call
        chunks = Chunks(call, _prefix(core, call, had.started_s, had.digest), had)
        steps = chain((_COMMENTS[way],), reader.steps())  # a comment at once: the next token may take long
        return _read(core, reader, steps, chunks, entered.pop_all().close, resumable=lambda: resumable)


class _Texts:
    """The texts of one SSE answer.  ``on_close`` runs once, when its connection is over or it never began."""

    def __init__(self, chunks: Answer, steps: Iterator[Step], on_close: Callable[[], None]) -> None:
        self._chunks, self._steps, self.close = chunks, steps, on_close
        self._texts = self._of_steps()
        self.is_whole = self.has_failed = False

    def first(self) -> str:
        """Raises ThawError."""
        try:
            return next(self._texts)
        except BaseException as e:
            self.has_failed = not isinstance(e, ClientGone)
            self.close()
            raise

    def after(self, first: str) -> Iterator[str]:
        try:
            yield first
            yield from self._texts
            self.is_whole = True
        except ClientGone:
            return
        except ThawError as e:
            self.has_failed = True
            yield self._chunks.failed(openai_error(e))

    def _of_steps(self) -> Iterator[str]:
        for step in self._steps:
            if isinstance(step, RunToken):
                text = self._chunks.token(step)
            elif isinstance(step, str):
                text = self._chunks.comment(step)
            else:
                text = self._chunks.over(step)
            if text:
                yield text


def _response(call: Call, texts: _Texts) -> Response:
    """The first text decides the status: an error before it is an ordinary error answer."""
    try:
        first = texts.first()
    except ThawError as e:
        response = json_response(openai_error(e), e.http_status)
    else:
        response = Response(texts.after(first), headers=SSE)
        response.call_on_close(texts.close)
        response.headers[START_HEADER] = "cold" if first.startswith(":") else how_started(call)
    response.headers[ACTIVATION_HEADER] = call.activation_id
    return response


def recorded(core: Gateway, call: Call, leave: Callable[[], None]) -> Generator[Step, None, None]:
    """The steps of a run on this thread.  However it ends (done, failed, client gone) one record is submitted, before
    its client reads the end."""
    tokens: list[RunToken] = []
    has_ended = False

    def end(outcome: Outcome) -> None:
        nonlocal has_ended
        if not has_ended:
            has_ended = True
            leave()
            core.ended(call, outcome)

    try:
        with closing(llm_tokens(core.dispatcher, call)) as steps:
            for step in steps:
                if isinstance(step, RunToken):
                    tokens.append(step)
                elif isinstance(step, RunFinished):
                    end(Outcome(ActivationStatus.SUCCESS, aggregate(call, tokens, step), step))
                yield step
    except GeneratorExit:
        end(Outcome(ActivationStatus.APPLICATION_ERROR, {"error": "The client closed the connection."}))
        raise
    except Exception as e:  # noqa: BLE001  however it failed, it is counted out and recorded
        error = e if isinstance(e, ThawError) else core.dispatcher.fault(call, e)
        end(outcome_of(error))
        raise error from None


def _read(
    core: Gateway,
    reader: Reader,
    steps: Iterator[Step],
    chunks: Chunks,
    unwatch: Callable[[], None],
    *,
    resumable: Callable[[], bool],
) -> Response:
    """``resumable`` tells at the end whether the client may come back."""

    def close() -> None:
        unwatch()
        is_kept = core.streams.leave(reader, resumable=resumable() and not texts.has_failed)
        if is_kept and not texts.is_whole:
            core.reconnects.left(reader.stream.call)

    texts = _Texts(chunks, steps, close)
    return _response(reader.stream.call, texts)


def _prefix(core: Gateway, call: Call, started_s: int, digest: bytes) -> str:
    return core.event_ids.prefix(call.subject.namespace, call.activation_id, started_s, digest)


def watching(core: Gateway, entered: ExitStack) -> Hangup:
    """Notice a client that hangs up, until ``entered`` is closed."""
    hangup, unwatch = watched(core.hangups, request.environ.get("gunicorn.socket"))
    entered.callback(unwatch)
    return hangup


def _cut() -> Callable[[], None]:
    return cutting(request.environ.get("gunicorn.socket"))
