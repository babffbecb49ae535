"""Lists of a namespace's records, by time and by name.

::

    thaw:activations:NS            start → ID      every record
    thaw:activations-of:NS/NAME    start → ID      those of one name

A record has one name, its action's without the namespace; one that was called through a binding has the binding's, too,
and one of another namespace's shared package the whole name.  Versions before lists by name know the first index alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import redis

from relay.state import keys, redis_link
from relay.state.record_scripts import PAGE, READ_SOME
from thaw import wire
from thaw.activation import Activation
from thaw.errors import ProtocolError
from thaw.ids import ActivationId, Namespace

_SEARCHED: Final = 1_000
_SEARCHED_AT_ONCE: Final = 100
_PART_BYTES: Final = 1 << 20
"""Records that are read together.  Their objects take several times as much."""


def names_of(record: Activation) -> tuple[str, ...]:
    """Return the names under which the record is listed."""
    found = dict[str, None]()
    bound = f"{record.binding}/{record.action.rpartition('/')[2]}" if record.binding else record.action
    for name in (record.action, bound):
        owner, _, rest = name.partition("/")
        found[rest] = None
        if owner != record.namespace:
            found[name] = None
    return tuple(found)


class RecordParts:
    """A list of records that is read part by part.  Nothing but keys is held in between."""

    def __init__(self, read: Callable[[Sequence[str]], Sequence[bytes]], wanted: Sequence[str]) -> None:
        self._read, self._wanted = read, wanted
        self.n_unreadable = 0

    @property
    def has_more(self) -> bool:
        return bool(self._wanted)

    def __iter__(self) -> Iterator[list[Activation]]:
        while self._wanted:
            yield self.next()

    def whole(self) -> list[Activation]:
        """Read all that is left.  Raises PlatformError."""
        return [record for part in self for record in part]

    def next(self) -> list[Activation]:
        """Read the next part, without records that have expired, and without those that another version wrote and this
        one cannot read.  Raises PlatformError."""
        rows = self._read(self._wanted) if self._wanted else ()
        self._wanted = self._wanted[len(rows) :]
        found: list[Activation] = []
        for row in rows:
            if row:
                try:
                    found.append(wire.loads(Activation, row))
                except ProtocolError:
                    self.n_unreadable += 1
        return found


class RecordLists:
    """``name``: an action's name, with or without the namespace that is asked for; empty: of all actions.  NS/NAME is
    an action of the namespace's own package NS where there are records of one.  Times are those at which the
    activations began, in milliseconds of wall time.  All methods raise PlatformError."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def activation(self, activation_id: ActivationId) -> Activation | None:
        with redis_link.translated("read a record"):
            data: Any = self._redis.get(keys.activation(activation_id))
        return None if data is None else wire.loads(Activation, data)

    def activations(
        self,
        namespace: Namespace,
        *,
        limit: int,
        skip: int = 0,
        since_ms: int | None = None,
        upto_ms: int | None = None,
        name: str = "",
    ) -> RecordParts:
        """Newest first, in parts that are read when they are asked for: a record may have megabytes."""
        low, high = _bounds(since_ms, upto_ms)
        with redis_link.translated("list records"):
            found: Any = self._redis.eval(PAGE, 1, self._index(namespace, name), low, high, str(skip), str(limit))
        return RecordParts(self._some, [keys.activation(redis_link.text(one)) for one in found])

    def _some(self, wanted: Sequence[str]) -> Sequence[bytes]:
        """Read the first of the wanted records, at least one; an expired record is empty."""
        with redis_link.translated("read records"):
            rows: Any = self._redis.eval(READ_SOME, len(wanted), *wanted, str(_PART_BYTES))
        return list(rows)

    def count_activations(
        self, namespace: Namespace, *, since_ms: int | None = None, upto_ms: int | None = None, name: str = ""
    ) -> int:
        low, high = _bounds(since_ms, upto_ms)
        with redis_link.translated("count records"):
            count: Any = self._redis.zcount(self._index(namespace, name), low, high)
        return int(count)

    def caused_by(self, cause: ActivationId, namespace: Namespace, since_ms: int) -> list[ActivationId]:
        """The activations whose records name ``cause``, the oldest first, among the newest of the namespace's since
        then."""
        with redis_link.translated("list records"):
            ids: Any = self._redis.zrevrangebyscore(
                keys.activations(namespace), "+inf", since_ms, start=0, num=_SEARCHED
            )
        found: list[ActivationId] = []
        wanted = [keys.activation(redis_link.text(one)) for one in ids]
        while wanted:
            rows = self._some(wanted[:_SEARCHED_AT_ONCE])
            wanted = wanted[len(rows) :]
            records = (wire.loads(Activation, row) for row in rows if row)
            found += [record.activation_id for record in records if record.cause == cause]
        return found[::-1]

    def _index(self, namespace: Namespace, name: str) -> str:
        if not name:
            return keys.activations(namespace)
        as_given, bare = keys.activations_of(namespace, name), name.removeprefix(f"{namespace}/")
        if bare == name or self._redis.exists(as_given):
            return as_given
        return keys.activations_of(namespace, bare)


def _bounds(since_ms: int | None, upto_ms: int | None) -> tuple[str, str]:
    return "-inf" if since_ms is None else str(since_ms), "+inf" if upto_ms is None else str(upto_ms)
