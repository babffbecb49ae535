"""…/activations: records, their results, logs and traces."""

from __future__ import annotations

import time
from collections.abc import Iterator

from flask import Blueprint, Response, request

from gateway.api.held import client_watched, wait_s
from gateway.api.http import gateway, json_response, namespace, query_flag, query_int
from gateway.api.openwhisk import render
from gateway.api.openwhisk.listing import page
from gateway.core import Gateway
from gateway.front.visit import VISIT, Visit
from gateway.serving.actions.packages import MISSING
from relay.state.record_lists import RecordParts
from thaw import wire
from thaw.activation import Activation
from thaw.errors import BadRequest, NotFound, PlatformError
from thaw.ids import ActivationId, GroupId, Namespace, is_activation_id
from thaw.logs import Log
from thaw.plan import Plan

blueprint = Blueprint("activations", __name__, url_prefix="/api/v1/namespaces/<ns>/activations")
_SETTLE_S = 1.0


@blueprint.get("")
def list_activations(ns: str) -> Response:
    core, own = gateway(), namespace(ns)
    since, upto = query_int("since"), query_int("upto")
    count, docs = query_flag("count"), query_flag("docs")
    if count and docs:
        raise BadRequest("The parameters 'count' and 'docs' cannot both be true.")
    limit, skip = page()
    core.recorder.settle(_SETTLE_S, own)
    name = request.args.get("name", "")
    if count:
        n = core.records.count_activations(own, since_ms=since, upto_ms=upto, name=name)
        return json_response({"activations": n})
    parts = core.records.activations(own, limit=limit, skip=skip, since_ms=since, upto_ms=upto, name=name)
    if docs:
        return _whole(core.log, parts)
    found = [render.activation_summary(r) for part in parts for r in part]
    _tell_unreadable(core.log, parts)
    return json_response(found)


def _whole(log: Log, parts: RecordParts) -> Response:
    """Long records are read when the client has read those before."""
    first = _joined(parts)
    if not parts.has_more:
        _tell_unreadable(log, parts)
        return Response(b"[" + first + b"]", content_type="application/json")
    visit: Visit | None = request.environ.get(VISIT)
    if visit is not None:
        visit.as_read = True
    return Response(_pieces(log, b"[" + first, parts), content_type="application/json")


def _tell_unreadable(log: Log, parts: RecordParts) -> None:
    if parts.n_unreadable:
        log.event("records_unreadable", n=parts.n_unreadable)


def _pieces(log: Log, piece: bytes, parts: RecordParts) -> Iterator[bytes]:
    """The client of a list that cannot be read to its end sees that the answer has none."""
    separator = b"" if piece == b"[" else b", "
    yield piece
    while parts.has_more:
        try:
            piece = _joined(parts)
        except PlatformError as e:
            log.event("list_cut", error=e.message)
            raise
        if piece:  # else all of the part have expired
            piece, separator = separator + piece, b", "
            yield piece
    _tell_unreadable(log, parts)
    yield b"]"


def _joined(parts: RecordParts) -> bytes:
    return b", ".join(wire.encode(render.activation(record), (", ", ": ")) for record in parts.next())


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
    """A record of another namespace counts as absent: a caller must not learn that it exists."""

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
    hosts, but everybody may learn it for their own starts."""
    named = set() if plan is None else {stage.host for stage in plan.stages}
    reports = gateway().registry.hosts() if named else []
    return {r.host_id: r.network_bytes_per_s for r in reports if r.host_id in named and r.network_bytes_per_s > 0}


def _record(ns: str, activation_id: str) -> Activation:
    core, own = gateway(), namespace(ns)
    if not is_activation_id(activation_id):
        raise BadRequest("The request content was malformed:\nan activation id is 32 lower-case hex digits.")
    record = core.records.activation(ActivationId(activation_id))
    if record is None:
        core.recorder.settle(_SETTLE_S, own)
        record = core.records.activation(ActivationId(activation_id))
    if record is None or record.namespace != own:
        raise NotFound(MISSING)
    return record
