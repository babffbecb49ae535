"""…/actions: create, read, update, delete, list."""

from __future__ import annotations

from contextlib import ExitStack

from flask import Blueprint, Response, request

from gateway.api import render
from gateway.api.action_body import changed_action, new_action
from gateway.api.entity_body import listed
from gateway.api.http import (
    action_name,
    any_action_name,
    caller,
    entity_name,
    gateway,
    json_object,
    json_response,
    namespace,
    query_flag,
    takes,
)
from gateway.core import Gateway
from gateway.serving.action_cache import namespace_of
from gateway.serving.packages import with_inherited
from gateway.settings import COPIES
from thaw.action import Action
from thaw.errors import Conflict, NotFound, Throttled
from thaw.ids import Namespace

blueprint = Blueprint("actions", __name__, url_prefix="/api/v1/namespaces/<ns>")


@blueprint.get("/actions")
def list_actions(ns: str) -> Response:
    return _page(gateway().actions.list(namespace(ns)))


def _page(found: list[Action]) -> Response:
    return json_response(listed("actions", [render.action_summary(a) for a in found]))


def _in_package(ns: str, package: str) -> Response:
    """``…/actions/PACKAGE/``: the actions of a package, or of the one that a binding stands for."""
    core, own = gateway(), caller().namespace
    found = core.packages.readable(own if ns == "_" else Namespace(ns), package, own)
    return _page(core.packages.actions_in(core.packages.provider(found.binding, own) if found.binding else found))


@blueprint.get("/actions/<path:name>")
def get_action(ns: str, name: str) -> Response:
    if name.endswith("/"):
        return _in_package(ns, entity_name(name[:-1]))
    code = request.args.get("code", "true").lower() != "false"
    core, own, full_name = gateway(), caller().namespace, any_action_name(ns, name)
    if not code:
        return _rendered(core.packages.target(full_name, own).action, code=False)
    place = core.packages.place(full_name, own)
    owner = namespace_of(place.name)
    needed = COPIES * core.records.action_bytes(owner, place.name)  # taken before any of it is read
    if not core.code_answers.take(own, needed):
        raise Throttled("Too many answers with long code at once.", hint="ask with code=false, or for one at a time")
    with ExitStack() as held:
        held.callback(core.code_answers.give_back, own, needed)
        response = _rendered(with_inherited(core.records.action(owner, place.name), place), code=True)
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
    core, full_name = gateway(), action_name(ns, name)
    core.packages.writable(full_name)
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
    if action.is_sequence:
        core.sequences.check(action)
    core.actions.put(action, last=last)
    _keep_package(core, action)
    return json_response(render.action(action))


def _keep_package(core: Gateway, action: Action) -> None:
    """A package that was deleted while its first action was written takes the action with it.  Raises NotFound."""
    try:
        core.packages.writable(action.name)
    except NotFound:
        core.actions.delete(action.name)
        raise


@blueprint.delete("/actions/<path:name>")
def delete_action(ns: str, name: str) -> Response:
    return json_response(render.action(gateway().actions.delete(action_name(ns, name))))
