"""…/packages: create, bind, read, share, delete, list."""

from __future__ import annotations

from typing import Any, Final

from flask import Blueprint, Response

from gateway.api.http import caller, entity_name, gateway, json_response, namespace, query_flag, takes
from gateway.api.openwhisk import render
from gateway.api.openwhisk.action_body import NotHere, malformed
from gateway.api.openwhisk.entity_body import body_bytes, changed, common, entity_body, listed, may_write
from gateway.serving.actions.action_cache import simple_name
from relay.state.entities import Row
from thaw.action import Action
from thaw.entities import Binding, Package
from thaw.errors import BadRequest, Conflict, NotFound
from thaw.ids import Namespace

blueprint = Blueprint("packages", __name__, url_prefix="/api/v1/namespaces/<ns>/packages")
_RESERVED: Final = "default"
"""Web actions without a package have this name in their URLs."""


@blueprint.get("")
def list_packages(ns: str) -> Response:
    """List the caller's own packages, or those that another namespace shares.  ``public``: only shared ones."""
    own = caller().namespace
    named = own if ns == "_" else Namespace(ns)
    found = gateway().entities.all(Package, named)
    if named != own or query_flag("public"):
        found = [package for package in found if _is_shared(package)]
    return json_response(listed("packages", [_summary(package) for package in found]))


@blueprint.get("/<package>")
def get_package(ns: str, package: str) -> Response:
    core, own = gateway(), caller().namespace
    named = own if ns == "_" else Namespace(ns)
    found = core.packages.readable(named, entity_name(package), own)
    if found.binding is None:
        return json_response(_whole(found, found, core.packages.actions_in(found)))
    provider = core.packages.provider(found.binding, own)
    return json_response(_whole(found, provider, core.packages.actions_in(provider)))


@blueprint.put("/<package>")
@takes(body_bytes)
def put_package(ns: str, package: str) -> Response:
    core, own = gateway(), namespace(ns)
    if entity_name(package) == _RESERVED:
        raise BadRequest(f"Package name '{_RESERVED}' is reserved.")
    was, body = core.entities.find(Package, own, package), entity_body()
    may_write(was)
    bound = _binding(body.get("binding"), own)
    becomes = Package(own, package, binding=bound) if was is None else _rebound(was, bound)
    becomes = changed(becomes, body, is_new=was is None)
    if becomes.publish and becomes.binding is not None:
        raise malformed("a binding cannot be shared; share the package that it stands for")
    core.packages.put(was, becomes)
    return json_response(_entity(becomes, becomes))


@blueprint.delete("/<package>")
def delete_package(ns: str, package: str) -> Response:
    core = gateway()
    found = core.entities.get(Package, namespace(ns), entity_name(package)).entity
    if query_flag("force"):
        for name in core.packages.names_in(found):
            core.actions.delete(name)
    core.packages.delete(found)
    return json_response(_entity(found, found))


@blueprint.post("/refresh")
def refresh(ns: str) -> Response:
    namespace(ns)
    raise NotHere("Packages are not refreshed: there is no place that they come from.")


def _binding(plain: Any, own: Namespace) -> Binding | None:
    """Raises BadRequest, Forbidden."""
    if not plain:  # clients send {} for none
        return None
    if not isinstance(plain, dict) or not isinstance(plain.get("name"), str):
        raise malformed("binding must be an object with namespace and name")
    named = plain.get("namespace") or "_"
    if not isinstance(named, str):
        raise malformed("binding.namespace must be a string")
    bound = Binding(own if named == "_" else Namespace(named), plain["name"])
    core = gateway()
    try:
        package = core.packages.readable(bound.namespace, bound.name, own)
    except NotFound:
        raise BadRequest("Binding references a package that does not exist.") from None
    if package.binding is not None:
        raise BadRequest("Cannot bind to another package binding.")
    return bound


def _rebound(was: Row[Package], bound: Binding | None) -> Package:
    """Refuse a change of what a package is bound to, because its actions would be different ones; return the old
    package."""
    if bound is not None and bound != was.entity.binding:
        kind = "package" if was.entity.binding is None else "binding"
        raise Conflict(f"Resource is a {kind} and cannot be converted into another binding.", hint="delete it first")
    return was.entity


def _is_shared(package: Package) -> bool:
    return package.publish and package.binding is None


def _whole(package: Package, provider: Package, actions: list[Action]) -> dict[str, Any]:
    shown = [(_in_package(action), action.annotations.get("feed") is True) for action in actions]
    return {
        **_entity(package, provider),
        "actions": [plain for plain, is_feed in shown if not is_feed],
        "feeds": [plain for plain, is_feed in shown if is_feed],
    }


def _entity(package: Package, provider: Package) -> dict[str, Any]:
    parameters = render.pairs({**provider.parameters, **package.parameters})
    return {**common(package), "parameters": parameters, "binding": _bound(package) or {}}


def _summary(package: Package) -> dict[str, Any]:
    return {**common(package), "binding": _bound(package) or False}


def _bound(package: Package) -> dict[str, str] | None:
    bound = package.binding
    return None if bound is None else {"namespace": bound.namespace, "name": bound.name}


def _in_package(action: Action) -> dict[str, Any]:
    return {
        "name": simple_name(action.name),
        "version": action.version,
        "annotations": render.pairs(action.annotations),
    }
