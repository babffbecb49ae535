"""The answer of an HTTP server in an image to a web request, as it comes (serving/http_answers.py).

The request's thread writes each part as soon as it is there, and reads no further part while its client does not take
this one.  A client that leaves ends the request in the container.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from typing import Final

from flask import Response, g, request

from gateway.api.http import ACTIVATION_HEADER
from gateway.api.openwhisk.web_answer import streamed_head
from gateway.core import Gateway
from gateway.front.visit import VISIT, Visit
from gateway.serving.call import Call
from gateway.serving.http_answers import http_answer
from gateway.serving.outcome import outcome_of
from gateway.serving.runs import Outcome
from relay.protocol.messages import RunHead
from thaw.activation import ActivationStatus
from thaw.errors import BadRequest, DeveloperError, ThawError

_LEFT: Final = Outcome(ActivationStatus.APPLICATION_ERROR, {"error": "The client closed the connection."})


def begin(core: Gateway, call: Call, counted: ExitStack) -> Response | Outcome:
    """Run the call until its answer begins.  Return the response if the answer comes in parts; else the outcome has it.
    ``counted``: what the call counts in until its end.  Raises BadRequest."""
    call.answers_apart = True
    steps = _recorded(core, call, counted.pop_all().close)
    try:
        head = next(steps)
    except StopIteration as stop:
        outcome: Outcome = stop.value
        return outcome
    except ThawError as e:
        return outcome_of(e)
    assert isinstance(head, RunHead)  # noqa: S101  it comes first
    try:
        made = streamed_head(head.status, dict(head.headers))
    except BadRequest as e:
        with suppress(ThawError):
            steps.throw(DeveloperError(e.message))
        raise
    return _response(made.status, [*made.headers], head.n_bytes, steps)


def _recorded(core: Gateway, call: Call, leave: Callable[[], None]) -> Generator[RunHead | bytes, None, Outcome]:
    """The steps of a run.  However it ends, it is counted out and recorded once, before its client reads the end.
    Raises ThawError."""
    outcome = _LEFT
    try:
        outcome = yield from http_answer(core.dispatcher, call)
        return outcome
    except Exception as e:  # noqa: BLE001  however it failed, it is recorded
        error = e if isinstance(e, ThawError) else core.dispatcher.fault(call, e)
        outcome = outcome_of(error)
        raise error from None
    finally:
        leave()
        core.ended(call, outcome)


def _response(
    status: int,
    headers: list[tuple[str, str]],
    n_bytes: int | None,
    steps: Generator[RunHead | bytes, None, Outcome],
) -> Response:
    visit: Visit | None = request.environ.get(VISIT)
    if visit is not None:
        visit.as_made = True
    response = Response(_parts(steps), status)
    del response.headers["Content-Type"]
    for name, text in headers:
        response.headers.add(name, text)
    if n_bytes is not None:
        response.headers["Content-Length"] = str(n_bytes)
    response.headers.setdefault("X-Accel-Buffering", "no")
    response.headers[ACTIVATION_HEADER] = g.activation_id
    response.call_on_close(steps.close)
    return response


def _parts(steps: Iterator[RunHead | bytes]) -> Iterator[bytes]:
    """Raises ConnectionAbortedError when the answer breaks off: the connection then ends without the answer's end."""
    try:
        for part in steps:
            assert isinstance(part, bytes)  # noqa: S101  the head came before
            yield part
    except ThawError as e:
        raise ConnectionAbortedError(e.message) from e
