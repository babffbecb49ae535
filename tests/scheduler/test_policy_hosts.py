"""What decide() does with hosts that are full, lost or report nonsense, and with the requests of lost gateways."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.scheduler.decisions import DropDemand, Flag, ForgetInstance, ReleaseInstance, StartGroup
from gateway.scheduler.events import GatewaysLost
from tests.scheduler.facts import CHAT, FACTS, GONE, HELLO, MIB, OTHER, READY, chat, demand, hello, report
from tests.scheduler.world import World, llm_world, of, serving, starting, world
from thaw.host import Device
from thaw.ids import ActivationId, GatewayId


def test_the_longest_idle_instance_of_another_action_is_evicted_for_room() -> None:
    w = world(report(memory_mb=512), facts=hello())
    first, second = w.started(), w.started()
    w.ready(first)
    w.now += 1
    w.ready(second)
    w.deploy(hello(name=OTHER))
    (release,) = of(w.ask(OTHER), ReleaseInstance)
    assert (release.instance_id, release.reason) == (first.stages[0].instance_id, "memory")
    assert of(w.later(1.5), ReleaseInstance) == []
    (start,) = of(w.said(first, GONE), StartGroup)
    assert start.plan.action == OTHER


def test_an_eviction_whose_refusal_was_lost_is_asked_for_again() -> None:
    w, start = serving(world(report(memory_mb=256), facts=hello(need_bytes=256 * MIB)))
    w.deploy(hello(need_bytes=256 * MIB, name=OTHER))
    assert len(of(w.ask(OTHER), ReleaseInstance)) == 1
    w.said(start, READY, inflight=1)  # it was busy after all, and it sent nothing else
    w.said(start, READY, idle_since_wall_ms=2)
    assert of(w.later(55.0), ReleaseInstance) == []
    again = of(w.later(10.0), ReleaseInstance)
    assert [(r.instance_id, r.reason) for r in again] == [(start.stages[0].instance_id, "memory")]


def test_busy_and_starting_instances_are_never_evicted() -> None:
    w = world(report(memory_mb=512), facts=hello())
    busy, _ = w.started(), w.started()
    w.ready(busy, idle=False)
    w.deploy(hello(name=OTHER))
    assert of(w.ask(OTHER) + w.later(30.0), ReleaseInstance) == []


def test_memory_that_a_host_says_is_used_by_others_is_not_promised() -> None:
    w = world(report(memory_mb=512, used_mb=300))
    assert of(w.ask(), StartGroup) == []
    assert len(of(w.see(report(memory_mb=512)), StartGroup)) == 1


def test_a_report_older_than_a_decision_does_not_free_what_was_just_promised() -> None:
    w = world(report(memory_mb=512))
    w.ask()
    w.ask()
    w.see(report(memory_mb=512))
    assert of(w.ask(), StartGroup) == []


def test_a_lost_hosts_instances_are_forgotten_and_its_requests_go_elsewhere() -> None:
    w, start = starting(world(report("h0"), report("h1")))
    decided = w.see(report("h1"))
    assert [f.record.error.code for f in of(decided, ForgetInstance) if f.record.error] == ["WorkerLost"]
    (again,) = of(decided, StartGroup)
    assert (again.plan.stages[0].host, again.activation_ids) == ("h1", start.activation_ids)


def lost(w: World, gateway: str) -> list[DropDemand]:
    return of(w.do(GatewaysLost(frozenset({GatewayId(gateway)}))), DropDemand)


def test_the_requests_of_a_dead_gateway_are_dropped() -> None:
    w = world()
    w.ask(gateway="dead")
    w.ask(gateway="alive")
    assert [(d.activation_id, d.gateway) for d in lost(w, "dead")] == [("a0", "dead")]


def test_a_request_that_another_gateway_took_over_is_not_dropped_with_the_first() -> None:
    """The message of the gateway that holds the request now comes before the message that the first gateway is lost."""
    w = world()
    w.ask(gateway="dead")
    (held,) = w.view.demand.values()
    assert of(w.do(replace(held.demand, gateway=GatewayId("heir"))), StartGroup) == []
    assert lost(w, "dead") == []
    assert [d.gateway for d in lost(w, "heir")] == ["heir"]


def test_a_request_that_outlives_its_time_limit_is_held_by_nobody_and_keeps_no_instance() -> None:
    w = world(facts=hello(timeout_s=300.0))
    asked = demand("left", HELLO)
    started, dropped, released = 0, list[DropDemand](), list[ReleaseInstance]()
    decided = w.do(asked)
    for at_s in range(700):
        assert (dropped != []) is (at_s > 200 + 390)
        if at_s == 200:
            decided += w.do(replace(asked, waited_ms=200_000))  # its gateway reports again that it holds the request
        for start in of(decided, StartGroup):
            started += 1
            w.said(start, READY, idle_since_wall_ms=1)  # but no message says that the request was served
        dropped += of(decided, DropDemand)
        released += of(decided, ReleaseInstance)
        decided = w.later(1.0)
    assert dropped == [DropDemand(HELLO, asked.activation_id, asked.gateway)]
    assert len({r.instance_id for r in released}) == started == 8


@pytest.mark.parametrize("link", [0.0, -5.0, float("nan"), float("inf")])
def test_a_host_that_reports_nonsense_is_clamped_and_flagged_and_still_used(link: float) -> None:
    odd = report(network_bytes_per_s=link, devices=(Device("cpu", "cpu", 4096 * MIB, 9000 * MIB),))
    w = World()
    flags = of(w.see(odd), Flag)
    assert {f.name for f in flags} == {"host_report_clamped"}
    w.deploy(chat())
    w.looked(FACTS)
    assert len(of(w.ask(CHAT), StartGroup)) == 1


def test_a_host_whose_clock_goes_back_is_flagged() -> None:
    w = world(report(seen_wall_ms=5_000))
    (flag,) = of(w.see(report(seen_wall_ms=1_000)), Flag)
    assert "clock went back 4000 ms" in str(flag.fields["what"])


def test_a_slow_link_gives_a_fallback_plan_without_a_deadline_and_a_fast_one_a_deadline() -> None:
    t_p = 1.5 * FACTS.weight_bytes / 13_476_839_424  # the paper's prefill, scaled by the bytes that it reads
    slow = llm_world(report(network_bytes_per_s=1e6))
    start = slow.started(CHAT)
    assert start.plan.stages[0].fetch_deadline_ms is None
    assert start.plan.predicted_ttft_s == pytest.approx(100 * MIB / 1e6 + t_p + 0.005)
    fast = llm_world(report(network_bytes_per_s=1e9))
    start = fast.started(CHAT)
    assert start.plan.stages[0].fetch_deadline_ms == int(7_500 - (t_p + 0.005) * 1000)


def test_a_request_that_moves_to_another_action_waits_there_alone() -> None:
    w = World()
    asked = demand("a", CHAT)
    w.view.add_demand(asked, 1.0)
    assert w.view.add_demand(replace(asked, action=HELLO), 2.0)
    assert [(name, list(w.view.action(name).waiting)) for name in (CHAT, HELLO)] == [(CHAT, []), (HELLO, ["a"])]
    assert w.view.demand[ActivationId("a")].queued_s == 1.0, "it keeps its age"
