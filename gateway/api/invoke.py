"""POST …/actions/{name}: invoke, blocking or not."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Final

from flask import Blueprint, Response, request

from gateway import metrics
from gateway.api import render
from gateway.api.http import (
    ACTIVATION_HEADER,
    action_name,
    caller,
    gateway,
    json_object,
    json_response,
    query_flag,
    query_int,
    takes,
)
from gateway.api.openai_body import choose_seed, validate
from gateway.core import Gateway
from gateway.serving.blocking import pending_of
from gateway.serving.call import Call
from gateway.serving.hangup import watched
from gateway.serving.outcome import activation_of
from thaw.action import Action
from thaw.activation import ActivationStatus
from thaw.errors import BadRequest
from thaw.ids import ActivationId, random_hex_id
from thaw.trace import Phase

blueprint = Blueprint("invoke", __name__, url_prefix="/api/v1/namespaces/<ns>")
_STATUS: Final = {
    ActivationStatus.SUCCESS: 200,
    ActivationStatus.APPLICATION_ERROR: 502,
    ActivationStatus.DEVELOPER_ERROR: 502,
    ActivationStatus.INTERNAL_ERROR: 500,
}
PROTECTED: Final = "Request defines parameters that are not allowed (e.g., reserved properties)."


def _argument_bytes(ns: str, name: str) -> int:
    return _payload_bytes(gateway().actions.get(action_name(ns, name)))


def _payload_bytes(action: Action) -> int:
    settings = gateway().settings
    return settings.llm_payload_bytes if action.is_llm else settings.payload_bytes


@blueprint.post("/actions/<path:name>")
@takes(_argument_bytes)
def invoke(ns: str, name: str) -> Response:
    core = gateway()
    blocking, only_result = query_flag("blocking"), query_flag("result")
    wait_ms = query_int("timeout", round(core.settings.blocking_s * 1000), low=1, high=60_000) or 1
    action = core.actions.get(action_name(ns, name))
    hangup, unwatch = watched(core.hangups, request.environ.get("gunicorn.socket"))
    try:
        call = _call(core, action, hangup)
        core.storage.check(call.subject.namespace)
        core.caps.check(action.name, is_held=blocking)
        with ExitStack() as counted:
            counted.enter_context(core.throttle.counted(call.subject.namespace))
            return _blocking(core, call, wait_ms / 1000, counted, only_result) if blocking else _accept(core, call)
    finally:
        unwatch()


def _call(core: Gateway, action: Action, hangup: Any) -> Call:
    body = json_object(_payload_bytes(action), optional=True)
    payload = arguments(action, body)
    call = Call(ActivationId(random_hex_id()), action, caller(), payload, hangup)
    if action.is_llm:
        call.endpoint = "chat" if "messages" in payload else "completions"
        payload.pop("stream", None)
        payload.pop("stream_options", None)
        payload.setdefault("model", action.name.rpartition("/")[2])
        validate(call.endpoint, payload)
        call.seed = choose_seed(payload, call.activation_id)
    call.trace(Phase.RECEIVED)
    return call


def arguments(action: Action, body: dict[str, Any]) -> dict[str, Any]:
    """Merge the bound parameters with the call's, which win.  With ``final`` a bound parameter cannot be replaced."""
    if action.annotations.get("final") is True and set(body) & set(action.parameters):
        raise BadRequest(PROTECTED)
    return {**action.parameters, **body}


def _accept(core: Gateway, call: Call) -> Response:
    core.records.accept(pending_of(call))
    return _accepted(call)


def _accepted(call: Call) -> Response:
    response = json_response({"activationId": call.activation_id}, 202)
    response.headers[ACTIVATION_HEADER] = call.activation_id
    return response


def _blocking(core: Gateway, call: Call, wait_s: float, counted: ExitStack, only_result: bool) -> Response:
    outcome = core.blocking.run(call, wait_s, counted)
    if outcome is None:
        return _accepted(call)
    metrics.ended(call, outcome)
    body = outcome.result if only_result else render.activation(activation_of(call, outcome))
    response = json_response(body, _STATUS[outcome.status])
    response.headers[ACTIVATION_HEADER] = call.activation_id
    return response
