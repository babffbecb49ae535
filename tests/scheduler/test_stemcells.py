"""The number of stem cells that a host is told to keep.  The host is told each number once."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from gateway.scheduler.decisions import KeepStemCells, StartGroup
from gateway.scheduler.events import ActionDeleted, Rebuilt
from gateway.scheduler.view.stem_cells import REPEAT_S, StemCells
from relay.protocol.messages import ActionChanged, SetStemCells
from relay.state import bus
from tests.scheduler.facts import HELLO, MIB, chat, hello, report
from tests.scheduler.world import World, of
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.host import HostReport, StemTarget
from thaw.ids import HostId

PY = StemTarget(KIND_PYTHON, 1, 64 * MIB)
LLM = StemTarget(KIND_LLM, 1, 768 * MIB)


def beat(w: World, *targets: StemTarget, after_s: float = 1.0, **fields: Any) -> list[tuple[str, int]]:
    """Send a heartbeat of a host that now keeps these stem cells.  Return the message to the host."""
    w.now += after_s
    kept = targets or next(iter(w.reports.values())).stem_targets
    seen = replace(report(stem_targets=kept, seen_wall_ms=int(w.now * 1000)), **fields)
    w.reports = {seen.host_id: seen}
    return [(d.kind, d.count) for d in of(w.see(seen), KeepStemCells)]


def host_with(*targets: StemTarget) -> HostReport:
    return report(stem_targets=targets)


def test_a_kind_without_an_action_goes_down_to_the_floor_after_a_while_and_comes_back_with_its_first_action() -> None:
    w = World(host_with(PY, LLM))
    w.deploy(hello())
    assert beat(w, after_s=599.0) == []
    assert beat(w, after_s=2.0) == [(KIND_LLM, 0)]
    assert beat(w, PY, replace(LLM, count=0)) == []  # the host has done this
    w.deploy(chat())
    assert beat(w) == [(KIND_LLM, 1)]
    assert beat(w, PY, LLM) == []
    w.do(ActionDeleted(chat().name))
    assert beat(w, after_s=601.0) == [(KIND_LLM, 0)]


def test_the_floor_is_a_setting() -> None:
    w = World(host_with(PY), stem_cell_floor=2, stem_cell_idle_s=10.0)
    assert beat(w, after_s=11.0) == [(KIND_PYTHON, 2)]


def test_a_host_that_names_no_kind_is_told_nothing() -> None:
    w = World(report())
    w.deploy(hello())
    assert beat(w, after_s=700.0) == []


def test_it_is_told_once_and_again_only_when_it_does_not_do_it() -> None:
    w = World(host_with(PY), stem_cell_idle_s=1.0)
    assert beat(w, after_s=2.0) == [(KIND_PYTHON, 0)]
    assert [beat(w) for _ in range(5)] == [[]] * 5
    assert beat(w, after_s=REPEAT_S) == [(KIND_PYTHON, 0)]


def burst(w: World, n: int) -> None:
    for _ in range(n):
        assert len(of(w.ask(HELLO), StartGroup)) == 1


def test_it_keeps_as_many_as_began_there_at_once_of_late_and_one_when_that_is_long_ago() -> None:
    w = World(host_with(PY))
    w.deploy(hello(max_instances=20))
    w.now += 400.0
    burst(w, 3)
    assert beat(w) == [(KIND_PYTHON, 3)]
    assert beat(w, replace(PY, count=3), after_s=200.0) == []
    assert beat(w, after_s=100.0) == [(KIND_PYTHON, 1)]


def test_starts_that_leave_time_to_make_another_need_one() -> None:
    w = World(host_with(PY))
    w.deploy(hello(max_instances=20))
    for _ in range(3):
        burst(w, 1)
        w.now += 5.0  # the scheduler assumes 3.5 s for a container and its imports until it has measured them
    assert beat(w) == []


def test_starts_where_nobody_asks_are_forgotten_with_the_window() -> None:
    cells, host = StemCells(), HostId("h1")
    for at_s in range(0, 1000, 10):
        cells.began(host, KIND_LLM, 60.0, float(at_s))
    assert cells.at_once(host, KIND_LLM, 1000.0, 1000.0, 990.0) == 7


def test_cells_beyond_the_first_take_a_quarter_of_the_free_memory_at_most() -> None:
    w = World(report(stem_targets=(PY,), memory_mb=2048))
    w.deploy(hello(max_instances=20))
    w.now += 400.0
    burst(w, 6)  # each takes 256 MiB, and a quarter of the remaining 512 MiB is two cells
    small = {"devices": report(memory_mb=2048).devices}
    assert beat(w, **small) == [(KIND_PYTHON, 3)]


def test_a_zygote_is_there_once_however_many_start() -> None:
    shared = replace(LLM, shared=True, count=0)
    w = World(host_with(shared))
    w.deploy(chat())
    for _ in range(5):
        w.view.cells.began(w.reports[next(iter(w.reports))].host_id, KIND_LLM, 300.0, w.now)
    assert beat(w) == [(KIND_LLM, 1)]


def test_a_host_that_is_drained_keeps_none() -> None:
    w = World(host_with(PY))
    w.deploy(hello())
    assert beat(w, draining=True) == [(KIND_PYTHON, 0)]
    assert beat(w, replace(PY, count=0), draining=False) == [(KIND_PYTHON, 1)]


def test_a_successor_leaves_what_it_finds_until_it_has_watched_as_long_itself() -> None:
    w = World()
    seen = host_with(replace(PY, count=4), LLM)
    decided = w.do(Rebuilt(0, (seen,), (), (), (), (), (hello(),)))
    assert of(decided, KeepStemCells) == []
    w.reports = {seen.host_id: seen}
    assert beat(w, after_s=299.0) == []
    assert beat(w, after_s=2.0) == [(KIND_PYTHON, 1)]


@pytest.mark.parametrize(
    "crash", [pytest.param(False, marks=pytest.mark.full), True], ids=["one leader", "a successor"]
)
def test_the_scheduler_sends_it_once_whoever_leads(platform: Any, crash: bool) -> None:
    host = platform.host()
    host.stem_targets = (PY, LLM)
    host.report()
    platform.action()
    first = platform.scheduler(THAW_STEM_CELL_IDLE_S="0.2")
    (told,) = host.commands.wait(SetStemCells)
    assert (told.kind, told.count) == (KIND_LLM, 0)
    if crash:
        first.send_signal(signal.SIGKILL)
        first.wait(30)
        platform.scheduler(THAW_STEM_CELL_IDLE_S="0.2")
    bus.publish(platform.client, ActionChanged(platform.llm().name))
    assert [(c.kind, c.count) for c in host.commands.wait(SetStemCells, 2)][1:] == [(KIND_LLM, 1)]
    assert len(host.commands.of(SetStemCells)) == 2
