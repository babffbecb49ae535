"""Tells a namespace's tenant the state of its models, and when that changes; a cluster's operator shows it.

::

    actions, how their starts went ──read when one of them changes──┐
                                                                    ├──▶ standings
    what runs and starts (work.py) ──────one look for all───────────┘

All of it is in the state server, so every gateway gives the same answer.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import redis

from gateway.serving.actions.action_cache import namespace_of
from gateway.serving.held.until_news import Looks
from gateway.serving.held.work import WorkBook
from relay.state.registry import Registry
from relay.state.starts import LastStarts, last_starts
from thaw import wire
from thaw.action import Action
from thaw.errors import ErrorInfo
from thaw.ids import ActionName, InstanceId, Namespace
from thaw.instance import InstanceRecord, InstanceState
from thaw.process.bell import Bell
from thaw.standing import NO_CAPACITY, RESOURCE_MARK, ColdStart, Standing, Standings
from thaw.work import Work

_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class _Rows:
    """A namespace's models as they are kept, and how their starts went."""

    began_s: float
    actions: tuple[Action, ...]
    starts: Mapping[ActionName, LastStarts]  # by the action whose instances count


class _Watched:
    """A namespace whose standings somebody waits for.  All is under the lock of StandingsOf, but the bell."""

    def __init__(self) -> None:
        self.bell = Bell()
        self.n_waiting = 0
        self.rows: _Rows | None = None
        self.outdated_s = time.monotonic()  # when a row has changed last
        self.seen: dict[InstanceId, tuple[object, ...]] = {}

    def is_news(self, record: InstanceRecord) -> bool:
        """Whether the report says more than that an instance has become idle, and of a model."""
        if self.rows is not None and record.action not in self.rows.starts:
            return False
        before = self.seen.pop(record.instance_id, None)
        if record.state is InstanceState.GONE:
            return True
        now = (record.state, record.takes_requests, record.action_version)
        self.seen[record.instance_id] = now
        return now != before


class StandingsOf:
    """``actions`` lists a namespace's actions, from the state server."""

    def __init__(
        self, client: redis.Redis, registry: Registry, work: WorkBook, actions: Callable[[Namespace], list[Action]]
    ) -> None:
        self._client, self._registry, self._work, self._actions = client, registry, work, actions
        self._looks = Looks[_Rows]()
        self._lock = threading.Lock()
        self._watched: dict[Namespace, _Watched] = {}

    # calls by events -------------------------------------------------------------------------------------------------

    def instance_changed(self, record: InstanceRecord) -> None:
        """Called with every report."""
        with self._lock:
            watched = self._watched.get(namespace_of(record.action))
            if watched is None or not watched.is_news(record):
                return
            if record.error is not None or record.state is InstanceState.READY:
                watched.outdated_s = time.monotonic()  # how a start went
        watched.bell.ring()

    def action_changed(self, action: ActionName) -> None:
        """An action, or the record of its starts, has changed."""
        with self._lock:
            watched = self._watched.get(namespace_of(action))
            if watched is None:
                return
            watched.outdated_s = time.monotonic()
        watched.bell.ring()

    def reload(self) -> None:
        """Events were missed: anything may have changed."""
        with self._lock:
            everything = list(self._watched.values())
            for watched in everything:
                watched.outdated_s = time.monotonic()
                watched.seen.clear()
        for watched in everything:
            watched.bell.ring()

    # queries of a tenant ---------------------------------------------------------------------------------------------

    @contextmanager
    def listening(self, namespace: Namespace) -> Iterator[Bell]:
        """The bell rings when the namespace's standings may have changed."""
        with self._lock:
            watched = self._watched.setdefault(namespace, _Watched())
            watched.n_waiting += 1
        try:
            yield watched.bell
        finally:
            with self._lock:
                watched.n_waiting -= 1
                if not watched.n_waiting:
                    del self._watched[namespace]

    def look(self, namespace: Namespace, since_s: float) -> tuple[float, Standings]:
        """Return how the namespace's models stand, with all writes that were answered before ``since_s``, and since
        when that was so.  Raises Unavailable."""
        current_s, rows = self._rows(namespace, since_s)
        began_s, (_, work) = self._work.look(namespace)
        found = self._standings(rows, work)
        mark = hashlib.sha256(b"\n".join(map(wire.dumps, found))).hexdigest()[:32]
        return min(current_s, began_s), Standings(mark, found)

    def _rows(self, namespace: Namespace, since_s: float) -> tuple[float, _Rows]:
        """The rows, and a time at which they were still so."""
        with self._lock:
            watched = self._watched.get(namespace)
            kept = None if watched is None else watched.rows
            if watched is not None and kept is not None and kept.began_s > max(watched.outdated_s, since_s):
                return time.monotonic(), kept
        began_s, rows = self._looks.recent(namespace, lambda: self._read(namespace), since_s)
        with self._lock:
            watched = self._watched.get(namespace)
            before = None if watched is None else watched.rows
            if watched is None or (before is not None and before.began_s >= rows.began_s):
                return began_s, rows
            watched.rows = rows
        if before is not None and before.starts.keys() != rows.starts.keys():
            watched.bell.ring()  # reports on instances of the new ones have not rung it
        return began_s, rows

    def _read(self, namespace: Namespace) -> _Rows:
        began_s = time.monotonic()
        found = [a for a in self._actions(namespace) if a.is_llm or RESOURCE_MARK in a.annotations]
        actions = tuple(sorted(found, key=lambda a: a.name))
        return _Rows(began_s, actions, last_starts(self._client, namespace, {a.served_by for a in actions}))

    def _standings(self, rows: _Rows, work: Work) -> tuple[Standing, ...]:
        heads = Counter((w.action, w.version, w.state) for w in work.workers if w.stage == 0)
        room: int | None = None  # asked for once, and only where something is missing
        found = []
        for action in rows.actions:
            own, version = action.served_by, action.served_version
            ready, starting = (heads[own, version, s] for s in (InstanceState.READY, InstanceState.STARTING))
            starts = rows.starts[own]
            failure = starts.failure
            trouble = None if failure is None or failure.version not in ("", version) else failure.error
            least = 0 if action.config is None else action.config.scaling.min_instances
            if trouble is None and action.config is not None and ready + starting < least:
                room = self._most_room() if room is None else room
                trouble = _without_room(action.config.reserve_bytes, room)
            name, config = action.name.partition("/")[2], action.config  # with its package
            answered = _own_answer(action, starts.answered)
            standing = Standing(name, action.version, config, action.annotations, ready, starting, trouble, answered)
            found.append(standing)
        return tuple(found)

    def _most_room(self) -> int:
        """The bytes that one device has free at most; less than zero: no host takes work."""
        hosts = [h for h in self._registry.live_hosts() if h.takes_starts]
        return max((d.free_bytes for h in hosts for d in h.devices), default=0) if hosts else -1


def _own_answer(action: Action, answered: ColdStart | None) -> ColdStart | None:
    """None for a start of its pool from before the function had its present version."""
    is_older = answered is not None and action.served_by != action.name and answered.at_wall_ms < action.updated_ms
    return None if is_older else answered


def _without_room(reserve_bytes: int, room: int) -> ErrorInfo | None:
    """Return why no host can take another whole worker now, or None.  A pipeline needs less of each host, and then its
    start is seen.  How much is free is the platform's, and no tenant's to know."""
    if room < 0:
        return ErrorInfo(NO_CAPACITY, "There is no host that takes work.", "add a host")
    if room >= reserve_bytes:
        return None
    return ErrorInfo(
        NO_CAPACITY,
        f"An instance needs {reserve_bytes // _MIB} MiB of device memory, and no device has that much free.",
        "add a host, or lower resources.gpu_memory_mb or scaling.min_instances",
    )
