"""decide() as a pure function: one event in, decisions out, no process and no clock."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.scheduler.decisions import Decision, InspectModelOn, ReleaseInstance, StartGroup, TimerKind
from gateway.scheduler.policy.starts import GATHER_S
from relay.protocol.messages import DemandRemoved
from tests.scheduler.facts import CHAT, FACTS, HELLO, MIB, READY, chat, hello, report
from tests.scheduler.world import World, hosts_of, llm_world, of, serving, starting, world
from thaw.errors import ErrorInfo
from thaw.host import Device
from thaw.ids import InstanceId


def test_one_request_starts_one_instance_and_a_second_look_starts_no_other() -> None:
    w, start = starting(world())
    assert start.plan.epoch == 7
    assert of(w.later(5.0), StartGroup) == []


@pytest.mark.parametrize(("most", "n_started"), [(8, [1, 1, 1, 1]), (2, [1, 1, 0, 0])])
def test_every_request_beyond_the_slots_that_start_gets_its_own_instance_up_to_max_instances(
    most: int, n_started: list[int]
) -> None:
    w = world(facts=hello(max_instances=most))
    assert [len(of(w.ask(), StartGroup)) for _ in range(4)] == n_started


def test_a_models_batch_slots_take_a_burst() -> None:
    w = llm_world()
    assert len(of(w.burst(4), StartGroup)) == 1
    w.now += GATHER_S
    assert len(of(w.burst(16), StartGroup)) == 3  # the host has 4 GiB; Q + P = 40 would want five


def test_the_least_loaded_host_is_chosen() -> None:
    w = world(report("h0"), report("h1"))
    assert [hosts_of(w.ask()) for _ in range(4)] == [["h0"], ["h1"], ["h0"], ["h1"]]


def test_equal_hosts_share_models_by_load_too() -> None:
    w = llm_world(report("h0"), report("h1"), facts=chat(slots=1))
    assert sorted(hosts_of(w.ask(CHAT))) == ["h0", "h1"]


def test_a_free_slot_counts_for_a_second_and_then_the_request_gets_an_instance() -> None:
    w, _ = serving(world())
    assert of(w.ask(), StartGroup) == []
    assert len(of(w.later(1.1), StartGroup)) == 1


def test_a_request_queued_well_after_an_instance_spoke_needs_one_of_its_own_at_once() -> None:
    w, start = starting(llm_world())
    w.said(start, READY, slots=8, inflight=1)
    w.now += 0.5
    assert len(of(w.ask(CHAT), StartGroup)) == 1


def test_an_instance_that_only_its_host_knows_is_released_in_the_end() -> None:
    w = world()
    orphan = report(instances=(InstanceId("orphan"),), used_mb=256)
    assert of(w.see(orphan), ReleaseInstance) == []
    w.now += 16
    assert [r.instance_id for r in of(w.see(orphan), ReleaseInstance)] == ["orphan"]
    w.now += 1
    assert of(w.see(orphan), ReleaseInstance) == []


def test_an_idle_instance_is_released_after_its_keep_alive_and_not_before() -> None:
    w, start = serving(world())
    assert of(w.later(59.0), ReleaseInstance) == []
    (release,) = of(w.later(2.0), ReleaseInstance)
    assert (release.instance_id, release.only_idle, release.reason) == (start.stages[0].instance_id, True, "keep_alive")


def test_a_busy_instance_is_not_released() -> None:
    w, _ = serving(world(), idle=False)
    assert of(w.later(600.0), ReleaseInstance) == []


def test_a_refused_release_begins_the_idle_time_anew() -> None:
    w, _ = serving(world())
    (release,) = of(w.later(61.0), ReleaseInstance)
    w.refused(release)
    assert of(w.later(58.0), ReleaseInstance) == []
    assert len(of(w.later(3.0), ReleaseInstance)) == 1


def test_a_thousand_idle_reports_leave_one_timer() -> None:
    w, start = starting(world())
    for i in range(1_000):
        w.said(start, READY, idle_since_wall_ms=i or None)
    assert len([t for t in w.timers if t.kind is TimerKind.KEEP_ALIVE]) == 1


def test_min_instances_are_started_without_demand_and_outlive_their_keep_alive() -> None:
    w = world(facts=hello())
    assert len(of(w.deploy(chat(min_instances=1)), InspectModelOn)) == 1
    (start,) = of(w.looked(FACTS), StartGroup)
    w.ready(start)
    assert of(w.later(600.0), ReleaseInstance) == []


def test_the_minimum_of_a_function_is_kept_as_well_and_a_lower_one_lets_go() -> None:
    w = world(facts=hello())
    (start,) = of(w.deploy(hello(min_instances=1), changed=True), StartGroup)
    w.ready(start)
    assert of(w.later(600.0), ReleaseInstance) == []
    assert len(of(w.deploy(hello(), changed=True), ReleaseInstance)) == 1, "of the same version"


def served_at_once(w: World, n: int) -> list[Decision]:
    """Send requests that are queued and find a slot before the scheduler reads about them."""
    asked = [w.request(CHAT) for _ in range(n)]
    return w.do(*asked, *(DemandRemoved(a.activation_id, CHAT) for a in asked))


def busy_world(**facts: Any) -> World:
    """A world in which all slots of the only instance have been taken for a while."""
    w, start = starting(llm_world(facts=chat(**facts)))
    w.later(2.0)
    w.ready(start, idle=False)
    w.later(2.0)
    return w


def test_a_full_window_starts_workers_though_the_queue_is_empty() -> None:
    w = busy_world(keep_alive_s=5.0)
    starts = of(served_at_once(w, 9), StartGroup)
    assert [s.activation_ids for s in starts] == [(), ()]  # ceil((0 + 9 - 0) / 8)
    assert of(served_at_once(w, 1) + w.later(GATHER_S), StartGroup) == []  # starting instances count as supply
    for start in starts:
        w.ready(start)
    later = w.later(60.0)
    assert of(later, StartGroup) == []
    assert len(of(later, ReleaseInstance)) == 2  # each is released once, after it was idle for its keep-alive


def test_the_last_slots_that_recent_requests_took_are_followed_by_another_worker() -> None:
    w, start = starting(llm_world())
    w.later(2.0)
    w.ready(start)
    w.said(start, READY, slots=8, idle_since_wall_ms=1)
    asked = [w.request(CHAT) for _ in range(4)]
    assert of(w.do(*asked), StartGroup) == []  # eight slots are free
    w.said(start, READY, slots=8, inflight=8)
    decided = [w.do(DemandRemoved(a.activation_id, CHAT)) for a in asked]
    assert [len(of(d, StartGroup)) for d in decided] == [0, 0, 0, 1]


def test_a_full_window_starts_no_more_than_max_instances() -> None:
    w = busy_world(max_instances=2)
    assert len(of(served_at_once(w, 40), StartGroup)) == 1


def test_a_full_window_starts_nothing_beside_idle_instances() -> None:
    w, start = serving(llm_world())
    w.said(start, READY, slots=8, idle_since_wall_ms=1)
    w.later(2.0)
    assert of(served_at_once(w, 8), StartGroup) == []


def test_a_full_window_evicts_nobody_and_does_not_wait_in_line() -> None:
    w = busy_world(need_bytes=3000 * MIB)
    (other,) = of(w.deploy(hello(need_bytes=1000 * MIB)) + w.ask(), StartGroup)
    w.ready(other)
    w.later(2.0)
    decided = served_at_once(w, 9)
    assert of(decided, StartGroup) + of(decided, ReleaseInstance) == []
    assert CHAT not in w.view.blocked


def test_a_start_that_failed_is_not_repeated_for_requests_that_are_only_foretold() -> None:
    w, start = starting(llm_world())
    decided = w.gone(start, error=ErrorInfo("InitFailed", "bad weights"))
    decided += served_at_once(w, 9) + w.later(5.0)
    assert of(decided, StartGroup) == []


def test_models_go_to_an_accelerator_and_ordinary_functions_to_the_cpu_slice_beside_it() -> None:
    both = (Device("cpu", "cpu", 4096 * MIB, 4096 * MIB), Device("cuda:0", "H200", 8192 * MIB, 8192 * MIB))
    w = llm_world(report(devices=both))
    w.deploy(hello())
    assert [w.started(name).plan.stages[0].device for name in (CHAT, HELLO)] == ["cuda:0", "cpu"]
