"""POST …/actions/{name}: invoke, blocking or not."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

from flask import Blueprint, Response, request

from gateway import metrics
from gateway.api import render
from gateway.api.calls import make_call
from gateway.api.http import (
    ACTIVATION_HEADER,
    any_action_name,
    caller,
    gateway,
    json_object,
    json_response,
    query_flag,
    query_int,
    takes,
)
from gateway.core import Gateway
from gateway.serving.blocking import pending_of
from gateway.serving.call import Call
from gateway.serving.hangup import watched
from gateway.serving.outcome import activation_of
from gateway.serving.packages import Target
from gateway.serving.runs import Outcome
from thaw.action import Action
from thaw.activation import ActivationStatus

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
        body = json_object(payload_bytes(target.action), optional=True)
        call = make_call(target, caller(), body, hangup)
        core.admit(call, is_held=blocking)
        with ExitStack() as counted:
            place = counted.enter_context(core.throttle.counted(call.subject.namespace))
            if not blocking:
                return _accept(core, call)
            return _answer(call, core.blocking.run(call, wait_ms / 1000, counted, place), only_result=only_result)
    finally:
        unwatch()


def _accept(core: Gateway, call: Call) -> Response:
    core.records.accept(pending_of(call))
    return _accepted(call)


def _accepted(call: Call) -> Response:
    response = json_response({"activationId": call.activation_id}, 202)
    response.headers[ACTIVATION_HEADER] = call.activation_id
    return response


def _answer(call: Call, outcome: Outcome | None, *, only_result: bool) -> Response:
    """``outcome``: None when the call became a 202."""
    if outcome is None:
        return _accepted(call)
    metrics.ended(call, outcome)
    body = outcome.result if only_result else render.activation(activation_of(call, outcome))
    response = json_response(body, _STATUS[outcome.status])
    response.headers[ACTIVATION_HEADER] = call.activation_id
    return response
