"""Hosts in the order in which a tie goes to them, by what Algorithm 1 can tell apart: so that it looks at a few.

To it, two hosts of one *pace* (link, kind of device, when there is a stem cell) differ only in

* memory: which needs an idle device meets, and which any device meets; hosts of which both are equal are *alike*;
* when a new fetch could begin: at once, or, if it is due after every promise of that link, once those are kept.

So of hosts that are alike the ``depth`` that could begin first are enough (a group has no more workers), and so they
are of hosts that meet less; once ``depth`` hosts with idle devices for a whole model were found, no later host of that
pace can be part of the answer: it would lose to one of them.  ``offers`` returns those that are left, and for the
fallback whoever could begin to fetch first; a test compares the answers with those over all hosts.

::

    pace (1e9, "A10", cold)  ──▶ 9 GB free, none idle    ──▶ (workers, id) (workers, id) …   sorted; from the front
                                 24 GB free, 24 GB idle  ──▶ …   to the ``depth``-th whose link is free
    pace (1e9, "A10", stem)  ──▶ …
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Collection, Iterator
from typing import NamedTuple

from gateway.scheduler.hosts import HostView
from gateway.scheduler.stages import Stages
from thaw.ids import HostId


class Pace(NamedTuple):
    """What a start's time on a host depends on, while its link is free."""

    bytes_per_s: float
    kind: str
    cell_s: float  # when a stem cell is there: see ``HostView.cell_s``
    share: str


class Wanted(NamedTuple):
    """``needs``: bytes that a worker may need, ascending, the last a whole model's.  ``depth``: workers of a group.
    ``within_s``, ``latest_s``: no fetch that may be asked for is due earlier, or later.  ``part``: bytes of the
    smallest fetch.  ``stages``: what a part takes of a host's memory for models.  ``only_promises``: every fetch has a
    deadline, but for the fallback's; a link that can promise none is of no use."""

    needs: tuple[int, ...]
    depth: int
    within_s: float
    latest_s: float = 0.0
    part: float = 0.0
    stages: Stages | None = None
    only_promises: bool = False

    def can_be_promised(self, host: HostView, now_s: float) -> bool:
        """The fetch that is easiest to promise, the smallest at the latest, is one that this link can promise."""
        return not self.only_promises or host.ledger.bandwidth(self.part, now_s + self.latest_s, now_s) > 0


_Key = tuple[int, HostId]
_Memory = tuple[int, int]
"""Bytes free on an idle device, and on any.  Models come in sizes, so a thousand hosts have a few tens of them."""


class _At(NamedTuple):
    pace: Pace
    memory: _Memory
    key: _Key


class HostIndex:
    """Of hosts that take new work, for functions with a model.  ``put`` after every change of a host."""

    def __init__(self, stem_kind: str) -> None:
        self._stem_kind = stem_kind
        self._order: dict[Pace, dict[_Memory, list[_Key]]] = {}
        self._at: dict[HostId, _At] = {}
        self._most_free: list[tuple[int, HostId]] = []
        self._free_of: dict[HostId, int] = {}
        self._hosts: dict[HostId, HostView] = {}
        self._with_model: dict[str, set[HostId]] = {}
        self._models_of: dict[HostId, frozenset[str]] = {}

    def put(self, host: HostView) -> None:
        room, report = host.room(for_model=True), host.report
        if host.draining or not room.devices:
            return self.drop(host.host_id)
        pace = Pace(host.ledger.bytes_per_s, room.kind, host.cell_s(self._stem_kind), report.share)
        at = _At(pace, (room.most_idle, room.most_free), (host.n_workers, host.host_id))
        self._note_models(host.host_id, frozenset(r.uri for r in report.resident))
        before = self._at.get(host.host_id)
        self._note_free(host.host_id, room.most_free)
        self._hosts[host.host_id] = host
        if before != at:
            if before is not None:
                self._take_out(before)
            self._at[host.host_id] = at
            bisect.insort(self._order.setdefault(pace, {}).setdefault(at.memory, []), at.key)

    def drop(self, host_id: HostId) -> None:
        if (at := self._at.pop(host_id, None)) is not None:
            del self._hosts[host_id]
            self._note_models(host_id, frozenset())
            self._note_free(host_id, None)
            self._take_out(at)

    def _note_free(self, host_id: HostId, n_bytes: int | None) -> None:
        before = self._free_of.pop(host_id, None)
        if before is not None and before != n_bytes:
            del self._most_free[bisect.bisect_left(self._most_free, (before, host_id))]
        if n_bytes is not None:
            self._free_of[host_id] = n_bytes
            if before != n_bytes:
                bisect.insort(self._most_free, (n_bytes, host_id))

    def _note_models(self, host_id: HostId, uris: frozenset[str]) -> None:
        before = self._models_of.get(host_id, frozenset())
        if uris == before:
            return
        self._models_of[host_id] = uris
        for uri in uris - before:
            self._with_model.setdefault(uri, set()).add(host_id)
        for uri in before - uris:
            self._with_model[uri].discard(host_id)
            if not self._with_model[uri]:
                del self._with_model[uri]

    def _take_out(self, at: _At) -> None:
        of_pace = self._order[at.pace]
        order = of_pace[at.memory]
        del order[bisect.bisect_left(order, at.key)]
        if not order:
            del of_pace[at.memory]
        if not of_pace:
            del self._order[at.pace]

    # what placement asks -------------------------------------------------------------------------------------------

    @property
    def most_free(self) -> int:
        """Bytes free on the emptiest device of all; -1 without one."""
        return self._most_free[-1][0] if self._most_free else -1

    def with_model(self, uri: str) -> Collection[HostId]:
        """Hosts in whose memory a model lies, or a part of it."""
        return self._with_model.get(uri, ())

    def kinds(self) -> list[str]:
        """Of devices, in order of name."""
        return sorted({pace.kind for pace in self._order})

    @property
    def fastest(self) -> float:
        """Bytes/s of the fastest link; 0 without one."""
        return max((pace.bytes_per_s for pace in self._order), default=0.0)

    def offers(self, wanted: Wanted, now_s: float, also: Collection[HostId] = ()) -> list[HostView]:
        """Hosts that suffice to answer, in the order in which ties go to them.  ``also``: hosts that differ in
        something that its paces do not say (the model lies there)."""
        found = {h for h in also if h in self._hosts}
        for pace in self._order:
            found.update(self._of_pace(pace, wanted, now_s))
            if (last := self._without_a_promise(pace, wanted, now_s)) is not None:
                found.add(last)
        return sorted((self._hosts[h] for h in found), key=lambda h: tie_order(h, now_s))

    def _of_pace(self, pace: Pace, wanted: Wanted, now_s: float) -> Iterator[HostId]:
        due_s, taken = now_s + wanted.within_s, _Taken(wanted)
        free, busy, partly = self._first_of_each(pace, wanted, now_s)
        yield from (host.host_id for host in partly)  # for which parts they have room is their own matter
        for _, host in free:
            if taken.take(host):
                yield host.host_id
                if taken.is_enough:
                    return
        left = [host for host in busy if not taken.is_beaten(host)]  # by links that are free
        for host in sorted(left, key=lambda h: tie_order(h, now_s)):
            if host.ledger.in_line_after_s > due_s:
                if wanted.can_be_promised(host, now_s):
                    yield host.host_id  # which of them is its own matter
            elif not taken.is_enough and taken.take(host):
                yield host.host_id

    def _first_of_each(
        self, pace: Pace, wanted: Wanted, now_s: float
    ) -> tuple[list[tuple[_Key, HostView]], list[HostView], list[HostView]]:
        """Hosts with a free link, in order, ``depth`` of each memory at most; and, of memories that so many do not
        have, those that keep a promise; and those whose pool has room for a part only."""
        free, busy, partly = list[tuple[_Key, HostView]](), list[HostView](), list[HostView]()
        for (_, most_free), order in self._order[pace].items():
            if most_free < wanted.needs[0]:
                continue
            n_free, promised = 0, list[HostView]()
            for key in order:
                host = self._hosts[key[1]]
                if not host.pool_takes(wanted.stages, 1):
                    partly += [host] if host.pool_takes(wanted.stages, wanted.depth) else []
                    continue
                if host.ledger.promised_until_s > now_s:
                    promised.append(host)
                    continue
                free.append((key, host))
                n_free += 1
                if n_free == wanted.depth:
                    break
            else:
                busy += promised
        free.sort(key=lambda found: found[0])
        return free, busy, partly

    def _without_a_promise(self, pace: Pace, wanted: Wanted, now_s: float) -> HostId | None:
        """Who has room for a whole model and could begin to fetch it first."""
        need = wanted.needs[-1]
        best: tuple[float, tuple[float, int, HostId]] | None = None
        enough = [order for (_, most_free), order in self._order[pace].items() if most_free >= need]
        for _, host_id in heapq.merge(*enough):
            host = self._hosts[host_id]
            if not host.pool_takes(wanted.stages, 1):
                continue
            if host.ledger.busy_until_s <= now_s:
                return host_id
            key = host.ledger.busy_until_s, tie_order(host, now_s)
            best = key if best is None or key < best else best
        return None if best is None else best[1][2]


class _Taken:
    """How many of each likeness there are already.  A host is *beaten* by ``depth`` earlier ones that meet every need
    that it meets, and on an idle device where it does."""

    def __init__(self, wanted: Wanted) -> None:
        self._needs, self._depth = wanted.needs, wanted.depth
        self._n_like: dict[tuple[int, int], int] = {}
        self._like: dict[tuple[int, int], tuple[int, int]] = {}  # bytes free → which needs they meet
        self._best = len(wanted.needs), len(wanted.needs)
        self._beaten: set[tuple[int, int]] = set()

    @property
    def is_enough(self) -> bool:
        return self._n_like.get(self._best, 0) >= self._depth

    def take(self, host: HostView) -> bool:
        if self.is_beaten(host):
            return False
        like = self._like[host.most_idle, host.most_free]
        self._n_like[like] = self._n_like.get(like, 0) + 1
        return True

    def is_beaten(self, host: HostView) -> bool:
        memory = host.most_idle, host.most_free
        if (like := self._like.get(memory)) is None:
            like = self._like[memory] = (bisect.bisect_right(self._needs, memory[0]),
                                         bisect.bisect_right(self._needs, memory[1]))  # fmt: skip
        if like in self._beaten:
            return True
        n = sum(n for (idle, free), n in self._n_like.items() if idle >= like[0] and free >= like[1])
        if n >= self._depth:
            self._beaten.add(like)
        return n >= self._depth


def tie_order(host: HostView, now_s: float) -> tuple[float, int, HostId]:
    """Among equally fast hosts: the one whose link is free first (it leaves promises most slack), then the least
    loaded."""
    return max(now_s, host.ledger.promised_until_s), host.n_workers, host.host_id
