"""/api/v1/thaw: the routes for operators' keys only: hosts, keys, and the usage of each namespace.

Every route of this file is refused to tenants by :func:`only_operators`, so none can forget it.  It asks the state
server for the key each time: a revoked key that still worked here for a minute could create another key.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from flask import Blueprint, Response, request

from gateway.api.held import wait_s
from gateway.api.http import caller, caller_now, gateway, json_object, json_response
from gateway.api.platform.work import held_work
from gateway.serving.held.work import shared_by
from relay.state.api_keys import ApiKey, Role
from thaw import wire
from thaw.clock import wall_ms
from thaw.errors import BadRequest, Forbidden, ProtocolError
from thaw.host import HostLeft
from thaw.ids import HostId, Namespace, is_entity_name
from thaw.model_uri import ModelUri
from thaw.pools import is_pool
from thaw.quotas import LEAST, MOST_WEIGHT, NAMES

blueprint = Blueprint("operator", __name__, url_prefix="/api/v1/thaw")
_MOST_BYTES = 64 * 1024
_MOST = 2**53 - 1


@blueprint.before_request
def only_operators() -> None:
    """Raises Unauthorized, Forbidden."""
    if not caller_now().is_operator:
        raise Forbidden(
            "Only an operator's key may do this.",
            hint="ask an operator, or use such a key with --auth (thaw key create --namespace N --operator makes one)",
        )


@blueprint.get("/hosts")
def hosts() -> Response:
    """Every host's last report, for ``thaw host list``."""
    core = gateway()
    live = {r.host_id for r in core.registry.live_hosts()}
    found = [{**wire.to_plain(r), "live": r.host_id in live} for r in core.registry.hosts()]
    return json_response({"hosts": found, "now_wall_ms": wall_ms()})


@blueprint.get("/work")
def work() -> Response:
    """The running, starting and waiting work of all namespaces."""
    return held_work(None)


@blueprint.get("/hosts/<host_id>/drain")
def drained(host_id: str) -> Response:
    """Return the instances and requests that the host still holds.  With ``known``, an earlier answer, the call waits
    up to ``wait_s`` until that is no longer true."""
    known = _known(request.args.get("known"))
    left = gateway().host_drains.wait(HostId(host_id), known, wait_s())
    return json_response({"host": host_id, **wire.to_plain(left)})


def _known(text: str | None) -> HostLeft | None:
    try:
        return None if text is None else wire.loads(HostLeft, text.encode())
    except ProtocolError as e:
        raise BadRequest(f"known: {e.message}", hint="give back what the last call answered") from e


@blueprint.route("/hosts/<host_id>/drain", methods=["PUT", "DELETE"])
def drain(host_id: str) -> Response:
    """PUT: the host takes no new work, and its running requests move or end.  DELETE: the host takes work again."""
    wanted = request.method == "PUT"
    gateway().registry.drain_host(HostId(host_id), drain=wanted)
    return json_response({"host": host_id, "draining": wanted})


@blueprint.get("/keys")
def list_keys() -> Response:
    named = request.args.get("namespace")
    found = gateway().keys.list(None if named is None else Namespace(named))
    return json_response({"keys": [_listed(one.key_id, one.key) for one in found]})


@blueprint.post("/keys")
def create_key() -> Response:
    """The answer holds the key itself, for the only time."""
    body = json_object(_MOST_BYTES)
    namespace = named_namespace(body.get("namespace"))
    try:
        role = Role(body.get("role", Role.TENANT))
    except ValueError:
        raise BadRequest(f"role must be one of {', '.join(Role)}, not {body['role']!r:.80}.") from None
    secret, key = gateway().keys.create(namespace, role)
    gateway().log.event("key_created", key_id=key.key_id, namespace=namespace, role=role, by=caller().namespace)
    response = json_response({**_listed(key.key_id, key), "key": secret})
    response.headers["Cache-Control"] = "no-store"
    return response


@blueprint.delete("/keys/<key_id>")
def revoke_key(key_id: str) -> Response:
    """Here the key ends at once, at other gateways when they ask for it again (CACHE_S).  The same request at another
    gateway ends it there at once, too."""
    core = gateway()
    found = core.keys.revoke(key_id)
    core.auth.forget()
    for one in found:
        core.log.event("key_revoked", key_id=one.key_id, namespace=one.key.namespace, by=caller().namespace)
    return json_response(_listed(key_id, found[0].key))


@blueprint.get("/namespaces")
def usage() -> Response:
    """Each namespace's numbers of live keys, actions, kept records, and present instances."""
    core = gateway()
    n_keys = Counter(one.key.namespace for one in core.keys.list())
    n_actions = Counter(a.namespace for a in core.records.all_actions() if not is_pool(a))
    n_instances = Counter(Namespace(i.action.partition("/")[0]) for i in core.registry.instances() if i.action)
    found = [
        {
            "namespace": name,
            "keys": n_keys[name],
            "actions": n_actions[name],
            "activations": core.records.count_activations(name),
            "instances": n_instances[name],
        }
        for name in sorted({*n_keys, *n_actions, *n_instances})
    ]
    return json_response({"namespaces": found})


@blueprint.get("/models")
def model_uses() -> Response:
    """Which model each function names, and which version each instance and each start has."""
    core = gateway()
    actions = [
        {"action": a.name, "version": a.version, "uri": uri}
        for a in core.records.all_actions()
        if a.config is not None and not is_pool(a)
        for uri in (a.config.model.uri, a.config.model.adapter)
        if uri
    ]
    runs = {(i.action, i.model_version) for i in core.registry.instances() if i.model_version}
    runs |= {(p.action, p.model.version) for p in core.registry.plans() if p.model is not None}
    shared = {one.action: one.functions for one in shared_by(core.client, {action for action, _ in runs})}
    running = {(function, version) for action, version in runs for function in shared.get(action, (action,))}
    return json_response(
        {"actions": actions, "running": [{"action": a, "modelVersion": v} for a, v in sorted(running)]}
    )


@blueprint.route("/namespaces/<ns>/models", methods=["GET", "PUT", "DELETE"])
def models(ns: str) -> Response:
    """The prefixes of models that the namespace may run: those for all (THAW_MODELS), and its own.  PUT adds to its
    own, DELETE removes from them.  Running instances go on; no other model starts from now on."""
    core, namespace = gateway(), named_namespace(ns)
    allowed = core.models.allowed
    if request.method == "GET":
        own = allowed.of(namespace)
    else:
        change = allowed.add if request.method == "PUT" else allowed.remove
        own = change(namespace, _prefixes(json_object(_MOST_BYTES)))
        core.log.event("models_allowed", namespace=namespace, prefixes=list(own), by=caller().namespace)
    return json_response({"namespace": namespace, "for_all": list(core.models.policy.default), "own": list(own)})


@blueprint.route("/namespaces/<ns>/quotas", methods=["GET", "PUT"])
def quotas(ns: str) -> Response:
    """The namespace's quotas and its weight: the defaults (THAW_QUOTA_...), its own values, which have precedence, and
    its present usage.  PUT sets the values that it names; null means the default again."""
    core, namespace = gateway(), named_namespace(ns)
    if request.method == "PUT":
        changes = _quota_changes(json_object(_MOST_BYTES))
        core.quotas.stored.change(namespace, changes)
        core.log.event("quotas_set", namespace=namespace, quotas=changes, by=caller().namespace)
    own = core.quotas.changed(namespace)
    return json_response(
        {
            "namespace": namespace,
            "default": wire.to_plain(core.quotas.default),
            "own": {name: value for name, value in wire.to_plain(own).items() if value is not None},
            "used": {**wire.to_plain(core.storage.usage(namespace)), "kept": core.kept.count(namespace)},
        }
    )


def _quota_changes(body: dict[str, Any]) -> dict[str, Any]:
    """Raises BadRequest."""
    if not body or not body.keys() <= set(NAMES):
        raise BadRequest(f"A quota is one of {', '.join(NAMES)}.")
    for name, value in body.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        least = LEAST.get(name, 0)
        if value is None or (is_number and (0 < value <= MOST_WEIGHT if name == "weight" else _is_count(value, least))):
            continue
        what = f"a number above 0, at most {MOST_WEIGHT:g}" if name == "weight" else f"a whole number, {least} or more"
        raise BadRequest(f"{name} must be {what}, or null for the default, not {value!r:.80}.")
    return {name: float(value) if name == "weight" and value is not None else value for name, value in body.items()}


def _is_count(value: float, least: int) -> bool:
    return isinstance(value, int) and least <= value <= _MOST


def _prefixes(body: dict[str, Any]) -> list[str]:
    found = body.get("prefixes")
    if not isinstance(found, list) or not found or not all(isinstance(p, str) for p in found):
        raise BadRequest("prefixes must be a list of model URIs' beginnings, such as s3://team-a/.")
    for prefix in found:
        if "," in prefix:
            raise BadRequest(f"{prefix!r:.300} is more than one prefix.")
        ModelUri.parse_prefix(prefix)
    return found


def named_namespace(name: object) -> Namespace:
    """Raises BadRequest.  ``_`` stands for the caller's own namespace in paths, so no namespace may have that name."""
    if not isinstance(name, str) or not is_entity_name(name) or name == "_":
        raise BadRequest("namespace must be a name of letters, digits, '-', '_', '.' and '@'.")
    return Namespace(name)


def _listed(key_id: str, key: ApiKey) -> dict[str, Any]:
    return {"id": key_id, "namespace": key.namespace, "role": key.role, "created_ms": key.created_ms}
