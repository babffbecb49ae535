"""/v1: the API of OpenAI's SDKs.  The client is held until ``limits.timeout``; a stream is written as it comes.

While a streaming client waits for a cold start it reads SSE comments (``: thaw queued``), written when something
happens; SDKs skip them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

from flask import Blueprint, Response, request

from gateway import metrics
from gateway.api.http import BadField, caller, gateway, json_object, json_response, openai_error
from gateway.api.openai_body import choose_seed, validate
from gateway.core import Gateway
from gateway.serving.action_cache import simple_name
from gateway.serving.call import Call
from gateway.serving.hangup import ClientGone, watched
from gateway.serving.openai_format import Chunks, aggregate
from gateway.serving.outcome import outcome_of
from gateway.serving.runs import Outcome, llm_tokens
from relay.protocol.messages import RunFinished, RunToken
from thaw.action import Action
from thaw.activation import ActivationStatus
from thaw.errors import NotFound, ThawError
from thaw.ids import ActivationId, random_hex_id
from thaw.trace import Phase

blueprint = Blueprint("openai", __name__)
ACTIVATION_HEADER: Final = "X-Openwhisk-Activation-Id"
_SSE: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class ModelMissing(NotFound):
    """OpenAI's model_not_found."""

    param = "model"
    openai_code = "model_not_found"


@blueprint.get("/v1/models")
def models() -> Response:
    subject = caller()
    found = [_model(a) for a in gateway().actions.list(subject.namespace) if a.is_llm]
    return json_response({"object": "list", "data": found})


@blueprint.get("/v1/models/<path:name>")
def model(name: str) -> Response:
    return json_response(_model(_find(caller().namespace, name)))


@blueprint.post("/v1/chat/completions")
def chat() -> Response:
    return _answer("chat")


@blueprint.post("/v1/completions")
def completions() -> Response:
    return _answer("completions")


def _model(action: Action) -> dict[str, Any]:
    served = action.config.model.served_name if action.config else ""
    name = simple_name(action.name)
    return {
        "id": name,
        "object": "model",
        "created": action.updated_ms // 1000,
        "owned_by": action.namespace,
        "served_name": served or name,
    }


def _find(namespace: Any, name: str) -> Action:
    try:
        return gateway().actions.by_model(namespace, name)
    except NotFound as e:
        raise ModelMissing(f"The model `{name}` does not exist.") from e


def _answer(endpoint: str) -> Response:
    core, subject = gateway(), caller()
    body = json_object(core.settings.llm_payload_bytes)
    if not isinstance(body.get("model"), str):
        raise BadField("model", "model must be the name of a deployed action.")
    action = _find(subject.namespace, body["model"])
    validate(endpoint, body)
    core.caps.check(action.name)
    with ExitStack() as entered:
        hangup, unwatch = watched(core.hangups, request.environ.get("gunicorn.socket"))
        entered.callback(unwatch)
        entered.enter_context(core.throttle.counted(subject.namespace))
        call = Call(ActivationId(random_hex_id()), action, subject, body, hangup, endpoint, choose_seed(body))
        call.trace(Phase.RECEIVED)
        if body.get("stream"):
            return _stream(core, call, entered.pop_all().close)
        return _whole(core, call)


def _whole(core: Gateway, call: Call) -> Response:
    outcome = core.execute(call)
    _record(core, call, outcome)
    if outcome.error is not None:
        response = json_response(openai_error(outcome.error), outcome.error.http_status)
    else:
        response = json_response(outcome.result)
    response.headers[ACTIVATION_HEADER] = call.activation_id
    return response


def _stream(core: Gateway, call: Call, leave: Callable[[], None]) -> Response:
    """The first step decides the status: an error before it is an ordinary error answer."""
    lines = _Lines(core, call, leave)
    try:
        first = lines.first()
    except ThawError as e:
        response = json_response(openai_error(e), e.http_status)
    else:
        response = Response(lines.after(first), headers=_SSE)
        response.call_on_close(lines.close)
    response.headers[ACTIVATION_HEADER] = call.activation_id
    return response


class _Lines:
    """The lines of one SSE answer.  However it ends (done, failed, client gone) one record is submitted."""

    def __init__(self, core: Gateway, call: Call, leave: Callable[[], None]) -> None:
        self._core, self._call, self._leave = core, call, leave
        self._steps = llm_tokens(core.dispatcher, call)
        options = call.payload.get("stream_options") or {}
        self._chunks = Chunks(call, include_usage=bool(options.get("include_usage")))
        self._tokens: list[RunToken] = []
        self._closed = False

    def first(self) -> str | RunToken | RunFinished:
        """Raises ThawError; the record is then submitted."""
        try:
            return next(self._steps)
        except Exception as e:  # noqa: BLE001  however it failed, it is counted out and recorded
            raise self._failed(e) from None

    def after(self, first: str | RunToken | RunFinished) -> Iterator[str]:
        try:
            if text := self._of(first):
                yield text
            for step in self._steps:
                if text := self._of(step):
                    yield text
        except Exception as e:  # noqa: BLE001  however it failed, it is counted out and recorded
            error = self._failed(e)
            if isinstance(error, ClientGone):
                return
            yield f"data: {json.dumps(openai_error(error))}\n\n"

    def close(self) -> None:
        """The server is done with the answer.  If the answer is unfinished, the client has gone."""
        self._steps.close()
        self._end(Outcome(ActivationStatus.APPLICATION_ERROR, {"error": "The client closed the connection."}))

    def _failed(self, error: Exception) -> ThawError:
        if not isinstance(error, ThawError):
            error = self._core.dispatcher.fault(self._call, error)
        self._end(outcome_of(error))
        return error

    def _of(self, step: str | RunToken | RunFinished) -> str:
        if isinstance(step, RunToken):
            self._tokens.append(step)
            return self._chunks.token(step)
        if isinstance(step, str):
            return f": thaw {step}\n\n"
        self._end(Outcome(ActivationStatus.SUCCESS, aggregate(self._call, self._tokens, step), step))
        return self._chunks.finished(step) + "data: [DONE]\n\n"

    def _end(self, outcome: Outcome) -> None:
        if not self._closed:
            self._closed = True
            self._leave()
            _record(self._core, self._call, outcome)


def _record(core: Gateway, call: Call, outcome: Outcome) -> None:
    metrics.ended(call, outcome)
    core.recorder.submit(call, outcome)
