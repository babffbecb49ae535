"""Answers of several choices: the parts run beside one another, each on a thread, and end together.

::

    part 0 ─ steps ─▶╮
    part 1 ─ steps ─▶┼─▶ queue ─▶ the request's thread ─▶ chunks of all choices, as they come
    part 2 ─ steps ─▶╯

When one part fails, or the client hangs up, all of them end.  Their events have no ids: such a stream cannot be gone on
with.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final

from flask import Response, request

from gateway.api.http import ACTIVATION_HEADER, json_response, openai_error
from gateway.api.streaming import SSE, START_HEADER, Asked, how_started, recorded
from gateway.core import Gateway
from gateway.serving.call import Call
from gateway.serving.hangup import ClientGone, Hangup, watched
from gateway.serving.openai_format import Chunks, Part, usage_event
from gateway.serving.runs import Outcome
from gateway.serving.several import Several, merged
from relay.protocol.messages import RunFinished, RunToken
from thaw.errors import PlatformError, ThawError, TimeLimitExceeded, Unavailable

_AHEAD: Final = 256
"""Steps that a slow client has not read yet; then the parts wait for it."""
_LATE_S: Final = 10.0
"""How long after its limit the end of a part may come."""


class _Parts:
    """The calls of one request, and what ends all of them."""

    def __init__(self, core: Gateway, asked: Asked, made: Several, entered: ExitStack) -> None:
        self.core, self.stop = core, Hangup()
        hangup, unwatch = watched(core.hangups, request.environ.get("gunicorn.socket"))
        entered.callback(unwatch)
        entered.enter_context(hangup.waking(self.stop.set))
        for _ in made.bodies:
            entered.enter_context(core.throttle.counted(asked.subject.namespace))
        self.calls = [replace(asked, body=body).call(self.stop) for body in made.bodies]


def whole(core: Gateway, asked: Asked, made: Several) -> Response:
    with ExitStack() as entered:
        parts = _Parts(core, asked, made, entered)
        outcomes = list(core.choices.map(lambda call: _to_end(parts, call), parts.calls))
    first = parts.calls[0]
    if (error := _first_error(outcomes)) is not None:
        response = json_response(openai_error(error), error.http_status)
    else:
        answers: Any = [o.result for o in outcomes]
        response = json_response(merged(asked.body, made, answers))
        response.headers[START_HEADER] = how_started(first)
    response.headers[ACTIVATION_HEADER] = first.activation_id
    return response


def _to_end(parts: _Parts, call: Call) -> Outcome:
    outcome = parts.core.execute(call)
    parts.core.ended(call, outcome)
    if outcome.error is not None:
        parts.stop.set()
    return outcome


def _first_error(outcomes: list[Outcome]) -> ThawError | None:
    """The one that ended the others, which were told that their client had gone."""
    errors = [o.error for o in outcomes if o.error is not None]
    return next((e for e in errors if not isinstance(e, ClientGone)), errors[0] if errors else None)


def stream(core: Gateway, asked: Asked, made: Several) -> Response:
    with ExitStack() as entered:
        parts = _Parts(core, asked, made, entered)
        merging = _Merging(parts)
        entered.callback(merging.end)
        texts = merging.texts(made.n_each)
        try:
            first = next(texts)
        except ThawError as e:
            response = json_response(openai_error(e), e.http_status)
        else:
            response = Response(_with_errors(first, texts), headers=SSE)
            response.call_on_close(entered.pop_all().close)
            response.headers[START_HEADER] = "cold" if first.startswith(":") else how_started(parts.calls[0])
    response.headers[ACTIVATION_HEADER] = parts.calls[0].activation_id
    return response


def _with_errors(first: str, texts: Iterator[str]) -> Iterator[str]:
    try:
        yield first
        yield from texts
    except ClientGone:
        return
    except ThawError as e:
        yield f"data: {json.dumps(openai_error(e))}\n\n"


class _Merging:
    """The steps of all parts in the order in which they come."""

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        self._steps: queue.SimpleQueue[tuple[int, str | RunToken | RunFinished | ThawError]] = queue.SimpleQueue()
        self._room = threading.Semaphore(_AHEAD)
        for index, call in enumerate(parts.calls):
            parts.core.choices.submit(self._run, index, call).add_done_callback(partial(self._ended, index))

    def _ended(self, index: int, part: Future[None]) -> None:
        """A part that never ran, because the gateway stops, puts no step."""
        if part.cancelled() or part.exception() is not None:
            self._steps.put((index, Unavailable("the gateway ends: send the request again")))

    def end(self) -> None:
        """The connection is over: no part waits for its client any more."""
        self._parts.stop.set()
        self._room.release(1_000_000)

    def texts(self, n_each: int) -> Iterator[str]:
        """``n_each``: the choices of each prompt.  Raises ThawError, and ClientGone."""
        head = self._parts.calls[0]
        chunks = [Chunks(call, None, part=Part(i, head)) for i, call in enumerate(self._parts.calls)]
        finished: dict[int, RunFinished] = {}
        while len(finished) < len(chunks):
            index, step = self._next(head.wait_deadline_s + _LATE_S)
            self._room.release()
            if isinstance(step, ThawError):
                raise step
            if isinstance(step, RunToken):
                text = chunks[index].token(step)
            elif isinstance(step, str):
                text = chunks[index].comment(step) if index == 0 else ""
            else:
                finished[index] = step
                text = chunks[index].finished(step)
            if text:
                yield text
        yield usage_event(head, [finished[i] for i in sorted(finished)], n_each) + "data: [DONE]\n\n"

    def _next(self, deadline_s: float) -> tuple[int, str | RunToken | RunFinished | ThawError]:
        """Raises TimeLimitExceeded.  Each part has its own limit, and says so itself."""
        try:
            return self._steps.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise TimeLimitExceeded("The action exceeded its time limits: a choice has not ended.") from None

    def _run(self, index: int, call: Call) -> None:
        try:
            for step in recorded(self._parts.core, call, lambda: None):
                self._room.acquire()
                self._steps.put((index, step))
        except ThawError as e:
            self._parts.stop.set()
            self._steps.put((index, e))
        except Exception as e:  # noqa: BLE001  the edge of a thread: its reader would wait for ever
            self._parts.stop.set()
            self._steps.put((index, PlatformError(f"There was an internal server error: {type(e).__name__}.")))
