"""Functions for the bodies and answers that packages, triggers and rules have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from gateway.api.http import gateway, json_object, query_flag
from gateway.api.openwhisk import render
from gateway.api.openwhisk.action_body import Json, key_values, malformed, next_version
from gateway.api.openwhisk.listing import page
from relay.state.entities import Row
from thaw.clock import wall_ms
from thaw.entities import Package, Rule, Trigger
from thaw.errors import Conflict

T = TypeVar("T", Package, Trigger)
Listed = TypeVar("Listed")
Entity = Package | Trigger | Rule


def body_bytes(**_: str) -> int:
    """The longest body that describes one of them."""
    return 2 * gateway().settings.parameters_bytes


def entity_body() -> Json:
    return json_object(body_bytes(), optional=True)


def may_write(was: Row[Any] | None) -> None:
    """Raises Conflict for an entity that exists and is not to be overwritten."""
    if was is not None and not query_flag("overwrite"):
        raise Conflict("resource already exists", hint="update it, or PUT with overwrite=true")


def changed(entity: T, body: Json, *, is_new: bool) -> T:
    """The entity with the body's fields: annotations are merged, parameters replaced whole.  Raises BadRequest."""
    most = gateway().settings.parameters_bytes
    if "parameters" in body:
        entity = replace(entity, parameters=key_values("parameters", body["parameters"], most))
        if any(p.get("init") for p in body["parameters"]):
            raise malformed("parameters with init are for actions: give them to each action of the package")
    version = entity.version if is_new else next_version(entity.version, body.get("version"))
    return replace(
        entity,
        version=version,
        annotations=noted(entity, body),
        publish=published(entity, body),
        updated_ms=wall_ms(),
    )


def noted(entity: Entity, body: Json) -> dict[str, object]:
    given = key_values("annotations", body.get("annotations") or [], gateway().settings.parameters_bytes)
    return {**entity.annotations, **given}


def published(entity: Entity, body: Json) -> bool:
    wanted = body.get("publish", entity.publish)
    if not isinstance(wanted, bool):
        raise malformed("publish must be true or false")
    return wanted


def common(entity: Entity) -> dict[str, Any]:
    return {
        "namespace": entity.namespace,
        "name": entity.name,
        "version": entity.version,
        "publish": entity.publish,
        "annotations": render.pairs(entity.annotations),
        "updated": entity.updated_ms,
    }


def listed(kind: str, found: list[Listed]) -> list[Listed] | dict[str, int]:
    """A page of a list, or with ``count`` its length."""
    if query_flag("count"):
        return {kind: len(found)}
    limit, skip = page()
    return found[skip : skip + limit]
