"""How many stem cells of each kind a host keeps.

A host says in every report how many it keeps and what one costs, so this is stored nowhere else: a successor finds in
the reports what its predecessor asked for, and a host that was restarted is told again.  A host that names no kind (its
operator keeps none) is told nothing.

    no action of the kind is deployed, for ``stem_cell_idle_s``  → the floor: unused cells hold no more memory than that
    deployed                                                     → one, and as many as recently began here at once

"At once" means within the time that making another cell takes: a start that comes later finds the other cell made.  One
cell that any number of starts fork from (a zygote) is enough.  Beyond the first, cells take at most a quarter of the
memory that is free; in any case the host itself gives them up before it refuses a start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gateway.scheduler.decisions import Decision, KeepStemCells, StartGroup
from gateway.scheduler.events import ActionDeleted, ActionFacts, ActionSeen, Event, HostsSeen, Rebuilt
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.history import EVERY_ACTION
from gateway.scheduler.view.hosts import HostView
from thaw.action import KIND_LLM
from thaw.host import StemTarget
from thaw.ids import CommandId
from thaw.instance import StartMode

SHARE_OF_FREE: Final = 4
"""Cells beyond the first of a kind may hold a host's free memory divided by this number."""


def follow(view: ClusterView, event: Event, decided: Iterable[Decision], now_s: float) -> list[Decision]:
    """Note the effect of an event and its decisions on stem cells; at a heartbeat, say which hosts are to keep more or
    fewer."""
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
    """Return how many cells of a kind this host is to keep."""
    if host.report.handing_over and not host.report.draining:
        return target.count  # the next invoker has those that wait
    if host.draining:
        return 0
    settings, kind = view.settings, target.kind
    watched_s, unused_s = view.cells.watched_s(now_s), view.cells.unused_s(kind, now_s)
    if unused_s is not None:
        return settings.stem_cell_floor if unused_s >= settings.stem_cell_idle_s else target.count
    count = max(1, view.cells.at_once(host.host_id, kind, settings.stem_cell_window_s, _made_in_s(view, host), now_s))
    if watched_s < settings.stem_cell_window_s:
        count = max(count, target.count)  # earlier starts here are not known: a predecessor may have had its reasons
    if target.shared:
        return 1
    spare = max(0, host.most_free) // SHARE_OF_FREE // max(1, target.cell_bytes)
    return max(settings.stem_cell_floor, min(count, 1 + spare))


def _made_in_s(view: ClusterView, host: HostView) -> float:
    """Return how long another cell takes: its container, and the imports."""
    times = view.history.times(EVERY_ACTION, host.room(for_model=True).kind, StartMode.COLD, 0)
    return times.t_cc + times.t_l
