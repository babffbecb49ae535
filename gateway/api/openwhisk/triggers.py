"""…/triggers: create, read, delete, list, and fire, which calls the actions of the active rules."""

from __future__ import annotations

import json
from typing import Any

from flask import Blueprint, Response

from gateway.api.http import (
    ACTIVATION_HEADER,
    caller,
    entity_name,
    gateway,
    json_object,
    json_response,
    namespace,
    takes,
)
from gateway.api.openwhisk import cloud_event, render
from gateway.api.openwhisk.calls import make_call
from gateway.api.openwhisk.entity_body import body_bytes, changed, common, entity_body, listed, may_write
from gateway.api.openwhisk.event_body import sent_event
from gateway.core import Gateway
from gateway.serving.blocking import pending_of
from gateway.serving.call import Call
from gateway.serving.hangup import Hangup
from relay.state.entities import Change
from thaw.activation import Activation, ActivationStatus
from thaw.clock import wall_ms
from thaw.entities import RuleLink, RuleStatus, Trigger
from thaw.errors import BadRequest, Forbidden, NotFound, PlatformError
from thaw.ids import ActionName, ActivationId, random_hex_id

blueprint = Blueprint("triggers", __name__, url_prefix="/api/v1/namespaces/<ns>/triggers")


@blueprint.get("")
def list_triggers(ns: str) -> Response:
    found = gateway().entities.all(Trigger, namespace(ns))
    return json_response(listed("triggers", [common(trigger) for trigger in found]))


@blueprint.get("/<trigger>")
def get_trigger(ns: str, trigger: str) -> Response:
    return json_response(_entity(gateway().entities.get(Trigger, namespace(ns), entity_name(trigger)).entity))


@blueprint.put("/<trigger>")
@takes(body_bytes)
def put_trigger(ns: str, trigger: str) -> Response:
    core, own = gateway(), namespace(ns)
    was, body = core.entities.find(Trigger, own, entity_name(trigger)), entity_body()
    may_write(was)
    becomes = changed(Trigger(own, trigger) if was is None else was.entity, body, is_new=was is None)
    core.entities.swap(Change(was, becomes))
    return json_response(_entity(becomes))


@blueprint.delete("/<trigger>")
def delete_trigger(ns: str, trigger: str) -> Response:
    """Its rules stay, and are inactive."""
    core = gateway()
    was = core.entities.get(Trigger, namespace(ns), entity_name(trigger))
    core.entities.swap(Change(was, None))
    return json_response(_entity(was.entity))


def _event_bytes(**_: str) -> int:
    return gateway().settings.payload_bytes


@blueprint.post("/<trigger>")
@takes(_event_bytes)
def fire(ns: str, trigger: str) -> Response:
    """Accept a 202 for each active rule before this is answered, all in one step.  So none is lost if a process dies,
    and a failed firing has started nothing and can be repeated."""
    core, own = gateway(), namespace(ns)
    found = core.entities.get(Trigger, own, entity_name(trigger)).entity
    event = {**found.parameters, **_sent(core.settings.payload_bytes)}
    active = {name: link for name, link in found.rules.items() if link.status is RuleStatus.ACTIVE}
    if not active:
        return Response(status=204)
    core.throttle.enter_again(own, len(active))
    fired, began_ms = ActivationId(random_hex_id()), wall_ms()
    made = [_call(core, fired, name, link, event) for name, link in active.items()]
    core.records.accept_all(own, (pending_of(call) for call, _ in made if call is not None))
    record = _record(found, fired, began_ms, event, tuple(json.dumps(line) for _, line in made))
    try:
        core.records.end(record)
    except PlatformError as e:  # its calls are accepted: after an error, the client would repeat them
        core.log.event("record_lost", activation_ids=[fired], error=e.message)
    response = json_response({"activationId": fired}, 202)
    response.headers[ACTIVATION_HEADER] = fired
    return response


def _sent(max_bytes: int) -> dict[str, Any]:
    """Return the arguments of the firing: those of an event, or the fields of a JSON object."""
    event = sent_event(max_bytes)
    return json_object(max_bytes, optional=True) if event is None else cloud_event.arguments(event)


def _of_the_data(event: dict[str, Any]) -> dict[str, Any]:
    """A model's request has no place for the attributes of an event."""
    return {name: value for name, value in event.items() if name != cloud_event.FIELD}


def _call(
    core: Gateway, fired: ActivationId, rule: str, link: RuleLink, event: dict[str, Any]
) -> tuple[Call | None, dict[str, Any]]:
    """The call of one rule, and the line of the trigger's logs that tells of it.  A rule whose action cannot be called
    does not stop the other rules.  Raises Throttled, PlatformError."""
    subject = caller()
    named = {"rule": f"{subject.namespace}/{rule}", "action": link.action}
    try:
        target = core.packages.target(link.action, subject.namespace)
        given = _of_the_data(event) if target.action.is_llm else event
        call = make_call(target, subject, dict(given), Hangup(), cause=fired)
    except (NotFound, Forbidden, BadRequest) as e:
        return None, {"statusCode": 1, "success": False, "error": e.message, **named}
    core.admit(call, is_held=False)
    return call, {"statusCode": 0, "success": True, "activationId": call.activation_id, **named}


def _record(
    trigger: Trigger, fired: ActivationId, began_ms: int, event: dict[str, Any], lines: tuple[str, ...]
) -> Activation:
    return Activation(
        activation_id=fired,
        namespace=trigger.namespace,
        action=ActionName(f"{trigger.namespace}/{trigger.name}"),
        action_version=trigger.version,
        subject=caller().subject,
        kind="trigger",
        start_ms=began_ms,
        end_ms=max(began_ms, wall_ms()),
        status=ActivationStatus.SUCCESS,
        result=event,
        logs=lines,
        start_mode="",
    )


def _entity(trigger: Trigger) -> dict[str, Any]:
    return {**common(trigger), "parameters": render.pairs(trigger.parameters), "limits": {}, "rules": _rules(trigger)}


def _rules(trigger: Trigger) -> dict[str, Any]:
    return {
        f"{trigger.namespace}/{name}": {"action": path_and_name(link.action), "status": link.status}
        for name, link in trigger.rules.items()
    }


def path_and_name(whole: str) -> dict[str, str]:
    path, _, name = whole.rpartition("/")
    return {"path": path, "name": name}
