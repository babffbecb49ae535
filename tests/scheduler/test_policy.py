"""decide() as a pure function: one event in, decisions out, no process and no clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.scheduler.decisions import (
    CancelGroup,
    Decision,
    DropDemand,
    FailDemand,
    Flag,
    Forget,
    ForgetInstance,
    InspectModelOn,
    ReleaseInstance,
    StartGroup,
    TimerKind,
    Wake,
)
from gateway.scheduler.events import ActionDeleted, ActionSeen, GatewaysLost, HostsSeen, Rebuilt
from gateway.scheduler.policy.starts import GATHER_S
from gateway.scheduler.view.history import Measured
from relay.protocol.messages import CommandRefused, DemandAdded, DemandRemoved, InstanceChanged, ModelInspected
from tests.scheduler.world import CHAT, FACTS, HELLO, MIB, World, chat, hello, llm_world, of, record_of, report, world
from thaw.errors import ErrorInfo
from thaw.host import Device, FetchReport, HostReport
from thaw.ids import ActionName, ActivationId, GatewayId, GroupId, HostId, InstanceId, Namespace
from thaw.instance import InstanceState, StartMode
from thaw.plan import Plan


def test_one_request_starts_one_instance_and_a_second_look_starts_no_other() -> None:
    w = world()
    (start,) = of(w.ask(), StartGroup)
    assert start.plan.epoch == 7
    assert of(w.later(5.0), StartGroup) == []


def test_every_request_beyond_the_slots_that_start_gets_its_own_instance() -> None:
    w = world()
    assert [len(of(w.ask(), StartGroup)) for _ in range(3)] == [1, 1, 1]


def test_a_models_batch_slots_take_a_burst() -> None:
    w = llm_world()
    assert len(of(w.burst(4), StartGroup)) == 1
    w.now += GATHER_S
    assert len(of(w.burst(16), StartGroup)) == 3  # the host has 4 GiB; Q + P = 40 would want five


def test_max_instances_is_never_passed() -> None:
    w = world(facts=hello(max_instances=2))
    starts = [s for _ in range(5) for s in of(w.ask(), StartGroup)]
    assert len(starts) == 2


def test_the_least_loaded_host_is_chosen() -> None:
    w = world(report("h0"), report("h1"))
    assert [of(w.ask(), StartGroup)[0].plan.stages[0].host for _ in range(4)] == ["h0", "h1", "h0", "h1"]


def test_equal_hosts_share_models_by_load_too() -> None:
    w = llm_world(report("h0"), report("h1"), facts=chat(slots=1))
    starts = of(w.ask(CHAT), StartGroup)
    assert sorted(s.plan.stages[0].host for s in starts) == ["h0", "h1"]


def test_a_draining_host_gets_nothing_new() -> None:
    w = world(report("h0", draining=True), report("h1"))
    assert of(w.ask(), StartGroup)[0].plan.stages[0].host == "h1"


def test_a_free_slot_counts_for_a_second_and_then_the_request_gets_an_instance() -> None:
    w = world()
    (start,) = of(w.ask(), StartGroup)
    w.ready(start)
    assert of(w.ask(), StartGroup) == []
    assert len(of(w.later(1.1), StartGroup)) == 1


def test_a_request_queued_well_after_an_instance_spoke_needs_one_of_its_own_at_once() -> None:
    w = llm_world()
    (start,) = of(w.ask(CHAT), StartGroup)
    w.said(start, InstanceState.READY, slots=8, inflight=1)
    w.now += 0.5
    assert len(of(w.ask(CHAT), StartGroup)) == 1


def test_an_instance_that_only_its_host_knows_is_released_in_the_end() -> None:
    w = world()
    orphan = report(instances=(InstanceId("orphan"),), used_mb=256)
    assert of(w.do(HostsSeen((orphan,))), ReleaseInstance) == []
    w.now += 16
    assert [r.instance_id for r in of(w.do(HostsSeen((orphan,))), ReleaseInstance)] == ["orphan"]
    w.now += 1
    assert of(w.do(HostsSeen((orphan,))), ReleaseInstance) == []


def test_an_idle_instance_is_released_after_its_keep_alive_and_not_before() -> None:
    w = world()
    (start,) = of(w.ask(), StartGroup)
    w.ready(start)
    assert of(w.later(59.0), ReleaseInstance) == []
    (release,) = of(w.later(2.0), ReleaseInstance)
    assert (release.instance_id, release.only_idle, release.reason) == (start.stages[0].instance_id, True, "keep_alive")


def test_a_busy_instance_is_not_released() -> None:
    w = world()
    (start,) = of(w.ask(), StartGroup)
    w.ready(start, idle=False)
    assert of(w.later(600.0), ReleaseInstance) == []


def test_a_refused_release_begins_the_idle_time_anew() -> None:
    w = world()
    (start,) = of(w.ask(), StartGroup)
    w.ready(start)
    (release,) = of(w.later(61.0), ReleaseInstance)
    busy = ErrorInfo("InstanceBusy", "a request is in flight")
    w.do(CommandRefused(release.command_id, HostId("h0"), start.plan.group_id, busy))
    assert of(w.later(58.0), ReleaseInstance) == []
    assert len(of(w.later(3.0), ReleaseInstance)) == 1


def test_a_thousand_idle_reports_leave_one_timer() -> None:
    w = world()
    (start,) = of(w.ask(), StartGroup)
    for i in range(1_000):
        w.said(start, InstanceState.READY, idle_since_wall_ms=i or None)
    assert len([t for t in w.timers if t.kind is TimerKind.KEEP_ALIVE]) == 1


def test_min_instances_are_started_without_demand_and_outlive_their_keep_alive() -> None:
    w = world(facts=hello())
    starts = of(w.do(ActionSeen(chat(min_instances=1))), InspectModelOn)
    assert len(starts) == 1
    (start,) = of(w.do(ModelInspected("s3://m", HostId("h0"), FACTS)), StartGroup)
    w.ready(start)
    assert of(w.later(600.0), ReleaseInstance) == []


def test_the_minimum_of_a_function_is_kept_as_well_and_a_lower_one_lets_go() -> None:
    w = world(facts=hello())
    (start,) = of(w.do(ActionSeen(hello(min_instances=1), changed=True)), StartGroup)
    w.ready(start)
    assert of(w.later(600.0), ReleaseInstance) == []
    assert len(of(w.do(ActionSeen(hello(), changed=True)), ReleaseInstance)) == 1, "of the same version"


def served_at_once(w: World, n: int) -> list[Decision]:
    """Send requests that are queued and find a slot before the scheduler reads about them."""
    asked = [w.request(CHAT) for _ in range(n)]
    return w.do(*asked, *(DemandRemoved(a.activation_id, CHAT) for a in asked))


def busy_world(**facts: Any) -> World:
    """A world in which all slots of the only instance have been taken for a while."""
    w = llm_world(facts=chat(**facts))
    (start,) = of(w.ask(CHAT), StartGroup)
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
    w = llm_world()
    (start,) = of(w.ask(CHAT), StartGroup)
    w.later(2.0)
    w.ready(start)
    w.said(start, InstanceState.READY, slots=8, idle_since_wall_ms=1)
    asked = [w.request(CHAT) for _ in range(4)]
    assert of(w.do(*asked), StartGroup) == []  # eight slots are free
    w.said(start, InstanceState.READY, slots=8, inflight=8)
    decided = [w.do(DemandRemoved(a.activation_id, CHAT)) for a in asked]
    assert [len(of(d, StartGroup)) for d in decided] == [0, 0, 0, 1]


def test_a_full_window_starts_no_more_than_max_instances() -> None:
    w = busy_world(max_instances=2)
    assert len(of(served_at_once(w, 40), StartGroup)) == 1


def test_a_full_window_starts_nothing_beside_idle_instances() -> None:
    w = llm_world()
    (start,) = of(w.ask(CHAT), StartGroup)
    w.ready(start)
    w.said(start, InstanceState.READY, slots=8, idle_since_wall_ms=1)
    w.later(2.0)
    assert of(served_at_once(w, 8), StartGroup) == []


def test_a_full_window_evicts_nobody_and_does_not_wait_in_line() -> None:
    w = busy_world(need_bytes=3000 * MIB)
    (other,) = of(w.do(ActionSeen(hello(need_bytes=1000 * MIB))) + w.ask(), StartGroup)
    w.ready(other)
    w.later(2.0)
    decided = served_at_once(w, 9)
    assert of(decided, StartGroup) + of(decided, ReleaseInstance) == []
    assert CHAT not in w.view.blocked


def test_a_start_that_failed_is_not_repeated_for_requests_that_are_only_foretold() -> None:
    w = llm_world()
    (start,) = of(w.ask(CHAT), StartGroup)
    decided = w.said(start, InstanceState.GONE, error=ErrorInfo("InitFailed", "bad weights"))
    decided += served_at_once(w, 9) + w.later(5.0)
    assert of(decided, StartGroup) == []


def test_a_new_version_releases_idle_instances_of_the_old_one_and_starts_its_own() -> None:
    w = world()
    (start,) = of(w.ask(), StartGroup)
    w.ready(start)
    (release,) = of(w.do(ActionSeen(hello(version="2"), changed=True)), ReleaseInstance)
    assert release.reason == "outdated"
    (new,) = of(w.ask(), StartGroup)
    assert new.plan.action_version == "2"


def test_a_deleted_action_releases_all_and_its_requests_are_not_found() -> None:
    w = world()
    (first,) = of(w.ask(), StartGroup)
    w.ready(first)
    (second,) = of(w.ask() + w.later(1.1), StartGroup)
    decided = w.do(ActionDeleted(HELLO))
    assert [r.instance_id for r in of(decided, ReleaseInstance)] == [first.stages[0].instance_id]
    assert [f.error.code for f in of(decided, FailDemand)] == ["NotFound"]
    (release,) = of(w.ready(second), ReleaseInstance)
    assert release.instance_id == second.stages[0].instance_id


def test_nothing_of_a_deleted_action_stays_behind_its_last_instance() -> None:
    w = world()
    (start,) = of(w.ask(), StartGroup)
    w.ready(start)
    w.do(ActionDeleted(HELLO))
    w.said(start, InstanceState.GONE)
    assert HELLO not in w.view.actions
    w.do(ActionDeleted(ActionName("guest/never")))
    assert w.view.actions == {}


def test_what_was_learned_of_an_action_and_of_its_model_is_forgotten_when_it_is_deleted() -> None:
    w = llm_world()
    other = chat(name=ActionName("guest/other"))
    w.do(ActionSeen(other))
    for name in (CHAT, other.name):
        w.view.history.update(name, "cpu", StartMode.COLD, Measured(t_cc=1.0))
    assert of(w.do(ActionDeleted(CHAT)), Forget) == [Forget((f"{CHAT}|cpu|cold",), ())]
    assert of(w.do(ActionDeleted(other.name)), Forget) == [Forget((f"{other.name}|cpu|cold",), (FACTS.uri,))]
    assert w.view.history.learned("*", "cpu", StartMode.COLD).times.t_cc == 1.0


def test_a_successor_forgets_what_was_learned_of_actions_that_are_not_there() -> None:
    w = World()
    for name in (CHAT, HELLO):
        w.view.history.update(name, "cpu", StartMode.COLD, Measured(t_cc=1.0))
    decided = w.do(_rebuilt(models=(FACTS,)))
    assert of(decided, Forget) == [Forget((f"{CHAT}|cpu|cold",), (FACTS.uri,))]


def test_a_start_that_makes_progress_is_never_given_up() -> None:
    w = llm_world(start_deadline_s=10.0)
    (start,) = of(w.ask(CHAT), StartGroup)
    for done in range(1, 6):
        w.do(HostsSeen((report(fetches=(FetchReport(start.plan.group_id, 10, done, 1.0),)),)))
        assert of(w.later(9.0), CancelGroup) == []
    decided = w.later(2.0)
    assert [c.group_id for c in of(decided, CancelGroup)] == [start.plan.group_id]


def test_a_developer_error_fails_all_that_wait_and_is_not_retried() -> None:
    w = llm_world()
    (start,) = of(w.ask(CHAT), StartGroup)
    w.ask(CHAT)
    decided = w.said(start, InstanceState.GONE, error=ErrorInfo("InitFailed", "boom"))
    assert [f.activation_ids for f in of(decided, FailDemand)] == [("a0", "a1")]
    assert of(w.later(100.0), StartGroup) == []


@pytest.mark.parametrize("code", ["ModelCorrupt", "ModelNotFound", "ModelUnsupported"])
def test_after_a_start_that_failed_for_its_model_the_next_request_looks_at_the_model_again(code: str) -> None:
    w = llm_world()
    (start,) = of(w.ask(CHAT), StartGroup)
    assert of(w.said(start, InstanceState.GONE, error=ErrorInfo(code, "damaged")), FailDemand)
    assert [i.uri for i in of(w.ask(CHAT), InspectModelOn)] == ["s3://m"]


def test_a_model_that_changed_under_a_start_is_looked_at_and_started_anew_for_the_same_request() -> None:
    w = llm_world()
    (start,) = of(w.ask(CHAT), StartGroup)
    assert of(w.said(start, InstanceState.GONE, error=ErrorInfo("ModelChanged", "another version")), FailDemand) == []
    assert [i.uri for i in of(w.later(1.0), InspectModelOn)] == ["s3://m"]
    (again,) = of(w.do(ModelInspected("s3://m", HostId("h0"), replace(FACTS, sha256="bb"))), StartGroup)
    assert again.plan.model is not None
    assert again.plan.model.sha256 == "bb"
    assert again.activation_ids == ("a0",)


def test_a_platform_error_is_retried_with_growing_pauses_three_times() -> None:
    w = world()
    starts, failed, at = of(w.ask(), StartGroup), list[FailDemand](), [w.now]
    while not failed:
        failed = of(w.said(starts[-1], InstanceState.GONE, error=ErrorInfo("WorkerLost", "x")), FailDemand)
        while not failed and not (more := of(w.later(0.05), StartGroup)):
            assert w.now < 200
        if not failed:
            starts += more
            at.append(w.now)
    assert len(starts) == 3
    assert failed[0].activation_ids == ("a0",)
    assert at[1] - at[0] < at[2] - at[1]


def test_a_model_is_inspected_once_for_many_requests_and_again_after_an_update() -> None:
    w = world(facts=chat())
    assert len([i for _ in range(3) for i in of(w.ask(CHAT), InspectModelOn)]) == 1
    assert len(of(w.do(ModelInspected("s3://m", HostId("h0"), FACTS)), StartGroup)) == 1
    assert len(of(w.do(ActionSeen(chat(version="2"), changed=True)), InspectModelOn)) == 1


def test_a_model_that_does_not_exist_fails_the_requests_and_is_looked_up_again_for_the_next() -> None:
    w = world(facts=chat())
    w.ask(CHAT)
    error = ErrorInfo("ModelNotFound", "no such bucket")
    assert [f.error for f in of(w.do(ModelInspected("s3://m", HostId("h0"), None, error)), FailDemand)] == [error]
    assert len(of(w.ask(CHAT), InspectModelOn)) == 1


def test_an_inspection_that_nobody_answers_is_asked_again_until_the_request_has_no_time_left() -> None:
    w = world(facts=chat(timeout_s=100.0))
    w.ask(CHAT)
    decided = w.later(200.0)
    assert len(of(decided, InspectModelOn)) == 3
    assert [f.error.code for f in of(decided, FailDemand)] == ["StoreUnavailable"]


def test_a_worker_killed_while_it_starts_is_replaced_and_a_minimum_is_kept() -> None:
    """The minimum is kept without a request too.  Only a developer's error makes the scheduler give it up."""
    w = llm_world(facts=chat(min_instances=1))
    for n in range(1, 6):
        (group,) = w.view.groups.values()
        record = w.view.instances[group.instance_ids[0]].record
        error = ErrorInfo("WorkerLost", "the engine process was killed by SIGKILL while it started")
        decided = w.do(InstanceChanged(replace(record, state=InstanceState.GONE, error=error)))
        (flag,) = of(decided, Flag)
        assert flag.name == "start_failed"
        assert (flag.fields["code"], flag.fields["in_a_row"]) == ("WorkerLost", n)
        assert len(of(w.later(60.0), StartGroup)) == 1, "the minimum was given up"


def test_what_is_larger_than_every_device_is_refused_with_both_numbers() -> None:
    w = world(facts=hello(need_bytes=5000 * MIB))
    (failed,) = of(w.ask(), FailDemand)
    assert failed.error.code == "MemoryTooSmall"
    assert "5000 MiB" in failed.error.message
    assert "4096 MiB" in failed.error.message


def test_without_any_host_a_request_waits_for_one() -> None:
    w = World()
    w.do(ActionSeen(hello()))
    assert of(w.ask(), StartGroup) == []
    assert len(of(w.do(HostsSeen((report(),))), StartGroup)) == 1


def test_the_longest_idle_instance_of_another_action_is_evicted_for_room() -> None:
    w = world(report(memory_mb=512), facts=hello())
    first, second = of(w.ask(), StartGroup), of(w.ask(), StartGroup)
    w.ready(first[0])
    w.now += 1
    w.ready(second[0])
    other = replace(hello(), name=ActionName("guest/other"))
    w.do(ActionSeen(other))
    (release,) = of(w.ask(other.name), ReleaseInstance)
    assert (release.instance_id, release.reason) == (first[0].stages[0].instance_id, "memory")
    assert of(w.later(1.5), ReleaseInstance) == []
    (start,) = of(w.said(first[0], InstanceState.GONE), StartGroup)
    assert start.plan.action == other.name


def test_an_eviction_whose_refusal_was_lost_is_asked_for_again() -> None:
    w = world(report(memory_mb=256), facts=hello(need_bytes=256 * MIB))
    (start,) = of(w.ask(), StartGroup)
    w.ready(start)
    other = replace(hello(need_bytes=256 * MIB), name=ActionName("guest/other"))
    w.do(ActionSeen(other))
    assert len(of(w.ask(other.name), ReleaseInstance)) == 1
    w.said(start, InstanceState.READY, inflight=1)  # it was busy after all, and it sent nothing else
    w.said(start, InstanceState.READY, idle_since_wall_ms=2)
    assert of(w.later(55.0), ReleaseInstance) == []
    again = of(w.later(10.0), ReleaseInstance)
    assert [(r.instance_id, r.reason) for r in again] == [(start.stages[0].instance_id, "memory")]


def test_busy_and_starting_instances_are_never_evicted() -> None:
    w = world(report(memory_mb=512), facts=hello())
    (busy,), (_starting,) = of(w.ask(), StartGroup), of(w.ask(), StartGroup)
    w.ready(busy, idle=False)
    other = replace(hello(), name=ActionName("guest/other"))
    w.do(ActionSeen(other))
    assert of(w.ask(other.name) + w.later(30.0), ReleaseInstance) == []


def test_memory_that_a_host_says_is_used_by_others_is_not_promised() -> None:
    w = world(report(memory_mb=512, used_mb=300))
    assert of(w.ask(), StartGroup) == []
    assert len(of(w.do(HostsSeen((report(memory_mb=512),))), StartGroup)) == 1


def test_a_report_older_than_a_decision_does_not_free_what_was_just_promised() -> None:
    w = world(report(memory_mb=512))
    w.ask()
    w.ask()
    w.do(HostsSeen((report(memory_mb=512),)))
    assert of(w.ask(), StartGroup) == []


def test_a_lost_hosts_instances_are_forgotten_and_its_requests_go_elsewhere() -> None:
    w = world(report("h0"), report("h1"))
    (start,) = of(w.ask(), StartGroup)
    decided = w.do(HostsSeen((report("h1"),)))
    assert [f.record.error.code for f in of(decided, ForgetInstance) if f.record.error] == ["WorkerLost"]
    (again,) = of(decided, StartGroup)
    assert (again.plan.stages[0].host, again.activation_ids) == ("h1", start.activation_ids)


def test_the_requests_of_a_dead_gateway_are_dropped() -> None:
    w = world()
    w.ask(gateway="dead")
    w.ask(gateway="alive")
    dropped = of(w.do(GatewaysLost(frozenset({GatewayId("dead")}))), DropDemand)
    assert [(d.activation_id, d.gateway) for d in dropped] == [("a0", "dead")]


def test_a_request_that_another_gateway_took_over_is_not_dropped_with_the_first() -> None:
    """The message of the gateway that holds the request now comes before the message that the first gateway is lost."""
    w = world()
    w.ask(gateway="dead")
    (held,) = w.view.demand.values()
    assert of(w.do(replace(held.demand, gateway=GatewayId("heir"))), StartGroup) == []
    assert of(w.do(GatewaysLost(frozenset({GatewayId("dead")}))), DropDemand) == []
    assert [d.gateway for d in of(w.do(GatewaysLost(frozenset({GatewayId("heir")}))), DropDemand)] == ["heir"]


def test_a_request_that_outlives_its_time_limit_is_held_by_nobody_and_keeps_no_instance() -> None:
    w = world(facts=hello(timeout_s=300.0))
    demand = DemandAdded(ActivationId("left"), HELLO, Namespace("guest"), GatewayId("g"), 0)
    started, dropped, released = 0, list[DropDemand](), list[ReleaseInstance]()
    decided = w.do(demand)
    for at_s in range(700):
        assert (dropped != []) is (at_s > 200 + 390)
        if at_s == 200:
            decided += w.do(replace(demand, waited_ms=200_000))  # its gateway reports again that it holds the request
        for start in of(decided, StartGroup):
            started += 1
            w.said(start, InstanceState.READY, idle_since_wall_ms=1)  # but no message says that the request was served
        dropped += of(decided, DropDemand)
        released += of(decided, ReleaseInstance)
        decided = w.later(1.0)
    assert dropped == [DropDemand(HELLO, demand.activation_id, demand.gateway)]
    assert len({r.instance_id for r in released}) == started == 8


@pytest.mark.parametrize("link", [0.0, -5.0, float("nan"), float("inf")])
def test_a_host_that_reports_nonsense_is_clamped_and_flagged_and_still_used(link: float) -> None:
    odd = report(network_bytes_per_s=link, devices=(Device("cpu", "cpu", 4096 * MIB, 9000 * MIB),))
    w = World()
    flags = of(w.do(HostsSeen((odd,))), Flag)
    assert {f.name for f in flags} == {"host_report_clamped"}
    w.do(ActionSeen(chat()))
    w.do(ModelInspected("s3://m", HostId("h0"), FACTS))
    assert len(of(w.ask(CHAT), StartGroup)) == 1


def test_a_host_whose_clock_goes_back_is_flagged() -> None:
    w = world(report(seen_wall_ms=5_000))
    (flag,) = of(w.do(HostsSeen((report(seen_wall_ms=1_000),))), Flag)
    assert "clock went back 4000 ms" in str(flag.fields["what"])


def test_a_slow_link_gives_a_fallback_plan_without_a_deadline_and_a_fast_one_a_deadline() -> None:
    t_p = 1.5 * FACTS.weight_bytes / 13_476_839_424  # the paper's prefill, scaled by the bytes that it reads
    slow = llm_world(report(network_bytes_per_s=1e6))
    (start,) = of(slow.ask(CHAT), StartGroup)
    assert start.plan.stages[0].fetch_deadline_ms is None
    assert start.plan.predicted_ttft_s == pytest.approx(100 * MIB / 1e6 + t_p + 0.005)
    fast = llm_world(report(network_bytes_per_s=1e9))
    (start,) = of(fast.ask(CHAT), StartGroup)
    assert start.plan.stages[0].fetch_deadline_ms == int(7_500 - (t_p + 0.005) * 1000)


def _rebuilt(**fields: Any) -> Rebuilt:
    plain: dict[str, Any] = {
        "wall_ms": 10_000,
        "hosts": (report(),),
        "instances": (),
        "demand": (),
        "plans": (),
        "models": (),
        "actions": (hello(),),
    }
    return Rebuilt(**{**plain, **fields})


def _plan_of(group: str) -> Plan:
    (start,) = of(world().ask(), StartGroup)
    return replace(start.plan, group_id=GroupId(group))


def test_a_successor_adopts_what_is_ready_and_counts_its_idle_time_from_the_record() -> None:
    (start,) = of(world().ask(), StartGroup)
    w = World()
    ready = record_of(start, InstanceState.READY, idle_since_wall_ms=0)
    w.timers += of(w.do(_rebuilt(instances=(ready,))), Wake)
    assert of(w.later(49.0), ReleaseInstance) == []
    assert len(of(w.later(2.0), ReleaseInstance)) == 1


def test_a_successor_takes_an_unconfirmed_start_back_and_serves_its_request_anew() -> None:
    w = World()
    demand = DemandAdded(ActivationId("a9"), HELLO, Namespace("guest"), GatewayId("g"), 9_000)
    decided = w.do(_rebuilt(plans=(_plan_of("lost"),), demand=(demand,)))
    assert [c.group_id for c in of(decided, CancelGroup)] == ["lost"]
    assert [s.activation_ids for s in of(decided, StartGroup)] == [("a9",)]


def test_a_successor_waits_for_silent_hosts_before_it_calls_them_lost() -> None:
    (start,) = of(world().ask(), StartGroup)
    ready = record_of(start, InstanceState.READY, idle_since_wall_ms=10_000)
    w = World()
    assert of(w.do(_rebuilt(hosts=(), instances=(ready,))), ForgetInstance) == []
    w.now += 3
    assert of(w.do(HostsSeen(())), ForgetInstance) == []
    w.now += 4
    assert len(of(w.do(HostsSeen(())), ForgetInstance)) == 1


def test_a_successor_waits_for_silent_gateways_before_it_drops_what_they_hold() -> None:
    w = World()
    demand = DemandAdded(ActivationId("a9"), HELLO, Namespace("guest"), GatewayId("silent"), 9_000)
    w.do(_rebuilt(demand=(demand,)))
    lost = GatewaysLost(frozenset({GatewayId("silent")}))
    w.now += 5
    assert w.do(lost) == []
    w.now += 2
    assert [d.activation_id for d in of(w.do(lost), DropDemand)] == ["a9"]


steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "ready", "gone", "idle", "report", "wait", "lose", "join"]),
        st.integers(0, 5),
    ),
    max_size=60,
)
SIZES = [100, 300, 700]


def _play(plan: list[tuple[str, int]]) -> tuple[World, list[Decision]]:
    """Play a random history on two hosts, with three actions of different sizes."""
    names = [ActionName(f"guest/f{i}") for i in range(3)]
    w = World(report("h0", 1000), report("h1", 700))
    for name, mb in zip(names, SIZES, strict=True):
        w.do(ActionSeen(replace(hello(), name=name, need_bytes=mb * MIB)))
    live, started, decided = {"h0", "h1"}, list[StartGroup](), list[Decision]()
    for what, n in plan:
        now: list[Decision] = []
        known = [s for s in started if s.stages[0].instance_id in w.view.instances]
        if what == "ask":
            now = w.ask(names[n % 3])
        elif what in ("ready", "idle", "gone") and known:
            now = _tell(w, known[n % len(known)], what)
        elif what == "wait":
            now = w.later(n * 15.0)
        elif what in ("lose", "join", "report"):
            live = live - {f"h{n % 2}"} if what == "lose" else live | {f"h{n % 2}"} if what == "join" else live
            now = w.do(HostsSeen(tuple(_report_now(w, h) for h in sorted(live))))
        decided += now
        started += of(now, StartGroup)
        _never_overcommitted(w)
    return w, decided


def _tell(w: World, start: StartGroup, what: str) -> list[Decision]:
    if what == "ready":
        return w.ready(start)
    if what == "idle":
        return w.said(start, InstanceState.READY, idle_since_wall_ms=int(w.now * 1000))
    return w.said(start, InstanceState.GONE, error=ErrorInfo("WorkerLost", "x"))


def _report_now(w: World, host: str) -> HostReport:
    ids = tuple(sorted(w.view.on_host.get(HostId(host), set())))
    used = sum(w.view.instances[i].record.reserve_bytes for i in ids) // MIB
    return report(host, {"h0": 1000, "h1": 700}[host], used, instances=tuple(InstanceId(i) for i in ids))


def _never_overcommitted(w: World) -> None:
    for host in w.view.hosts.values():
        for device in host.devices.values():
            held = [w.view.instances[i].record for i in w.view.on_host.get(host.host_id, ())]
            assert device.reserved == sum(r.reserve_bytes for r in held)
            assert device.n_workers == len(held)
            assert device.reserved <= device.device.memory_bytes
            assert 0 <= device.releasing <= device.reserved


@settings(max_examples=150, deadline=None)
@given(plan=steps)
def test_no_device_is_ever_overcommitted(plan: list[tuple[str, int]]) -> None:
    _play(plan)


@settings(max_examples=50, deadline=None)
@given(plan=steps)
def test_the_same_events_give_the_same_decisions(plan: list[tuple[str, int]]) -> None:
    assert _play(plan)[1] == _play(plan)[1]


@settings(max_examples=100, deadline=None)
@given(plan=steps)
@example(plan=[("ask", 0), ("ready", 0), ("wait", 1), ("ask", 0), ("gone", 1), ("ask", 0), ("ready", 0)])
def test_whoever_waits_in_the_end_is_served_when_room_and_hosts_are_there(plan: list[tuple[str, int]]) -> None:
    w, _ = _play(plan)
    w.do(HostsSeen((_report_now(w, "h0"), _report_now(w, "h1"), report("h2", 10_000), report("h3", 10_000))))
    w.later(40.0)
    for name, action in w.view.actions.items():
        # a worker that is ready and idle takes a request without a decision of the scheduler
        slots = [i for i in w.view.of_action(name) if i.state in (InstanceState.STARTING, InstanceState.READY)]
        assert len(action.waiting) <= len(slots) or len(w.view.action(name).instances) >= 8


def test_after_a_restart_what_is_left_of_a_deleted_action_is_released_and_its_requests_are_not_found() -> None:
    (start,) = of(world().ask(), StartGroup)
    ready = record_of(start, InstanceState.READY, inflight=1)
    demand = DemandAdded(ActivationId("a9"), HELLO, Namespace("guest"), GatewayId("g"), 9_000)
    decided = World().do(_rebuilt(instances=(ready,), demand=(demand,), actions=()))
    assert [(r.instance_id, r.only_idle) for r in of(decided, ReleaseInstance)] == [(ready.instance_id, False)]
    assert [f.error.code for f in of(decided, FailDemand)] == ["NotFound"]


def test_models_go_to_an_accelerator_and_ordinary_functions_to_the_cpu_slice_beside_it() -> None:
    both = (Device("cpu", "cpu", 4096 * MIB, 4096 * MIB), Device("cuda:0", "H200", 8192 * MIB, 8192 * MIB))
    w = llm_world(report(devices=both))
    w.do(ActionSeen(hello()))
    assert of(w.ask(CHAT), StartGroup)[0].plan.stages[0].device == "cuda:0"
    assert of(w.ask(HELLO), StartGroup)[0].plan.stages[0].device == "cpu"


def test_a_request_that_moves_to_another_action_waits_there_alone() -> None:
    w = World()
    demand = DemandAdded(ActivationId("a"), CHAT, Namespace("guest"), GatewayId("g"), 0)
    w.view.add_demand(demand, 1.0)
    assert w.view.add_demand(replace(demand, action=HELLO), 2.0)
    assert [(name, list(w.view.action(name).waiting)) for name in (CHAT, HELLO)] == [(CHAT, []), (HELLO, ["a"])]
    assert w.view.demand[ActivationId("a")].queued_s == 1.0, "it keeps its age"
