"""Answers of several choices: the parts run beside one another, each on a thread, and end together.

::

    part 0 ─ steps ─▶╮
    part 1 ─ steps ─▶┼─▶ queue ─▶ the request's thread ─▶ chunks of all choices, as they come
    part 2 ─ steps ─▶╯

When one part fails, or the client hangs up, all of them end.  Their events have no ids: a client cannot resume such a
stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from flask import Response, request

from gateway.api.http import ACTIVATION_HEADER, json_response, openai_error
from gateway.api.streaming import SSE, START_HEADER, Asked, how_started, recorded
from gateway.core import Gateway
from gateway.serving.answers.merging import Merging
from gateway.serving.answers.several import CHOICES_BYTES, SHORT_BYTES, Several, merged
from gateway.serving.call import Call
from gateway.serving.hangup import ClientGone, Hangup, watched
from gateway.serving.runs import Outcome
from thaw.errors import ThawError, Throttled, TooLarge


class _Parts:
    """The calls of one request, and the means to end all of them."""

    def __init__(self, core: Gateway, asked: Asked, made: Several, entered: ExitStack) -> None:
        self.core, self.stop = core, Hangup()
        _take_memory(core, asked, made, entered)
        hangup, unwatch = watched(core.hangups, request.environ.get("gunicorn.socket"))
        entered.callback(unwatch)
        entered.enter_context(hangup.waking(self.stop.set))
        for _ in made.bodies:
            entered.enter_context(core.throttle.counted(asked.subject.namespace))
        self.calls = [replace(asked, body=body).call(self.stop) for body in made.bodies]
        for call in self.calls:
            call.prompts_bytes = self.calls[0].prompts_bytes


def _take_memory(core: Gateway, asked: Asked, made: Several, entered: ExitStack) -> None:
    """Raises TooLarge, Throttled."""
    owner, n_bytes = asked.subject.namespace, made.n_bytes
    if n_bytes <= SHORT_BYTES:
        return
    if n_bytes > CHOICES_BYTES // 2:
        raise TooLarge(f"The choices together are larger than allowed: {n_bytes} > {CHOICES_BYTES // 2} bytes.")
    if not core.choice_bodies.take(owner, n_bytes):
        raise Throttled("Too many requests for choices with long bodies at once.", hint="ask for one at a time")
    entered.callback(core.choice_bodies.give_back, owner, n_bytes)


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
    """Return the error that ended the others; those were told that their client had gone."""
    errors = [o.error for o in outcomes if o.error is not None]
    return next((e for e in errors if not isinstance(e, ClientGone)), errors[0] if errors else None)


def stream(core: Gateway, asked: Asked, made: Several) -> Response:
    with ExitStack() as entered:
        parts = _Parts(core, asked, made, entered)
        merging = Merging(core.choices, parts.calls, parts.stop, partial(recorded, core, leave=lambda: None))
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
