"""…/actions: create, read, update, delete, list."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from flask import Blueprint, Response, request

from gateway.api import render
from gateway.api.action_body import NotHere, changed_action, new_action
from gateway.api.http import (
    action_name,
    gateway,
    json_object,
    json_response,
    namespace,
    query_flag,
    query_int,
    takes,
)
from gateway.serving.preflight import Verdict, unfit
from gateway.settings import COPIES
from thaw.action import Action
from thaw.errors import Conflict, NotFound, Throttled

blueprint = Blueprint("actions", __name__, url_prefix="/api/v1/namespaces/<ns>")
LIST_DEFAULT, LIST_MAX = 30, 200


def page() -> tuple[int, int]:
    """Return ``limit`` (0 means the most) and ``skip``."""
    limit = query_int("limit", LIST_DEFAULT, high=LIST_MAX)
    return limit or LIST_MAX, query_int("skip", 0) or 0


@blueprint.get("/actions")
def list_actions(ns: str) -> Response:
    found = gateway().actions.list(namespace(ns))
    if query_flag("count"):
        return json_response({"actions": len(found)})
    limit, skip = page()
    return json_response([render.action_summary(a) for a in found[skip : skip + limit]])


@blueprint.get("/actions/<path:name>")
def get_action(ns: str, name: str) -> Response:
    code = request.args.get("code", "true").lower() != "false"
    core, full_name = gateway(), action_name(ns, name)
    if not code:
        return _rendered(core.actions.get(full_name), code=False)
    own, needed = namespace(ns), COPIES * core.records.action_bytes(namespace(ns), full_name)
    if not core.code_answers.take(own, needed):
        raise Throttled("Too many answers with long code at once.", hint="ask with code=false, or for one at a time")
    with ExitStack() as held:
        held.callback(core.code_answers.give_back, own, needed)
        response = _rendered(core.records.action(own, full_name), code=True)
        response.call_on_close(held.pop_all().close)
    return response


def _rendered(found: Action, *, code: bool) -> Response:
    return json_response(render.action(found, code=code, serving=gateway().room.serving(found.name)))


def _action_bytes(ns: str, name: str) -> int:
    action_name(ns, name)
    return gateway().settings.action_bytes


@blueprint.put("/actions/<path:name>")
@takes(_action_bytes)
def put_action(ns: str, name: str) -> Response:
    core, own, full_name = gateway(), namespace(ns), action_name(ns, name)
    body = json_object(core.settings.action_bytes)
    overwrite = query_flag("overwrite")
    try:
        old = core.records.action(namespace(ns), full_name)
    except NotFound:
        last = core.records.last_version(full_name)
        action = new_action(full_name, namespace(ns), body, core.settings, last)
    else:
        if not overwrite:
            raise Conflict("resource already exists", hint="update it, or PUT with overwrite=true")
        last = old.version
        action = changed_action(old, body, core.settings)
    core.models.check(action)
    verdict = _preflight(action, body, own)
    core.actions.put(action, last=last)
    if verdict is not None and action.config is not None:
        verdict = core.preflight.look_again(action.config, own, verdict)
    return json_response(render.action(action) | ({} if verdict is None else {"preflight": render.preflight(verdict)}))


def _preflight(action: Action, body: dict[str, Any], own: str) -> Verdict | None:
    """None where the model and its settings stay what they were.  Raises Unfit unless the caller forces the deploy."""
    if action.config is None or not ("exec" in body or "config" in body):
        return None
    force = query_flag("force")
    verdict = gateway().preflight.check(action.config, own)
    if verdict.refusal is not None and not force:
        raise unfit(verdict.refusal)
    return verdict


@blueprint.delete("/actions/<path:name>")
def delete_action(ns: str, name: str) -> Response:
    return json_response(render.action(gateway().actions.delete(action_name(ns, name))))


@blueprint.route("/<any(packages, triggers, rules):kind>", methods=["GET", "PUT", "POST", "DELETE"])
@blueprint.route("/<any(packages, triggers, rules):kind>/<path:rest>", methods=["GET", "PUT", "POST", "DELETE"])
def absent(ns: str, kind: str, rest: str = "") -> Response:
    """Lists are empty, so that clients that list before they act still work; other requests say what is missing."""
    namespace(ns)
    if request.method == "GET" and not rest:
        return json_response([] if not query_flag("count") else {kind: 0})
    if request.method == "GET":
        raise NotFound("The requested resource does not exist.")
    raise NotHere(f"{kind.capitalize()} are absent in this version; actions and activations are here.")
