"""Packages, triggers and rules in the state server: one hash a kind and namespace, a row an entity.

A change names the rows that it was made from, and all its rows are written or none (:meth:`Entities.swap`).  So two
writers never lose each other's change, and a rule and its trigger never disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import redis

from relay.state import keys, redis_link
from thaw import wire
from thaw.entities import Package, Rule, Trigger
from thaw.errors import Conflict, NotFound, TooLarge
from thaw.ids import Namespace

T = TypeVar("T", Package, Trigger, Rule)

_KINDS: Final[dict[type[Any], str]] = {Package: "packages", Trigger: "triggers", Rule: "rules"}
_SWAP: Final = """
local written = true
for i, key in ipairs(KEYS) do
    if (redis.call('HGET', key, ARGV[3 * i - 2]) or '') ~= ARGV[3 * i] then written = false end
end
if written then return 1 end  -- a repeat, after an answer that was lost
for i, key in ipairs(KEYS) do
    if (redis.call('HGET', key, ARGV[3 * i - 2]) or '') ~= ARGV[3 * i - 1] then return 0 end
end
for i, key in ipairs(KEYS) do
    if ARGV[3 * i] == '' then redis.call('HDEL', key, ARGV[3 * i - 2])
    else redis.call('HSET', key, ARGV[3 * i - 2], ARGV[3 * i]) end
end
return 1
"""
_DROP_PACKAGE: Final = """
for _, name in ipairs(redis.call('HKEYS', KEYS[2])) do
    if string.sub(name, 1, #ARGV[2]) == ARGV[2] then return 0 end
end
redis.call('HDEL', KEYS[1], ARGV[1])
return 1
"""
"""Delete a package unless an action is in it: both are looked at in one step."""


@dataclass(frozen=True, slots=True)
class Row(Generic[T]):
    """An entity and the bytes it was read from, by which a change knows that nobody changed it meanwhile."""

    entity: T
    raw: bytes


@dataclass(frozen=True, slots=True)
class Change:
    """One row of a change: what was read (None: there was none) and what it becomes (None: it is deleted)."""

    was: Row[Any] | None
    becomes: Package | Trigger | Rule | None


_BYTES: Final = """
local n_bytes = 0
for _, key in ipairs(KEYS) do
    for _, name in ipairs(redis.call('HKEYS', key)) do n_bytes = n_bytes + #name + redis.call('HSTRLEN', key, name) end
end
return n_bytes
"""


class Entities:
    def __init__(self, client: redis.Redis, most_bytes: int = 8 << 20) -> None:
        """``most_bytes``: what the entities of one namespace may take."""
        self._redis, self._most_bytes = client, most_bytes

    def find(self, kind: type[T], namespace: Namespace, name: str) -> Row[T] | None:
        with redis_link.translated(f"read one of the {_KINDS[kind]}"):
            raw: Any = self._redis.hget(_key(kind, namespace), name)
        return None if raw is None else Row(wire.loads(kind, raw), raw)

    def get(self, kind: type[T], namespace: Namespace, name: str) -> Row[T]:
        """Raises NotFound."""
        found = self.find(kind, namespace, name)
        if found is None:
            what = _KINDS[kind][:-1]
            raise NotFound("The requested resource does not exist.", hint=f"list {what}s: thaw {what} list")
        return found

    def all(self, kind: type[T], namespace: Namespace) -> list[T]:
        """Newest first."""
        with redis_link.translated(f"list {_KINDS[kind]}"):
            rows: Any = self._redis.hvals(_key(kind, namespace))
        return sorted((wire.loads(kind, row) for row in rows), key=lambda entity: -entity.updated_ms)

    def swap(self, *changes: Change) -> None:
        """Write all changes, or none: raises Conflict when another one wrote meanwhile, TooLarge when the namespace
        would have too much."""
        places = [_place(change) for change in changes]
        arguments: list[bytes | str] = []
        grown = 0
        for change, (_, name) in zip(changes, places, strict=True):
            was = b"" if change.was is None else change.was.raw
            becomes = b"" if change.becomes is None else wire.dumps(change.becomes)
            arguments += [name, was, becomes]
            grown += len(becomes) - len(was)
        if grown > 0:
            self._check_room(_subject(changes[0]).namespace, grown)
        with redis_link.translated("write entities"):
            written: Any = self._redis.eval(_SWAP, len(places), *(key for key, _ in places), *arguments)
        if not written:
            raise Conflict("Concurrent modification to resource detected", hint="read it, and try again")

    def _check_room(self, namespace: Namespace, grown: int) -> None:
        """All changes of one swap are in one namespace."""
        found = [_key(kind, namespace) for kind in _KINDS]
        with redis_link.translated("count a namespace's entities"):
            used: Any = self._redis.eval(_BYTES, len(found), *found)
        if int(used) + grown > self._most_bytes:
            raise TooLarge(
                "The namespace's packages, triggers and rules are larger than allowed: "
                f"{int(used) + grown} > {self._most_bytes} bytes."
            )

    def drop_package(self, package: Package) -> bool:
        """Return False when actions are in it, and it stays."""
        with redis_link.translated("delete a package"):
            dropped: Any = self._redis.eval(
                _DROP_PACKAGE,
                2,
                _key(Package, package.namespace),
                keys.actions(package.namespace),
                package.name,
                f"{package.namespace}/{package.name}/",
            )
        return bool(dropped)


def _key(kind: type[Any], namespace: str) -> str:
    return keys.entities(_KINDS[kind], namespace)


def _place(change: Change) -> tuple[str, str]:
    entity = _subject(change)
    return _key(type(entity), entity.namespace), entity.name


def _subject(change: Change) -> Package | Trigger | Rule:
    if change.becomes is not None:
        return change.becomes
    if change.was is None:
        raise ValueError("a change is from something or to something")
    entity: Package | Trigger | Rule = change.was.entity
    return entity
