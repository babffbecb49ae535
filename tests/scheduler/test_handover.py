"""A host that one invoker hands over to the next, as the policy sees it: its instances stay, and nothing starts there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.scheduler.decisions import KeepStemCells, ReleaseInstance, StartGroup, UndrainInstance
from relay.protocol.messages import InstanceChanged
from tests.scheduler.facts import HELLO, MIB, READY, hello, report
from tests.scheduler.world import World, hosts_of, of, serving, world
from thaw.action import KIND_PYTHON
from thaw.host import StemTarget
from thaw.ids import HostId


def seen(w: World, *, handing_over: bool, **fields: Any) -> list[Any]:
    """The reports of all hosts; h0 is handed over, or was and is reported by its next invoker."""
    reports = []
    for host_id in sorted(w.reports):
        instances = tuple(sorted(w.view.on_host.get(HostId(host_id), ())))
        used = sum(w.view.instances[i].record.reserve_bytes for i in instances) // MIB
        of_host = {"handing_over": handing_over, **fields} if host_id == "h0" else {}
        reports.append(report(host_id, used_mb=used, instances=instances, **of_host))
    return w.see(*reports)


def adopted(w: World, start: StartGroup) -> list[Any]:
    """The next invoker announces the instance under its own address."""
    record = w.view.instances[start.stages[0].instance_id].record
    return list(w.do(InstanceChanged(replace(record, address="b:2", idle_since_wall_ms=2_000))))


def test_instances_of_a_host_that_is_handed_over_are_neither_released_nor_taken_back() -> None:
    w, start = serving(world(report("h0"), report("h1")))
    for _ in range(2):
        decided = seen(w, handing_over=True)
        assert of(decided, ReleaseInstance) == of(decided, UndrainInstance) == []
    assert w.view.action(HELLO).n_serving == 1
    decided = [*adopted(w, start), *seen(w, handing_over=False)]
    assert of(decided, ReleaseInstance) == of(decided, StartGroup) == []


def test_nothing_starts_on_a_host_that_is_handed_over() -> None:
    w = world(report("h0"), report("h1"))
    seen(w, handing_over=True)
    assert hosts_of(w.ask()) == ["h1"]
    seen(w, handing_over=False)
    assert hosts_of(w.ask()) == ["h0"]


def test_a_minimum_that_a_host_keeps_while_it_is_handed_over_is_not_started_elsewhere() -> None:
    w = world(report("h0"), report("h1"), facts=hello(min_instances=1))
    (group,) = w.view.groups.values()
    (minimum,) = w.view.of_action(HELLO)
    w.do(InstanceChanged(replace(minimum.record, state=READY, idle_since_wall_ms=1_000)))
    assert minimum.record.host_id == "h0"
    assert not group.is_starting
    assert of(seen(w, handing_over=True), StartGroup) == []
    assert of(seen(w, handing_over=False), StartGroup) == []
    assert w.view.action(HELLO).n_serving == 1


@pytest.mark.parametrize("draining", [True, False])
def test_the_stem_cells_of_a_host_that_is_handed_over_are_left_as_they_are(draining: bool) -> None:
    """A host that is drained as well gives them up."""
    w = world(report("h0"), report("h1"))
    targets = (StemTarget(KIND_PYTHON, 3, 64 * MIB),)
    for _ in range(2):
        asked = of(seen(w, handing_over=True, draining=draining, stem_targets=targets), KeepStemCells)
        assert {(a.host_id, a.count) for a in asked} <= {("h0", 0)}
        assert draining or not asked
        w.now += 1000


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_request_that_waits_for_the_only_host_starts_no_second_instance_if_the_first_is_announced_before_the_host(
    is_announced: bool,
) -> None:
    w, start = serving(world(report("h0")))
    w.now += 60
    seen(w, handing_over=True)
    assert of(w.ask(), StartGroup) == []
    w.now += 8
    if is_announced:
        adopted(w, start)
    assert len(of(seen(w, handing_over=False), StartGroup)) == (0 if is_announced else 1)


def test_the_memory_of_a_host_is_counted_once_while_it_is_handed_over() -> None:
    w, start = serving(world(report("h0")))
    free = w.view.hosts["h0"].devices["cpu"].free
    seen(w, handing_over=True)
    assert w.view.hosts["h0"].devices["cpu"].free == free
    adopted(w, start)
    seen(w, handing_over=False)
    assert w.view.hosts["h0"].devices["cpu"].free == free
    assert w.view.hosts["h0"].devices["cpu"].foreign == 0


@pytest.mark.parametrize("draining", [True, False])
def test_a_host_that_is_drained_while_it_is_handed_over_is_emptied(draining: bool) -> None:
    w, start = serving(world(report("h0"), report("h1")))
    released = of(seen(w, handing_over=True, draining=draining), ReleaseInstance)
    assert [r.instance_id for r in released] == [start.stages[0].instance_id] * draining


def test_a_report_that_differs_only_in_the_handover_counts_as_news() -> None:
    w = world(report("h0"), facts=hello())
    host = w.view.hosts["h0"]
    assert host.is_confirmed_by(report("h0"))
    assert not host.is_confirmed_by(report("h0", handing_over=True))
