"""Packages as this gateway knows them; it resolves an action's name to the action with its inherited parameters.

Parameters: package < binding < action (< the call's).  Packages are read once and forgotten when an event says that
they changed; an action without a package costs nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import redis

from gateway.serving.actions.action_cache import Actions, namespace_of
from gateway.serving.actions.bounded_cache import BoundedCache
from relay.protocol.messages import PackageChanged
from relay.state import bus
from relay.state.entities import Change, Entities, Row
from thaw.action import Action
from thaw.entities import Binding, Package
from thaw.errors import BadRequest, Conflict, Forbidden, NotFound
from thaw.ids import ActionName, Namespace, is_entity_name

MISSING: Final = "The requested resource does not exist."


@dataclass(frozen=True, slots=True)
class Target:
    """``action`` has all parameters that it inherits.  ``binding``: the one through which it was named, or empty."""

    action: Action
    binding: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an action, its inherited parameters, and the binding through which it was named."""

    name: ActionName
    inherited: Mapping[str, object]
    binding: str = ""


class Packages:
    def __init__(self, client: redis.Redis, entities: Entities, actions: Actions) -> None:
        self._redis, self._entities, self._actions = client, entities, actions
        self._known = BoundedCache[str, Package]()

    # reading -------------------------------------------------------------------------------------------------------

    def find(self, namespace: Namespace, name: str) -> Package | None:
        changes = self._known.changes
        known = self._known.get(namespace, name)
        if known is not None:
            return known
        row = self._entities.find(Package, namespace, name)
        package = None if row is None else row.entity
        if package is not None:  # names that strangers make up are not remembered
            self._known.keep(namespace, name, package, changes)
        return package

    def readable(self, namespace: Namespace, name: str, caller: Namespace) -> Package:
        """Return a package of the caller, or a shared one of another.  Raises NotFound, Forbidden."""
        package = self.find(namespace, name)
        if namespace != caller and (package is None or not package.publish or package.binding is not None):
            raise forbidden(f"{namespace}/{name}")
        if package is None:
            raise NotFound(MISSING, hint="list packages: thaw package list")
        return package

    def target(self, name: ActionName, caller: Namespace) -> Target:
        """The action that the caller means by this name.  Raises NotFound, Forbidden."""
        place = self.place(name, caller)
        return Target(with_inherited(self._actions.get(place.name), place), place.binding)

    def place(self, name: ActionName, caller: Namespace) -> Place:
        """Where the caller's name leads.  The action itself, whose code may be long, is not read.  Raises NotFound,
        Forbidden."""
        namespace, package_name = _split(name)
        if not package_name:
            if namespace != caller:
                raise forbidden(namespace)
            return Place(name, {})
        package = self.readable(namespace, package_name, caller)
        if package.binding is None:
            return Place(name, package.parameters)
        provider = self.provider(package.binding, caller)
        name = ActionName(f"{provider.namespace}/{provider.name}/{name.rpartition('/')[2]}")
        return Place(name, {**provider.parameters, **package.parameters}, f"{namespace}/{package_name}")

    def provider(self, bound: Binding, caller: Namespace) -> Package:
        """The package behind a binding.  Raises NotFound, Forbidden."""
        package = self.readable(bound.namespace, bound.name, caller)
        if package.binding is not None:
            raise NotFound("The package that this binding stands for is a binding itself.")
        return package

    def writable(self, name: ActionName) -> None:
        """Raises NotFound, or BadRequest, when no action can be written under this name."""
        namespace, package_name = _split(name)
        if not package_name:
            return
        row = self._entities.find(Package, namespace, package_name)
        if row is None:
            raise NotFound(MISSING, hint=f"create its package first: thaw package create {package_name}")
        if row.entity.binding is not None:
            raise BadRequest(
                "Operation not permitted on package.", hint="a binding has no actions of its own; name its package"
            )

    # writing -------------------------------------------------------------------------------------------------------

    def put(self, was: Row[Package] | None, becomes: Package) -> None:
        """Raises Conflict."""
        self._entities.swap(Change(was, becomes))
        self._changed(becomes)

    def delete(self, package: Package) -> None:
        """Raises Conflict for a package with actions."""
        if not self._entities.drop_package(package):
            n_actions = len(self.names_in(package))
            raise Conflict(
                f"Package not empty (contains {n_actions} {'entity' if n_actions == 1 else 'entities'}). "
                "Set force param or delete package contents.",
                hint="delete its actions first, or DELETE with force=true",
            )
        self._changed(package)

    def actions_in(self, package: Package) -> list[Action]:
        """The heads, newest first (Actions.list)."""
        return self._actions.list(package.namespace, f"{package.namespace}/{package.name}/")

    def names_in(self, package: Package) -> list[ActionName]:
        """Newest first."""
        return self._actions.names(package.namespace, f"{package.namespace}/{package.name}/")

    def forget(self, namespace: Namespace | None = None, name: str = "") -> None:
        self._known.clear() if namespace is None else self._known.forget(namespace, name)

    def _changed(self, package: Package) -> None:
        self.forget(package.namespace, package.name)
        bus.publish(self._redis, PackageChanged(package.namespace, package.name))


def with_inherited(action: Action, place: Place) -> Action:
    return replace(action, parameters={**place.inherited, **action.parameters}) if place.inherited else action


def forbidden(what: str) -> Forbidden:
    return Forbidden(f"The supplied authentication is not authorized to access '{what}'.")


def qualified(text: str, own: Namespace) -> ActionName:
    """``/ns/action``, ``/ns/package/action``, ``/_/action``, ``action`` or ``package/action`` as a whole name.  Raises
    BadRequest."""
    parts = text[1:].split("/") if text.startswith("/") else [own, *text.split("/")]
    if parts[0] == "_":
        parts[0] = own
    if not 2 <= len(parts) <= 3 or not all(map(is_entity_name, parts)):
        raise BadRequest(f"The request content was malformed:\n{text!r:.200} is not the name of an action.")
    return ActionName("/".join(parts))


def _split(name: ActionName) -> tuple[Namespace, str]:
    """The namespace and the package, which is empty for an action without one."""
    namespace = namespace_of(name)
    return namespace, name[len(namespace) + 1 :].rpartition("/")[0]
