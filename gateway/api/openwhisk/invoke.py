"""POST …/actions/{name}: invoke, blocking or not."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Final

from flask import Blueprint, Response, g, request

from gateway import metrics
from gateway.api.http import (
    ACTIVATION_HEADER,
    any_action_name,
    caller,
    gateway,
    json_response,
    query_flag,
    query_int,
    takes,
)
from gateway.api.openwhisk import cloud_event, render
from gateway.api.openwhisk.calls import make_call
from gateway.api.openwhisk.cloud_event import Mode
from gateway.api.openwhisk.event_body import sent_arguments
from gateway.core import Gateway
from gateway.serving.actions.packages import Target
from gateway.serving.blocking import pending_of
from gateway.serving.call import Call
from gateway.serving.hangup import watched
from gateway.serving.outcome import activation_of
from gateway.serving.runs import Outcome
from thaw.action import Action
from thaw.activation import ActivationStatus
from thaw.errors import BadRequest, DeveloperError

blueprint = Blueprint("invoke", __name__, url_prefix="/api/v1/namespaces/<ns>")
_STATUS: Final = {
    ActivationStatus.SUCCESS: 200,
    ActivationStatus.APPLICATION_ERROR: 502,
    ActivationStatus.DEVELOPER_ERROR: 502,
    ActivationStatus.INTERNAL_ERROR: 500,
}


def _argument_bytes(ns: str, name: str) -> int:
    return payload_bytes(_target(ns, name).action)


def _target(ns: str, name: str) -> Target:
    return gateway().packages.target(any_action_name(ns, name), caller().namespace)


def payload_bytes(action: Action) -> int:
    settings = gateway().settings
    return settings.llm_payload_bytes if action.is_llm else settings.payload_bytes


@blueprint.post("/actions/<path:name>")
@takes(_argument_bytes)
def invoke(ns: str, name: str) -> Response:
    core = gateway()
    blocking, only_result = query_flag("blocking"), query_flag("result")
    wait_ms = query_int("timeout", round(core.settings.blocking_s * 1000), low=1, high=60_000) or 1
    target = _target(ns, name)
    hangup, unwatch = watched(core.hangups, request.environ.get("gunicorn.socket"))
    try:
        body, mode = sent_arguments(target.action, payload_bytes(target.action))
        call = make_call(target, caller(), body, hangup)
        core.admit(call, is_held=blocking)
        with ExitStack() as counted:
            place = counted.enter_context(core.throttle.counted(call.subject.namespace))
            if not blocking:
                return _accept(core, call)
            outcome = core.blocking.run(call, wait_ms / 1000, counted, place)
            return _answer(call, outcome, mode, only_result=only_result)
    finally:
        unwatch()


def _accept(core: Gateway, call: Call) -> Response:
    core.records.accept(pending_of(call))
    return _accepted(call)


def _accepted(call: Call) -> Response:
    response = json_response({"activationId": call.activation_id}, 202)
    response.headers[ACTIVATION_HEADER] = call.activation_id
    return response


def _answer(call: Call, outcome: Outcome | None, mode: Mode | None, *, only_result: bool) -> Response:
    """``outcome``: None when the call became a 202."""
    if outcome is None:
        return _accepted(call)
    metrics.ended(call, outcome)
    if mode is not None and only_result and (answered := _event(call, outcome, mode)) is not None:
        return answered
    body = outcome.result if only_result else render.activation(activation_of(call, outcome))
    response = json_response(body, _STATUS[outcome.status])
    response.headers[ACTIVATION_HEADER] = call.activation_id
    return response


def _event(call: Call, outcome: Outcome, mode: Mode) -> Response | None:
    """Return the event with which a function answered an event.  Raises DeveloperError."""
    if outcome.status is not ActivationStatus.SUCCESS:
        return None
    g.activation_id = call.activation_id
    try:
        return event_answer(call, outcome.result, mode)
    except BadRequest as e:
        raise DeveloperError(e.message) from e


def event_answer(call: Call, result: Any, mode: Mode) -> Response | None:
    """Return the event in a function's result; ``mode`` is the mode of the event that it got.  Raises BadRequest."""
    source = f"/{call.action.name}"
    made = cloud_event.answer(result, mode, event_id=call.activation_id, source=source)
    if made is None:
        return None
    response = Response(made.body, 200)
    del response.headers["Content-Type"]
    if made.content_type:
        response.headers["Content-Type"] = made.content_type
    for name, value in made.headers:
        response.headers[name] = value
    response.headers[ACTIVATION_HEADER] = call.activation_id
    return response
