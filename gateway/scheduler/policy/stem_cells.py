"""How many stem cells of each kind a host keeps.

A host says in every report how many it keeps and what one costs, so nothing is remembered elsewhere: a successor finds
there what its predecessor asked for, and a host that was restarted is told again.  Hosts that name no kind (their
operator keeps none) are told nothing.

    no action of the kind is deployed, for ``stem_cell_idle_s``  → the floor: what nobody starts holds no memory
    deployed                                                     → one, and as many as began here at once of late

"At once" is within the time that another cell takes to be made: those that come later find it made.  A cell that any
number of starts fork from (a zygote) is there once.  Beyond the first, cells take at most a quarter of the memory that
is free; they are given up first in any case, by the host itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gateway.scheduler.decisions import Decision, KeepStemCells, StartGroup
from gateway.scheduler.events import ActionDeleted, ActionFacts, ActionSeen, Event, HostsSeen, Rebuilt
from gateway.scheduler.view.history import EVERY_ACTION
from gateway.scheduler.view.hosts import HostView
from thaw.action import KIND_LLM
from thaw.host import StemTarget
from thaw.ids import ActionName, CommandId, HostId
from thaw.instance import StartMode

if TYPE_CHECKING:
    from gateway.scheduler.view.cluster import ClusterView

SHARE_OF_FREE: Final = 4
"""One part in so many of a host's free memory may hold cells beyond the first of a kind."""
REPEAT_S: Final = 10.0
"""A host reports once a second; one that does not do what it was told by then is told again."""


@dataclass(slots=True)
class StemCells:
    """What the policy remembers of kinds: which are deployed, and when starts of them began where."""

    kinds: dict[ActionName, str] = field(default_factory=dict)
    _n_deployed: dict[str, int] = field(default_factory=dict)
    _unused_since_s: dict[str, float] = field(default_factory=dict)
    _began: dict[tuple[HostId, str], deque[float]] = field(default_factory=dict)
    _asked: dict[tuple[HostId, str], tuple[int, float]] = field(default_factory=dict)
    _since_s: float | None = None  # when this memory began

    def deployed(self, name: ActionName, kind: str) -> None:
        if self.kinds.get(name) == kind:
            return
        self.kinds[name] = kind
        self._n_deployed[kind] = self._n_deployed.get(kind, 0) + 1
        self._unused_since_s.pop(kind, None)

    def deleted(self, name: ActionName, now_s: float) -> None:
        if (kind := self.kinds.pop(name, None)) is not None:
            self._n_deployed[kind] -= 1
            if self._n_deployed[kind] == 0:
                self._unused_since_s[kind] = now_s

    def began(self, host_id: HostId, kind: str, window_s: float, now_s: float) -> None:
        """What is older than ``window_s`` is forgotten: of a host that names no kind nobody ever asks."""
        began = self._began.setdefault((host_id, kind), deque())
        began.append(now_s)
        while began[0] < now_s - window_s:
            began.popleft()

    def unused_s(self, kind: str, now_s: float) -> float | None:
        """For how long no action of this kind has been deployed; None: one is."""
        if self._n_deployed.get(kind, 0) > 0:
            return None
        return now_s - self._unused_since_s.setdefault(kind, now_s)

    def watched_s(self, now_s: float) -> float:
        """How long starts have been noted here: a successor has seen none yet."""
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s

    def at_once(self, host_id: HostId, kind: str, window_s: float, within_s: float, now_s: float) -> int:
        """The most starts that began within ``within_s`` of one another, in the last ``window_s``."""
        began = self._began.get((host_id, kind))
        if began is None:
            return 0
        while began and began[0] <= now_s - window_s:
            began.popleft()
        if not began:
            del self._began[host_id, kind]
        most, times = 0, list(began)
        first = 0
        for last, at_s in enumerate(times):
            while times[first] <= at_s - within_s:
                first += 1
            most = max(most, last - first + 1)
        return most

    def is_asked(self, host_id: HostId, target: StemTarget, wanted: int, now_s: float) -> bool:
        """It keeps so many, or was told to a moment ago; else it counts as told now."""
        key = host_id, target.kind
        if target.count == wanted:
            self._asked.pop(key, None)
            return True
        count, asked_s = self._asked.get(key, (-1, -math.inf))
        if count == wanted and now_s - asked_s < REPEAT_S:
            return True
        self._asked[key] = wanted, now_s
        return False

    def forget_hosts(self, present: Iterable[HostId]) -> None:
        here = frozenset(present)
        for key in [k for k in {*self._began, *self._asked} if k[0] not in here]:
            self._began.pop(key, None)
            self._asked.pop(key, None)


def follow(view: ClusterView, event: Event, decided: Iterable[Decision], now_s: float) -> list[Decision]:
    """Note what an event and its decisions mean for stem cells; at a heartbeat, say which hosts keep more or fewer."""
    match event:
        case ActionSeen():
            view.cells.deployed(event.facts.name, event.facts.kind)
        case ActionDeleted():
            view.cells.deleted(event.action, now_s)
        case Rebuilt():
            for facts in event.actions:
                view.cells.deployed(facts.name, facts.kind)
        case HostsSeen():
            view.cells.forget_hosts(view.hosts)
    note_starts(view, decided, now_s)
    if not isinstance(event, HostsSeen | Rebuilt):
        return []
    return [d for host in view.hosts.values() for d in _of_host(view, host, now_s)]


def note_starts(view: ClusterView, decided: Iterable[Decision], now_s: float) -> None:
    """Each stage that begins takes a stem cell of its host."""
    for decision in decided:
        if isinstance(decision, StartGroup):
            for stage in decision.stages:
                kind = _kind(view.action(decision.plan.action).facts)
                view.cells.began(stage.host_id, kind, view.settings.stem_cell_window_s, now_s)


def _kind(facts: ActionFacts | None) -> str:
    return KIND_LLM if facts is None else facts.kind


def _of_host(view: ClusterView, host: HostView, now_s: float) -> list[Decision]:
    found: list[Decision] = []
    for target in host.report.stem_targets:
        count = wanted(view, host, target, now_s)
        if not view.cells.is_asked(host.host_id, target, count, now_s):
            found.append(KeepStemCells(host.host_id, target.kind, count, CommandId(view.new_id())))
    return found


def wanted(view: ClusterView, host: HostView, target: StemTarget, now_s: float) -> int:
    """How many cells of a kind this host is to keep."""
    if host.draining:
        return 0
    settings, kind = view.settings, target.kind
    watched_s, unused_s = view.cells.watched_s(now_s), view.cells.unused_s(kind, now_s)
    if unused_s is not None:
        return settings.stem_cell_floor if unused_s >= settings.stem_cell_idle_s else target.count
    count = max(1, view.cells.at_once(host.host_id, kind, settings.stem_cell_window_s, _made_in_s(view, host), now_s))
    if watched_s < settings.stem_cell_window_s:
        count = max(count, target.count)  # what began here before is not known: a predecessor may have had its reasons
    if target.shared:
        return 1
    spare = max(0, host.most_free) // SHARE_OF_FREE // max(1, target.cell_bytes)
    return max(settings.stem_cell_floor, min(count, 1 + spare))


def _made_in_s(view: ClusterView, host: HostView) -> float:
    """How long another cell takes: a container, and the imports."""
    times = view.history.times(EVERY_ACTION, host.room(for_model=True).kind, StartMode.COLD, 0)
    return times.t_cc + times.t_l
