"""Packages, triggers and rules in the state server: one hash a kind and namespace, a row an entity.

A change names the rows that it was made from, and all its rows are written or none (:meth:`Entities.swap`).  So two
writers never lose each other's change, and a rule and its trigger never disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

import redis

from relay.state import keys, redis_link
from relay.state.action_lists import AnnotationsLeft
from thaw import wire
from thaw.entities import Package, Rule, Trigger
from thaw.errors import Conflict, NotFound, TooLarge
from thaw.ids import Namespace

T = TypeVar("T", Package, Trigger, Rule)

_KINDS: Final[dict[type[Any], str]] = {Package: "packages", Trigger: "triggers", Rule: "rules"}
_MOST_OF_A_KIND: Final = 1_000
"""Lists are read whole, so their rows are bounded as well as their bytes."""
_TOO_MANY_BYTES: Final = -1
_SWAP: Final = """
local function of(i, field) return ARGV[4 * i - 2 + field] end  -- name, was, becomes, kind
local n, written, same = #KEYS - 1, true, true
for i = 1, n do
    local now = redis.call('HGET', KEYS[i + 1], of(i, 1)) or ''
    written = written and now == of(i, 3)
    same = same and now == of(i, 2)
end
if written then return {1, 0} end  -- a repeat, after an answer that was lost
if not same then return {0, 0} end
local grown = {bytes = 0}
for i = 1, n do
    local name, was, becomes, kind = of(i, 1), of(i, 2), of(i, 3), of(i, 4)
    local more = (becomes == '' and 0 or 1) - (was == '' and 0 or 1)
    grown.bytes = grown.bytes + #becomes - #was + more * #name
    grown[kind] = (grown[kind] or 0) + more
end
for what, more in pairs(grown) do
    local used = tonumber(redis.call('HGET', KEYS[1], what) or '0') + more
    if more > 0 and used > tonumber(what == 'bytes' and ARGV[1] or ARGV[2]) then
        return {what == 'bytes' and -1 or -2, used}
    end
end
for i = 1, n do
    if of(i, 3) == '' then redis.call('HDEL', KEYS[i + 1], of(i, 1))
    else redis.call('HSET', KEYS[i + 1], of(i, 1), of(i, 3)) end
end
for what, more in pairs(grown) do redis.call('HINCRBY', KEYS[1], what, more) end
return {1, 0}
"""
"""Write all rows or none, and keep count of the namespace's entities: reading all of them at each write would block the
state server for everybody."""
_DROP_PACKAGE: Final = """
for _, name in ipairs(redis.call('HKEYS', KEYS[2])) do
    if string.sub(name, 1, #ARGV[2]) == ARGV[2] then return 0 end
end
local row = redis.call('HGET', KEYS[1], ARGV[1])
if row then
    redis.call('HDEL', KEYS[1], ARGV[1])
    redis.call('HINCRBY', KEYS[3], 'bytes', -#row - #ARGV[1])
    redis.call('HINCRBY', KEYS[3], 'packages', -1)
end
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
    """One row of a change: the old row (None: there was none) and the new one (None: it is deleted)."""

    was: Row[Any] | None
    becomes: Package | Trigger | Rule | None


class Entities:
    def __init__(self, client: redis.Redis, most_bytes: int = 8 << 20) -> None:
        """``most_bytes``: the most bytes of one namespace's entities."""
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
        """Newest first, without their parameters, and with their annotations as far as a list of actions has them."""
        with redis_link.translated(f"list {_KINDS[kind]}"):
            rows: Any = self._redis.hvals(_key(kind, namespace))
        left = AnnotationsLeft()
        found = [_head(wire.loads(kind, row), left) for row in rows]
        return sorted(found, key=lambda entity: -entity.updated_ms)

    def swap(self, *changes: Change) -> None:
        """Write all changes, which are in one namespace, or none: raises Conflict when another one wrote meanwhile,
        TooLarge when the namespace would have too much."""
        places = [_place(change) for change in changes]
        arguments: list[bytes | str] = []
        for change, (kind, name) in zip(changes, places, strict=True):
            was = b"" if change.was is None else change.was.raw
            becomes = b"" if change.becomes is None else wire.dumps(change.becomes)
            arguments += [name, was, becomes, _KINDS[kind]]
        namespace = _subject(changes[0]).namespace
        rows = [_key(kind, namespace) for kind, _ in places]
        most = (str(self._most_bytes), str(_MOST_OF_A_KIND))
        with redis_link.translated("write entities"):
            answer: Any = self._redis.eval(
                _SWAP, 1 + len(rows), keys.entities_used(namespace), *rows, *most, *arguments
            )
        written, used = int(answer[0]), int(answer[1])
        if not written:
            raise Conflict("Concurrent modification to resource detected", hint="read it, and try again")
        if written == _TOO_MANY_BYTES:
            raise TooLarge(
                "The namespace's packages, triggers and rules are larger than allowed: "
                f"{used} > {self._most_bytes} bytes."
            )
        if written < 0:
            raise TooLarge(f"The namespace has {used - 1} of a kind of entity, and {_MOST_OF_A_KIND} are allowed.")

    def drop_package(self, package: Package) -> bool:
        """Return False when actions are in it, and it stays."""
        with redis_link.translated("delete a package"):
            dropped: Any = self._redis.eval(
                _DROP_PACKAGE,
                3,
                _key(Package, package.namespace),
                keys.actions(package.namespace),
                keys.entities_used(package.namespace),
                package.name,
                f"{package.namespace}/{package.name}/",
            )
        return bool(dropped)


def _head(entity: T, left: AnnotationsLeft) -> T:
    annotations = left.short(entity.annotations)
    if isinstance(entity, Rule):
        return replace(entity, annotations=annotations)
    return replace(entity, annotations=annotations, parameters={})


def _key(kind: type[Any], namespace: str) -> str:
    return keys.entities(_KINDS[kind], namespace)


def _place(change: Change) -> tuple[type[Any], str]:
    entity = _subject(change)
    return type(entity), entity.name


def _subject(change: Change) -> Package | Trigger | Rule:
    if change.becomes is not None:
        return change.becomes
    if change.was is None:
        raise ValueError("a change is from something or to something")
    entity: Package | Trigger | Rule = change.was.entity
    return entity
