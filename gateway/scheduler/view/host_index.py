"""Hosts by the properties that Algorithm 1 distinguishes, so that it examines only a few of them.

Hosts of one *pace* have the same kind of device, the same shares, and a stem cell at the same time.  Each of them has

* memory: the needs that an idle device meets, and those that any device meets, are the host's *likeness*;
* a link, and a moment when a new fetch could begin there: at once, or, if it is due after every promise of that link,
  once those are kept.

A host is *beaten* by another of its pace that meets the same needs, has a link that is no slower, and stands before it
in the order of ties (``tie_order``: the host whose link is free first, then the least loaded).  Whatever a group would
gain with the beaten host, it gains with the other.  A group has no more than ``depth`` workers, so a host that
``depth`` others beat is no part of the answer.  ``offers`` returns the hosts that are left and, for the fallback, the
host that would have fetched the whole model first.  A test compares the answers with those over all hosts.

::

    pace ("A10", cold)  ──▶ 9 GB free, none idle    ──▶ links.py: blocks of hosts, fastest first
                            24 GB free, 24 GB idle  ──▶ …   each block in the order of ties, as far as a host in it
    pace ("A10", stem)  ──▶ …                               may be earlier than ``depth`` faster ones
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from gateway.scheduler.placement.link_ledger import LinkLedger
from gateway.scheduler.placement.stage_bytes import Stages
from gateway.scheduler.view.hosts import HostView
from gateway.scheduler.view.links import Block, Key, Links
from gateway.scheduler.view.model_places import ModelPlaces
from thaw.ids import HostId


class Pace(NamedTuple):
    """The properties of a host, besides its link, that decide how long a start takes there."""

    kind: str
    cell_s: float  # when a stem cell is there: see ``HostView.cell_s``
    share: str


_ABOVE_NOISE = 1 + 1e-6
"""The ledger decides.  A host that is left out before its ledger is asked must fail there beyond any rounding."""


class Wanted(NamedTuple):
    """``needs``: the bytes that a worker may need, ascending; the last is a whole model's.  ``depth``: the most workers
    of a group.  ``within_s``, ``latest_s``: the earliest and the latest deadline of the fetches that may be asked for.
    ``part``, ``whole``: the bytes of the smallest and the largest fetch.  ``stages``: tells what a part takes of a
    host's memory for models.  ``only_promises``: every fetch has a deadline, except the fallback's, so a link that can
    promise none is of no use.  ``one_size``: the search is for groups of exactly ``depth`` workers, each on an idle
    device and with a fetch of ``part`` bytes at most, and for no fallback."""

    needs: tuple[int, ...]
    depth: int
    within_s: float
    latest_s: float = 0.0
    part: float = 0.0
    stages: Stages | None = None
    only_promises: bool = False
    whole: float = 0.0
    one_size: bool = False

    @property
    def fewest(self) -> int:
        """The number of stages of the smallest group that is searched for."""
        return self.depth if self.one_size else 1

    def has_room(self, memory: _Memory) -> bool:
        return memory[0 if self.one_size else 1] >= self.needs[0]

    def is_served_at_once(self, ledger: LinkLedger, now_s: float) -> bool:
        """True when every fetch that may be asked for is served before the one promise of this link and does not
        endanger it.  The link then answers as if it were free."""
        spare = ledger.bytes_per_s * (ledger.in_line_after_s - ledger.promised_until_s)
        return (
            self.only_promises
            and ledger.keeps_one_promise
            and ledger.in_line_after_s > now_s + self.latest_s
            and spare > self.whole * _ABOVE_NOISE + 1.0
        )

    def can_be_promised(self, host: HostView, now_s: float) -> bool:
        """True when this link can promise the easiest fetch: the smallest one with the latest deadline."""
        return not self.only_promises or host.ledger.bandwidth(self.part, now_s + self.latest_s, now_s) > 0

    def is_too_slow(self, bytes_per_s: float) -> bool:
        """True when the easiest fetch would not end in time on such a link, even if it were idle."""
        return self.only_promises and self.part > bytes_per_s * self.latest_s * _ABOVE_NOISE + 1.0

    def is_refused(self, ledger: LinkLedger, now_s: float) -> bool:
        """True when the easiest fetch has no place on this link, neither behind all promises nor before the last of
        them.  The end of the promises is enough to say so, without an examination of each.  False means: ask the
        ledger."""
        end_s = max(now_s + self.latest_s, ledger.in_line_after_s)
        room = ledger.bytes_per_s * (end_s - ledger.promised_until_s)
        return self.only_promises and self.part > room * _ABOVE_NOISE + 1.0

    def likeness(self, memory: _Memory) -> _Likeness:
        idle = bisect.bisect_right(self.needs, memory[0])
        return idle, idle if self.one_size else bisect.bisect_right(self.needs, memory[1])


_Memory = tuple[int, int]
"""Bytes free on an idle device, and on any device.  Models come in a few sizes, so a thousand hosts have only a few
tens of such pairs."""

_Likeness = tuple[int, int]
"""How many of the needs an idle device meets, and how many any device meets.  A host with no less in both numbers meets
all needs that the other meets, and meets them on an idle device where the other does."""


class _At(NamedTuple):
    pace: Pace
    memory: _Memory
    key: Key
    bytes_per_s: float


class HostIndex:
    """The index of hosts that take new work, for functions with a model.  Call ``put`` after every change of a host."""

    def __init__(self, stem_kind: str) -> None:
        self._stem_kind = stem_kind
        self._order: dict[Pace, dict[_Memory, Links]] = {}
        self._at: dict[HostId, _At] = {}
        self._most_free: list[tuple[int, HostId]] = []
        self._free_of: dict[HostId, int] = {}
        self._hosts: dict[HostId, HostView] = {}
        self._places = ModelPlaces()

    def put(self, host: HostView) -> None:
        room, report = host.room(for_model=True), host.report
        if host.draining or not room.devices:
            return self.drop(host.host_id)
        pace = Pace(room.kind, host.cell_s(self._stem_kind), report.share)
        key = host.n_workers, host.host_id
        at = _At(pace, (room.most_idle, room.most_free), key, host.ledger.bytes_per_s)
        self._places.put(host)
        before = self._at.get(host.host_id)
        self._note_free(host.host_id, room.most_free)
        self._hosts[host.host_id] = host
        if before != at:
            if before is not None:
                self._take_out(before)
            self._at[host.host_id] = at
            self._order.setdefault(pace, {}).setdefault(at.memory, Links()).put(key, at.bytes_per_s)

    def drop(self, host_id: HostId) -> None:
        if (at := self._at.pop(host_id, None)) is not None:
            del self._hosts[host_id]
            self._places.drop(host_id)
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

    def _take_out(self, at: _At) -> None:
        of_pace = self._order[at.pace]
        links = of_pace[at.memory]
        links.drop(at.key, at.bytes_per_s)
        if not links:
            del of_pace[at.memory]
        if not of_pace:
            del self._order[at.pace]

    # placement's queries -------------------------------------------------------------------------------------------

    @property
    def most_free(self) -> int:
        """Bytes free on the emptiest device of all; -1 without one."""
        return self._most_free[-1][0] if self._most_free else -1

    def with_model(self, uri: str, version: str) -> Collection[HostId]:
        """Hosts in whose memory a model lies, or a part of it."""
        return self._places.hosts(uri, version)

    def kinds(self) -> list[str]:
        """Return the kinds of devices, in order of name."""
        return sorted({pace.kind for pace in self._order})

    def enforcing(self) -> set[bool]:
        """Return which of the two occur: hosts that hold low workers to their shares (True), and hosts that do not
        (False)."""
        return {pace.share == "enforced" for pace in self._order}

    @property
    def fastest(self) -> float:
        """Bytes/s of the fastest link, or a little more; 0 without one."""
        return max((links.fastest for of_pace in self._order.values() for links in of_pace.values()), default=0.0)

    def offers(self, wanted: Wanted, now_s: float, also: Collection[HostId] = ()) -> list[HostView]:
        """Return hosts that suffice for the answer, in the order of ties.  ``also``: hosts that differ in something
        that the paces do not say (the model lies there)."""
        found = {h for h in also if h in self._hosts}
        for of_pace in self._order.values():
            found.update(host.host_id for host in self._of_pace(of_pace, wanted, now_s))
            if not wanted.one_size and (last := self._without_a_promise(of_pace, wanted, now_s)) is not None:
                found.add(last)
        return sorted((self._hosts[h] for h in found), key=lambda h: tie_order(h, now_s))

    def _of_pace(self, of_pace: dict[_Memory, Links], wanted: Wanted, now_s: float) -> Iterator[HostView]:
        free, busy, partly = self._unbeaten_by_faster(of_pace, wanted, now_s)
        yield from partly  # they differ in the parts that they have room for, so none beats another
        at_once = _Best(wanted.depth, {of for _, _, of in free} | {of for _, of in busy})
        for _, host, likeness in sorted(free):
            if at_once.take(likeness, host.ledger.bytes_per_s):
                yield host
        in_line, due_s = at_once.copy(), now_s + wanted.within_s
        unbeaten = [found for found in busy if not at_once.beats(found[1], found[0].ledger.bytes_per_s)]
        for host, likeness in sorted(unbeaten, key=lambda found: tie_order(found[0], now_s)):
            ledger = host.ledger
            if ledger.in_line_after_s <= due_s:
                if in_line.take(likeness, ledger.bytes_per_s):
                    yield host
            elif wanted.is_served_at_once(ledger, now_s):
                if at_once.take(likeness, ledger.bytes_per_s):
                    in_line.take(likeness, ledger.bytes_per_s)  # a fetch that waits is no better than one that need not
                    yield host
            elif not at_once.beats(likeness, ledger.bytes_per_s) and (
                ledger.keeps_one_promise or wanted.can_be_promised(host, now_s)
            ):
                yield host  # only its ledger can say which; with a single promise, its end has said enough

    def _unbeaten_by_faster(
        self, of_pace: dict[_Memory, Links], wanted: Wanted, now_s: float
    ) -> tuple[list[_Free], list[_Found], list[HostView]]:
        """Return hosts with a free link and hosts that keep promises, both without most of those that ``depth`` hosts
        of faster blocks beat, and hosts whose pool has room for a part only."""
        free, busy, partly = list[_Free](), list[_Found](), list[HostView]()
        blocks = _blocks(of_pace, wanted)
        ahead = _Ahead(wanted.depth, {likeness for likeness, _ in blocks})
        for likeness, block in blocks:
            last = ahead.last_unbeaten(likeness, block.fastest)
            n_equal = 0
            for key in block.keys:
                if last is not None and key > last:
                    break
                host = self._hosts[key[1]]
                keeps_promises = host.ledger.promised_until_s > now_s
                if keeps_promises and (last is not None or wanted.is_refused(host.ledger, now_s)):
                    continue
                if not host.pool_takes(wanted.stages, wanted.fewest):
                    partly += [host] if host.pool_takes(wanted.stages, wanted.depth) else []
                elif keeps_promises:
                    busy.append((host, likeness))
                else:
                    free.append((key, host, likeness))
                    ahead.note(likeness, key, host.ledger.bytes_per_s)
                    n_equal += block.is_uniform
                    if n_equal == wanted.depth:
                        break  # among equal links the first few in order beat all others
        return free, busy, partly

    def _without_a_promise(self, of_pace: dict[_Memory, Links], wanted: Wanted, now_s: float) -> HostId | None:
        """Return the host with room for a whole model that would have fetched it first, behind all that it fetches
        now."""
        best: HostView | None = None
        best_s = math.inf
        enough = (links for (_, most_free), links in of_pace.items() if most_free >= wanted.needs[-1])
        for block in heapq.merge(*(links.fastest_first for links in enough), key=lambda b: -b.fastest):
            if wanted.whole > best_s * block.fastest * _ABOVE_NOISE:
                break  # not even an idle link of this block is as early
            for _, host_id in block.keys:
                host = self._hosts[host_id]
                ledger = host.ledger
                wait_s = max(0.0, ledger.busy_until_s - now_s)
                took_s = wait_s + wanted.whole / ledger.bytes_per_s
                if took_s > best_s or not host.pool_takes(wanted.stages, 1):
                    continue
                if best is None or took_s < best_s or tie_order(host, now_s) < tie_order(best, now_s):
                    best, best_s = host, took_s
                if wait_s == 0 and block.is_uniform:
                    break
        return None if best is None else best.host_id


_Found = tuple[HostView, _Likeness]
_Free = tuple[Key, HostView, _Likeness]
"""Sorts by its key, which no two hosts share."""


def _blocks(of_pace: dict[_Memory, Links], wanted: Wanted) -> list[tuple[_Likeness, Block]]:
    """Return the blocks with room for the smallest need, the fastest first; among equally fast ones, those that meet
    most needs come first."""
    found: list[tuple[float, _Likeness, int, Block]] = []
    for memory, links in of_pace.items():
        if not wanted.has_room(memory):
            continue
        idle, free = wanted.likeness(memory)
        for block in links.fastest_first:
            if wanted.is_too_slow(block.fastest):
                break
            found.append((-block.fastest, (-idle, -free), len(found), block))
    found.sort()
    return [((-idle, -free), block) for _, (idle, free), _, block in found]


class _Ahead:
    """The hosts with free links found so far that are at least as fast as the next block.  For each likeness it knows
    which of these hosts are first in the order of ties."""

    def __init__(self, depth: int, likenesses: Iterable[_Likeness]) -> None:
        self._depth = depth
        self._slower: list[tuple[float, Key, _Likeness]] = []  # a heap, the fastest first
        self._first: dict[_Likeness, list[Key]] = {likeness: [] for likeness in likenesses}

    def note(self, likeness: _Likeness, key: Key, bytes_per_s: float) -> None:
        heapq.heappush(self._slower, (-bytes_per_s, key, likeness))

    def last_unbeaten(self, likeness: _Likeness, bytes_per_s: float) -> Key | None:
        """Return the key of the last host that is not beaten yet: hosts behind it whose links are no faster than this
        are beaten.  Return None when fewer than ``depth`` hosts are as fast.  Speeds must not grow from one call to the
        next."""
        while self._slower and -self._slower[0][0] >= bytes_per_s:
            _, key, of = heapq.heappop(self._slower)
            for other, first in self._first.items():
                if of[0] >= other[0] and of[1] >= other[1] and (len(first) < self._depth or key < first[-1]):
                    bisect.insort(first, key)
                    del first[self._depth :]
        first = self._first[likeness]
        return first[-1] if len(first) == self._depth else None


class _Best:
    """The fastest links of the hosts that were taken so far, for each likeness.  Hosts come in the order of ties."""

    def __init__(self, depth: int, likenesses: Iterable[_Likeness]) -> None:
        self._depth = depth
        self._fastest: dict[_Likeness, list[float]] = {likeness: [] for likeness in likenesses}

    def copy(self) -> _Best:
        other = _Best(self._depth, ())
        other._fastest = {likeness: list(fastest) for likeness, fastest in self._fastest.items()}
        return other

    def beats(self, likeness: _Likeness, bytes_per_s: float) -> bool:
        fastest = self._fastest[likeness]
        return len(fastest) == self._depth and bytes_per_s <= fastest[0]

    def take(self, likeness: _Likeness, bytes_per_s: float) -> bool:
        """Return False for a host that is beaten.  All hosts that it would beat are then beaten, too."""
        if self.beats(likeness, bytes_per_s):
            return False
        for other, fastest in self._fastest.items():
            if likeness[0] >= other[0] and likeness[1] >= other[1]:
                bisect.insort(fastest, bytes_per_s)
                del fastest[: -self._depth]
        return True


def tie_order(host: HostView, now_s: float) -> tuple[float, int, HostId]:
    """The order among equally fast hosts: first the host whose link is free first (it leaves promises most slack), then
    the least loaded."""
    return max(now_s, host.ledger.promised_until_s), host.n_workers, host.host_id
