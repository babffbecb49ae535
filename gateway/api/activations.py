"""…/activations: records, their results, logs and traces."""

from __future__ import annotations

import time

from flask import Blueprint, Response, request

from gateway.api import render
from gateway.api.held import client_watched, wait_s
from gateway.api.http import gateway, json_response, namespace, query_flag, query_int
from gateway.api.listing import page
from gateway.core import Gateway
from gateway.serving.packages import MISSING
from thaw import wire
from thaw.activation import Activation
from thaw.errors import BadRequest, NotFound
from thaw.ids import ActivationId, GroupId, Namespace, is_activation_id
from thaw.plan import Plan

blueprint = Blueprint("activations", __name__, url_prefix="/api/v1/namespaces/<ns>/activations")
_SETTLE_S = 1.0
_SCANNED = 2_000  # records examined for a listing by name


@blueprint.get("")
def list_activations(ns: str) -> Response:
    core, own = gateway(), namespace(ns)
    since, upto = query_int("since"), query_int("upto")
    count, docs = query_flag("count"), query_flag("docs")
    if count and docs:
        raise BadRequest("The parameters 'count' and 'docs' cannot both be true.")
    limit, skip = page()
    core.recorder.settle(_SETTLE_S)
    name = request.args.get("name", "")
    if count and not name:
        return json_response({"activations": core.records.count_activations(own, since_ms=since, upto_ms=upto)})
    if name:
        found = [r for r in _scan(own, since, upto) if name in _names(r)]
        if count:
            return json_response({"activations": len(found)})
        found = found[skip : skip + limit]
    else:
        found = core.records.activations(own, limit=limit, skip=skip, since_ms=since, upto_ms=upto)
    return json_response([render.activation(r) if docs else render.activation_summary(r) for r in found])


@blueprint.get("/<activation_id>")
def get_activation(ns: str, activation_id: str) -> Response:
    """With ``wait_s`` it is held until the activation has ended, which it may not have yet."""
    core, own, longest_s = gateway(), namespace(ns), wait_s()
    if longest_s and is_activation_id(activation_id):
        _hold(core, own, ActivationId(activation_id), longest_s)
    return json_response(render.activation(_record(ns, activation_id)))


@blueprint.get("/<activation_id>/result")
def get_result(ns: str, activation_id: str) -> Response:
    return json_response(render.result(_record(ns, activation_id)))


@blueprint.get("/<activation_id>/logs")
def get_logs(ns: str, activation_id: str) -> Response:
    return json_response({"logs": list(_record(ns, activation_id).logs)})


@blueprint.get("/<activation_id>/trace")
def get_trace(ns: str, activation_id: str) -> Response:
    """Thaw's addition: the activation's events and those of the start it waited for, with the plan's prediction."""
    core, record = gateway(), _record(ns, activation_id)
    ids = [record.activation_id, *([record.group_id] if record.group_id else [])]
    plan = core.registry.plan(GroupId(record.group_id)) if record.group_id else None
    return json_response(
        {
            "activation": render.activation(record),
            "group_id": record.group_id,
            "events": wire.to_plain(list(core.records.trace(*ids))),
            "plan": wire.to_plain(plan),
            "links": _links(plan),
        }
    )


def _hold(core: Gateway, own: Namespace, activation_id: ActivationId, longest_s: float) -> None:
    """A record of another namespace is none here: whoever asks for it must not learn that it is there."""

    def look() -> tuple[float, Activation | None]:
        began_s, record = time.monotonic(), core.records.activation(activation_id)
        return began_s, record if record is not None and record.namespace == own else None

    with client_watched() as hangup:
        core.held.until_news(
            own,
            hangup,
            longest_s,
            lambda: core.endings.listening(own, activation_id),
            look,
            lambda record: record is not None,
        )


def _links(plan: Plan | None) -> dict[str, float]:
    """Bytes per second of the network links of the plan's hosts, where they are known.  Only an operator may list
    hosts, but everybody may learn what a start of their own had."""
    named = set() if plan is None else {stage.host for stage in plan.stages}
    reports = gateway().registry.hosts() if named else []
    return {r.host_id: r.network_bytes_per_s for r in reports if r.host_id in named and r.network_bytes_per_s > 0}


def _names(record: Activation) -> tuple[str, ...]:
    """What a list by name calls the record: the action's name with and without its namespace, and the binding's."""
    bound = f"{record.binding}/{record.action.rpartition('/')[2]}" if record.binding else record.action
    return record.action, record.action.partition("/")[2], bound, bound.partition("/")[2]


def _record(ns: str, activation_id: str) -> Activation:
    core, own = gateway(), namespace(ns)
    if not is_activation_id(activation_id):
        raise BadRequest("The request content was malformed:\nan activation id is 32 lower-case hex digits.")
    record = core.records.activation(ActivationId(activation_id))
    if record is None:
        core.recorder.settle(_SETTLE_S)
        record = core.records.activation(ActivationId(activation_id))
    if record is None or record.namespace != own:
        raise NotFound(MISSING)
    return record


def _scan(own: Namespace, since: int | None, upto: int | None) -> list[Activation]:
    return gateway().records.activations(own, limit=_SCANNED, since_ms=since, upto_ms=upto)
