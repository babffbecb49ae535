"""A host's report on its stem cells, and the predicted time of a start on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.scheduler.view.history import History
from tests.scheduler.facts import CHAT, report
from tests.scheduler.world import World, foretold_s, llm_world
from thaw.action import KIND_LLM
from thaw.host import HostReport, StemTarget
from thaw.ids import HostId
from thaw.instance import StartMode

FAST = 1e12  # a link on which bytes take no time


def host(name: str, ready_in_s: float | None = None, **fields: Any) -> HostReport:
    """A host that is making a stem cell, or that keeps none."""
    target = StemTarget(KIND_LLM, 1, 0, shared=True, ready_in_s=ready_in_s)
    return report(name, network_bytes_per_s=FAST, stem_targets=(target,), **fields)


def foretold(w: World) -> tuple[str, float]:
    """The host of the start, and the predicted time of its first token."""
    start = w.started(CHAT)
    return start.plan.stages[0].host, foretold_s(start)


def test_a_start_waits_for_the_cell_that_its_host_is_making_and_is_foretold_so() -> None:
    _, ready = foretold(llm_world(host("h0", stem_kinds=(KIND_LLM,))))
    _, waits = foretold(llm_world(host("h0", ready_in_s=3.0)))
    assert waits == pytest.approx(ready + 3.0)


def test_the_wait_passes_while_nobody_reports() -> None:
    w = llm_world(host("h0", ready_in_s=3.0))
    w.now += 2.0
    _, later = foretold(w)
    assert later == pytest.approx(foretold(llm_world(host("h0", stem_kinds=(KIND_LLM,))))[1] + 1.0)


@pytest.mark.parametrize(("ready_in_s", "chosen"), [(0.5, "h0"), (60.0, "h1")])
def test_a_cell_that_is_nearly_made_beats_a_cold_start_and_one_that_is_not_loses(
    ready_in_s: float, chosen: str
) -> None:
    w = llm_world(host("h0", ready_in_s=ready_in_s), host("h1"))
    assert foretold(w)[0] == chosen


def test_a_host_that_makes_a_cell_is_passed_over_for_one_where_a_cell_waits() -> None:
    w = llm_world(host("h0", ready_in_s=3.0), host("h1", stem_kinds=(KIND_LLM,), used_mb=1024))
    assert foretold(w)[0] == "h1"


def test_what_the_next_report_says_of_a_cell_counts() -> None:
    w = llm_world(host("h0", ready_in_s=3.0))
    w.see(host("h0", ready_in_s=8.0, seen_wall_ms=2_000))
    cold = History().times(CHAT, "cpu", StartMode.PREWARMED, 0)
    assert foretold(w)[1] >= 8.0 + cold.t_cc


def test_a_cell_that_takes_longer_than_the_last_one_is_still_waited_for() -> None:
    """The host reports "in a second" again and again, and nothing else in its reports changes."""
    w = llm_world(host("h0", ready_in_s=1.0))
    for n in range(5):
        w.now += 1.0
        w.see(host("h0", ready_in_s=1.0, seen_wall_ms=2_000 + 1_000 * n))
    assert w.view.hosts[HostId("h0")].cell_s(KIND_LLM) >= w.now + 1.0


def test_a_report_that_is_read_again_is_no_newer_for_it() -> None:
    said = host("h0", ready_in_s=8.0)
    w = llm_world(said)
    before = w.view.hosts[HostId("h0")].cell_s(KIND_LLM)
    w.view.hosts[HostId("h0")].hold("cpu", 1)  # so that the view inspects the same report again
    w.now += 2.0
    w.see(replace(said))
    assert w.view.hosts[HostId("h0")].cell_s(KIND_LLM) == before
