"""…/actions: create, read, update, delete, list."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from flask import Blueprint, Response, request

from gateway import quick_json
from gateway.api.http import (
    action_name,
    any_action_name,
    body_reader,
    caller,
    entity_name,
    gateway,
    json_response,
    namespace,
    query_flag,
    query_version,
    takes,
)
from gateway.api.openwhisk import render
from gateway.api.openwhisk.action_body import changed_action, new_action
from gateway.api.openwhisk.code_upload import action_body
from gateway.api.openwhisk.entity_body import listed
from gateway.core import Gateway
from gateway.front.visit import VISIT, Visit
from gateway.serving.actions.action_cache import namespace_of
from gateway.serving.actions.packages import with_inherited
from gateway.serving.deploying.late_checks import differ_in_more, noted
from gateway.serving.deploying.preflight import Verdict, unfit
from gateway.settings import COPIES
from relay.state.code import Upload
from thaw.action import Action
from thaw.errors import Conflict, NotFound, ThawError, Throttled
from thaw.ids import ActionName, Namespace, random_hex_id
from thaw.spliced import spliced

blueprint = Blueprint("actions", __name__, url_prefix="/api/v1/namespaces/<ns>")


@blueprint.get("/actions")
def list_actions(ns: str) -> Response:
    own = namespace(ns)
    return _page(own, gateway().actions.names(own))


def _page(owner: Namespace, names: list[ActionName]) -> Response:
    """A page of these actions.  No more of them are held at once."""
    wanted = listed("actions", names)
    if isinstance(wanted, list):
        return json_response([render.action_summary(a) for a in gateway().actions.some(owner, wanted)])
    return json_response(wanted)


def _in_package(ns: str, name: str) -> Response:
    """``…/actions/PACKAGE/``: the actions of a package, or of the one that a binding stands for."""
    core, own = gateway(), caller().namespace
    found = core.packages.readable(own if ns == "_" else Namespace(ns), name, own)
    package = core.packages.provider(found.binding, own) if found.binding else found
    return _page(package.namespace, core.packages.names_in(package))


@blueprint.get("/actions/<path:name>")
def get_action(ns: str, name: str) -> Response:
    if name.endswith("/"):
        return _in_package(ns, entity_name(name[:-1]))
    core, own, full_name = gateway(), caller().namespace, any_action_name(ns, name)
    if request.args.get("code", "true").lower() == "false":
        found = core.packages.target(full_name, own).action
        return json_response(render.action(found, code=False, serving=core.room.serving(found.served_by)))
    place = core.packages.place(full_name, own)
    with ExitStack() as memory:
        _take_memory(memory, place.name)  # before any of it is read
        whole = core.records.action(namespace_of(place.name), place.name)
        return _with_code(with_inherited(whole, place), memory)


def _take_memory(memory: ExitStack, name: ActionName, taken: int = 0) -> int:
    """Take memory for the action as it is kept now, beyond ``taken``, and return how much there is then.  An answer
    keeps all of the action but its code in pieces until it is read.  Raises Throttled."""
    core, own = gateway(), caller().namespace
    more = COPIES * core.records.action_bytes(namespace_of(name), name) - taken
    if more <= 0:
        return taken
    if not core.answered_actions.take(own, more, taken):
        raise Throttled("Too many answers with long code at once.", hint="ask with code=false, or for one at a time")
    memory.callback(core.answered_actions.give_back, own, more)
    return taken + more


def _changed(
    action: Action, memory: ExitStack, taken: int = 0, more: Mapping[str, Any] = MappingProxyType({})
) -> Response:
    """The answer to a change that was made, with ``more``.  It is no error when the code cannot be read."""
    try:
        _take_memory(memory, action.name, taken)
        return _with_code(action, memory, more)
    except ThawError:
        without = render.action(action, code=False, serving=gateway().room.serving(action.served_by))
        return json_response({**without, **more})


def _with_code(found: Action, memory: ExitStack, more: Mapping[str, Any] = MappingProxyType({})) -> Response:
    """Stored code is read a piece at a time, when the client has read the piece before.  The answer gives the memory
    back."""
    core = gateway()
    serving = core.room.serving(found.served_by)
    if found.exec.stored is None:
        response = json_response({**render.action(found, serving=serving), **more})
        response.call_on_close(memory.pop_all().close)
        return response
    mark = random_hex_id()
    pieces = core.records.code.pieces(found)
    pieces = chain([next(pieces)], pieces)  # an error of the first one is the answer
    marked = replace(found, exec=replace(found.exec, code=mark))
    visit: Visit | None = request.environ.get(VISIT)
    if visit is not None:
        visit.as_read = True
    shown = {**render.action(marked, serving=serving), **more}
    answer = spliced(shown, mark, pieces, (", ", ": "), quick_json.escaped)
    response = Response(answer, content_type="application/json")
    response.call_on_close(memory.pop_all().close)
    return response


def _action_bytes(ns: str, name: str) -> int:
    action_name(ns, name)
    return gateway().settings.action_bytes


@blueprint.put("/actions/<path:name>")
@takes(_action_bytes)
def put_action(ns: str, name: str) -> Response:
    full_name = action_name(ns, name)
    with ExitStack() as memory:
        taken = _take_memory(memory, full_name)
        action, verdict = _put(ns, full_name)
        later = gateway().preflight.is_on
        more = {} if verdict is None else {"preflight": render.preflight(verdict, later=later)}
        return _changed(action, memory, taken, more)


def _put(ns: str, full_name: ActionName) -> tuple[Action, Verdict | None]:
    core = gateway()
    core.packages.writable(full_name)
    own, overwrite = namespace(ns), query_flag("overwrite")
    old: Action | None
    last: str | None
    try:
        old, row = core.records.action_row(own, full_name)
        last = old.version
        old.check_version(query_version())
    except NotFound:
        if query_version():
            raise
        old, row, last = None, "", core.records.last_version(full_name)
    if old is not None and not overwrite:
        raise Conflict("resource already exists", hint="update it, or PUT with overwrite=true")
    upload = core.records.code.begin()
    try:
        body = _body(upload)
        if old is None:
            action = new_action(full_name, own, body, core.settings, last)
        else:
            action = changed_action(old, body, core.settings)
        core.models.check(action)
        added = core.kept.check(action, old)
        if action.is_sequence:
            core.sequences.check(action)
        if "exec" in body:
            action = core.pinned_images.pinned(core.package_locks.locked(action))
        verdict = _preflight(action, body, own)
        if verdict is not None:
            action = noted(action, verdict)
        _write(action, last, old, row)
        core.kept.check_written(action, old, added)
        _keep_package(core, action)
    finally:
        upload.discard()  # unless the action has it
    if verdict is not None and action.config is not None:
        verdict = core.preflight.look_again(action.config, own, verdict)
    return action, verdict


def _write(action: Action, last: str | None, old: Action | None, row: str) -> None:
    """Raises what Actions.put() raises.  A late check of ``old`` may rewrite its record meanwhile, which is nobody
    else's change."""
    core = gateway()
    core.late_checks.before_write(action)
    try:
        core.actions.put(action, last=last, old=old, row=row)
    except Conflict as conflict:
        if old is None or not old.unchecked:
            raise
        now, row = _row_after(conflict, old)
        core.actions.put(action, last=last, old=now, row=row)
    core.late_checks.after_write(action)


def _row_after(conflict: Conflict, old: Action) -> tuple[Action, str]:
    """The record of ``old`` as a late check has rewritten it.  Raises the conflict if anybody else has."""
    try:
        now, row = gateway().records.action_row(old.namespace, old.name)
    except NotFound:
        raise conflict from None
    if differ_in_more(now, old):
        raise conflict
    return now, row


def _body(upload: Upload) -> dict[str, Any]:
    settings = gateway().settings
    return action_body(
        body_reader(settings.action_bytes),
        upload,
        code_bytes=settings.code_bytes,
        parameters_bytes=settings.parameters_bytes,
    )


def _keep_package(core: Gateway, action: Action) -> None:
    """A package that was deleted while its first action was written takes the action with it.  Raises NotFound."""
    try:
        core.packages.writable(action.name)
    except NotFound:
        core.actions.delete(action.name)
        raise


def _preflight(action: Action, body: dict[str, Any], own: str) -> Verdict | None:
    """Return None if the model and its settings do not change.  Raises Unfit unless the caller forces the deploy."""
    if action.config is None or not ("exec" in body or "config" in body):
        return None
    force = query_flag("force")
    verdict = gateway().preflight.check(action.config, own)
    if verdict.refusal is not None and not force:
        raise unfit(verdict.refusal)
    return verdict


@blueprint.delete("/actions/<path:name>")
def delete_action(ns: str, name: str) -> Response:
    full_name = action_name(ns, name)
    with ExitStack() as memory:
        taken = _take_memory(memory, full_name)
        return _changed(gateway().actions.delete(full_name, query_version()), memory, taken)
