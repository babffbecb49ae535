"""A pipeline becomes one worker: the moment of the request, the steps after it, and a successor scheduler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.scheduler.ablations import Parts
from gateway.scheduler.decisions import (
    CancelGroup,
    ConsolidateInstance,
    Decision,
    DropPlan,
    Flag,
    ForgetInstance,
    ReleaseInstance,
    RevokeCredential,
    RewritePlan,
    StartGroup,
    Wake,
)
from gateway.scheduler.events import ActionSeen, HostsSeen, Rebuilt
from gateway.scheduler.placement.plans import later_key
from gateway.scheduler.policy.consolidation import TRIES, folded
from gateway.scheduler.policy.groups import RELEASE_DEADLINE_S
from relay.protocol.messages import CommandRefused, ConsolidationFailed, DemandRemoved
from tests.scheduler.world import (
    CHAT,
    HELLO,
    MIB,
    SMOLLM2,
    World,
    chat,
    group_world,
    hello,
    of,
    pool,
    record_of,
    report,
)
from thaw.errors import ErrorInfo
from thaw.host import Resident
from thaw.ids import CommandId, HostId
from thaw.instance import InstanceState
from thaw.plan import Plan, PlanTransport, StageRole

GONE, READY = InstanceState.GONE, InstanceState.READY
LOST = ErrorInfo("WorkerLost", "killed")
AWAY = ErrorInfo("Unavailable", "not now")


def folding(n: int = 4, **fields: Any) -> Any:
    """An action whose pipelines of ``n`` leave one worker."""
    return chat(forced_stages=n, max_stages=8, **{"keep": 1, **fields})


def whole(w: World, *, idle: bool = False) -> tuple[StartGroup, list[Decision]]:
    """Return a group that has just become whole, and the decisions of that moment."""
    (start,) = of(w.ask(CHAT), StartGroup)
    decided: list[Decision] = []
    for stage in reversed(range(len(start.stages))):
        decided += w.said(start, READY, stage, idle_since_wall_ms=1 if idle else None, inflight=int(not idle))
    for activation in start.activation_ids:
        w.do(DemandRemoved(activation, CHAT))
    return start, decided


def asked(decided: list[Decision]) -> ConsolidateInstance:
    (found,) = of(decided, ConsolidateInstance)
    return found


def switched(w: World, start: StartGroup, **fields: Any) -> list[Decision]:
    """Let the scheduler hear that stage 0 has become one worker."""
    return w.said(start, READY, 0, **{"n_stages": 1, "slots": 8, "inflight": 1, **fields})


def failed(w: World, start: StartGroup, error: ErrorInfo = AWAY) -> list[Decision]:
    head = start.stages[0]
    return w.do(ConsolidationFailed(head.instance_id, head.host_id, start.plan.group_id, error))


def held(w: World) -> dict[HostId, int]:
    return {h.host_id: h.devices["cpu"].reserved for h in w.view.hosts.values() if h.devices["cpu"].reserved}


# asking ------------------------------------------------------------------------------------------------------------


def test_a_pipeline_that_is_whole_is_to_become_one_worker_at_once() -> None:
    w = group_world(facts=folding())
    start, decided = whole(w)
    ask = asked(decided)
    head = start.stages[0]
    assert (ask.host_id, ask.instance_id, ask.group_id) == (head.host_id, head.instance_id, start.plan.group_id)
    assert of(w.said(start, READY, 2), ConsolidateInstance) == []


def test_a_pipeline_whose_size_the_objective_chose_is_to_become_one_worker() -> None:
    w = group_world(facts=chat(slo_ttft_s=4.2, max_stages=4), stem_kinds=("llm:vllm",))
    start, decided = whole(w)
    assert len(start.stages) == 4
    assert asked(decided).instance_id == start.stages[0].instance_id


@pytest.mark.parametrize(
    "fields",
    [
        {"forced_stages": 1},
        {"keep": None},  # a size that was forced stays
        {"need_bytes": 8192 * MIB},  # no device holds the whole model, so every stage is low
    ],
    ids=["one stage", "forced", "low"],
)
def test_what_cannot_or_shall_not_become_one_worker_is_not_asked(fields: dict[str, Any]) -> None:
    w = group_world(facts=replace(folding(), **fields))
    assert of(whole(w)[1], ConsolidateInstance) == []


def test_a_policy_without_consolidation_asks_nobody() -> None:
    w = group_world(facts=folding())
    w.view.parts = Parts(consolidation=False)
    assert of(whole(w)[1], ConsolidateInstance) == []


def test_a_stage_0_for_whose_rest_its_pool_has_no_room_is_not_asked() -> None:
    w = group_world(facts=folding(), pool=pool(3))
    start, decided = whole(w)
    assert start.plan.stages[0].role is StageRole.FULL
    assert start.plan.stages[0].later_ranges == ()
    assert of(decided, ConsolidateInstance) == []


def test_a_group_of_which_a_stage_starts_still_is_not_asked() -> None:
    w = group_world(facts=folding())
    (start,) = of(w.ask(CHAT), StartGroup)
    assert [of(w.said(start, READY, k), ConsolidateInstance) for k in (0, 1, 3)] == [[], [], []]


def test_only_workers_that_may_stay_fetch_the_rest_of_the_model() -> None:
    w = group_world(n_hosts=8, facts=chat(max_stages=4, need_bytes=600 * MIB, slo_ttft_s=60.0))
    starts = of(w.burst(30), StartGroup)
    for start in starts:
        assert [s.role for s in start.plan.stages] == [StageRole.FULL] * 4
        assert [bool(s.later_ranges) for s in start.plan.stages] == [True] * 4  # the burst needs all of them
    w = group_world(n_hosts=8, facts=chat(max_stages=4, need_bytes=600 * MIB, slo_ttft_s=60.0, keep=2))
    (start, _) = of(w.burst(30), StartGroup)
    assert [bool(s.later_ranges) for s in start.plan.stages] == [True, True, False, False]


# failures ----------------------------------------------------------------------------------------------------------


def test_after_a_failure_it_is_asked_again_after_pauses_that_grow_and_in_the_end_stays_a_pipeline() -> None:
    w = group_world(facts=folding())
    start, decided = whole(w)
    pauses: list[float] = []
    for _ in range(TRIES - 1):
        asked(decided)
        (timer,) = of(failed(w, start), Wake)
        pauses.append(timer.at_s - w.now)
        decided = w.later(pauses[-1])
    asked(decided)
    assert pauses == [5.0, 10.0, 20.0, 40.0]
    (flag,) = of(failed(w, start), Flag)
    assert (flag.name, flag.fields["in_a_row"], flag.fields["stays_a_pipeline"]) == ("consolidation_failed", 5, True)
    assert of(w.later(7_200.0), ConsolidateInstance) == []
    assert len(w.view.groups) == 1


def test_an_engine_that_cannot_is_not_asked_again() -> None:
    w = group_world(facts=folding())
    start, _ = whole(w)
    w.stays_a_pipeline(start)
    assert of(w.later(7_200.0), ConsolidateInstance) == []


def test_a_refused_command_is_a_failure_and_one_of_another_group_is_not() -> None:
    w = group_world(facts=folding())
    ask = asked(whole(w)[1])
    w.do(CommandRefused(CommandId("another"), ask.host_id, ask.group_id, AWAY))
    assert of(w.later(100.0), ConsolidateInstance) == []
    w.do(CommandRefused(ask.command_id, ask.host_id, ask.group_id, AWAY))
    assert asked(w.later(5.0)).command_id != ask.command_id
    assert len(w.view.groups) == 1


def test_a_host_that_does_not_answer_is_asked_again_after_the_deadline() -> None:
    w = group_world(facts=folding())
    start, _ = whole(w)
    deadline_s = w.view.settings.consolidate_deadline_s
    assert of(w.later(deadline_s - 1.0), ConsolidateInstance) == []
    assert asked(w.later(1.0 + 5.0)).instance_id == start.stages[0].instance_id


def test_the_deadline_of_an_earlier_try_does_not_end_a_later_one() -> None:
    w = group_world(facts=folding())
    start, _ = whole(w)
    failed(w, start)
    asked(w.later(5.0))
    assert of(w.later(w.view.settings.consolidate_deadline_s - 1.0), Flag) == []
    assert len(of(w.later(1.0), Flag)) == 1


def test_a_failure_of_what_was_not_asked_changes_nothing() -> None:
    w = group_world(facts=folding())
    start, _ = whole(w)
    failed(w, start)
    assert failed(w, start) == []
    assert asked(w.later(5.0)).group_id == start.plan.group_id


def test_a_group_that_is_being_released_is_asked_only_if_it_stays_after_all() -> None:
    w = group_world(facts=folding())
    start, _ = whole(w, idle=True)
    failed(w, start)
    drained = {**w.reports, start.stages[1].host_id: replace(w.reports[start.stages[1].host_id], draining=True)}
    (release,) = of(w.do(HostsSeen(tuple(drained.values()))), ReleaseInstance)
    assert of(w.later(20.0), ConsolidateInstance) == []
    w.do(HostsSeen(tuple(w.reports.values())))
    w.do(CommandRefused(release.command_id, release.host_id, start.plan.group_id, AWAY))
    assert asked(w.later(10.0)).group_id == start.plan.group_id


def test_a_group_of_an_older_version_is_not_asked() -> None:
    w = group_world(facts=folding())
    start, _ = whole(w)
    failed(w, start)
    w.do(ActionSeen(folding(version="2")))
    assert of(w.later(60.0), ConsolidateInstance) == []
    assert start.plan.action_version == "1"


# the switch --------------------------------------------------------------------------------------------------------


def test_when_stage_0_is_one_worker_its_plan_is_rewritten_before_the_other_stages_are_released() -> None:
    w = group_world(facts=folding())
    start, _ = whole(w)
    decided = switched(w, start)
    rewritten, *releases = [d for d in decided if isinstance(d, RewritePlan | ReleaseInstance | RevokeCredential)]
    assert isinstance(rewritten, RewritePlan)
    first, plan = start.plan.stages[0], rewritten.plan
    assert plan.stages == (replace(first, layers=(0, 30)),)
    assert (plan.group_id, plan.transport, plan.keep) == (start.plan.group_id, PlanTransport(), 1)
    assert [(r.instance_id, r.host_id, r.only_idle, r.reason) for r in releases if isinstance(r, ReleaseInstance)] == [
        (s.instance_id, s.host_id, False, "consolidated") for s in start.stages[1:]
    ]
    assert len(releases) == 3
    assert (w.view.groups[plan.group_id].plan, w.view.groups[plan.group_id].slots) == (plan, 8)


def test_the_memory_of_the_other_stages_is_free_when_they_have_gone_and_the_worker_serves_on() -> None:
    w = group_world(facts=folding())
    start, _ = whole(w)
    switched(w, start)
    devices = {h.host_id: h.devices["cpu"] for h in w.view.hosts.values()}
    assert [devices[s.host].releasing for s in start.plan.stages] == [0, 256 * MIB, 256 * MIB, 256 * MIB]
    decided = [d for k in (3, 1) for d in w.said(start, GONE, k)]
    assert of(decided, RevokeCredential) == []
    decided = w.said(start, GONE, 2, error=LOST)
    assert [d.group_id for d in of(decided, RevokeCredential)] == [start.plan.group_id]
    assert of(decided, CancelGroup) == of(decided, DropPlan) == []
    assert held(w) == {start.plan.stages[0].host: 1024 * MIB}
    assert [d.releasing for d in devices.values()] == [0] * 4
    (group,) = w.view.groups.values()
    assert group.instance_ids == (start.stages[0].instance_id,)


def test_the_worker_ends_like_one_that_started_alone_and_nothing_is_left() -> None:
    w = group_world(facts=folding())
    start, _ = whole(w)
    switched(w, start)
    for k in (1, 2, 3):
        w.said(start, GONE, k)
    switched(w, start, inflight=0, idle_since_wall_ms=1)
    (release,) = of(w.later(61.0), ReleaseInstance)
    assert (release.instance_id, release.reason) == (start.stages[0].instance_id, "keep_alive")
    decided = w.said(start, GONE, 0, n_stages=1)
    assert of(decided, RevokeCredential) == of(decided, CancelGroup) == []
    assert len(of(decided, DropPlan)) == 1
    assert held(w) == {}
    assert (w.view.groups, w.view.instances) == ({}, {})
    assert [h.ledger.fetches() for h in w.view.hosts.values()] == [{}] * 4


def test_the_link_is_told_that_the_rest_of_the_model_has_arrived() -> None:
    w = group_world(facts=folding())
    start, _ = whole(w)
    ledger = w.view.hosts[start.plan.stages[0].host].ledger
    assert list(ledger.fetches()) == [later_key(start.plan.group_id, 0)]
    switched(w, start)
    assert ledger.fetches() == {}


def test_room_that_the_other_stages_leave_is_given_to_those_who_wait() -> None:
    w = group_world(n_hosts=4, facts=folding(need_bytes=4000 * MIB))
    start, _ = whole(w)
    w.do(ActionSeen(hello(need_bytes=3500 * MIB)))
    assert of(w.ask(HELLO), StartGroup) == []
    switched(w, start)
    (other,) = of(w.said(start, GONE, 2), StartGroup)
    assert other.plan.stages[0].host == start.plan.stages[2].host


def test_the_pools_of_the_other_hosts_are_free_again() -> None:
    w = group_world(facts=folding(), pool=pool(8))
    start, _ = whole(w)
    free = {h: v.pool.free_slabs() for h, v in w.view.hosts.items()}
    assert all(n < 8 for n in free.values())
    switched(w, start)
    for k in (1, 2, 3):
        w.said(start, GONE, k)
    first = start.plan.stages[0].host
    assert {h: v.pool.free_slabs() for h, v in w.view.hosts.items()} == {h: free[h] if h == first else 8 for h in free}


def test_more_requests_than_the_worker_has_slots_are_no_free_slots_and_a_new_one_gets_a_start() -> None:
    w = group_world(n_hosts=8, facts=folding(2))
    start, _ = whole(w)
    switched(w, start, inflight=14)
    w.later(5.0)
    assert len(of(w.ask(CHAT), StartGroup)) == 1


def test_an_idle_worker_is_evicted_for_its_own_memory_only() -> None:
    w = group_world(n_hosts=2, facts=folding(2, need_bytes=2000 * MIB))
    start, _ = whole(w)
    switched(w, start, inflight=0, idle_since_wall_ms=1)
    left = start.plan.stages[1].host
    assert [where for where, _ in w.view.idle.releasing(for_model=True)] == [(left, "cpu")]
    w.said(start, GONE, 1)
    w.do(ActionSeen(hello(need_bytes=3500 * MIB)))
    (other,) = of(w.ask(HELLO), StartGroup)
    assert other.plan.stages[0].host == left
    assert [r.reason for r in of(w.ask(HELLO), ReleaseInstance)] == ["memory"]


# stages that are left behind ---------------------------------------------------------------------------------------


def test_the_release_of_a_stage_that_is_left_behind_is_sent_again_until_its_host_does_not_have_it() -> None:
    w = group_world(facts=folding(2))
    start, _ = whole(w)
    switched(w, start)
    left = start.stages[1]
    here = replace(w.reports[left.host_id], instances=(left.instance_id,))
    w.do(HostsSeen(tuple({**w.reports, left.host_id: here}.values())))
    (again,) = of(w.later(RELEASE_DEADLINE_S), ReleaseInstance)
    assert (again.instance_id, again.only_idle) == (left.instance_id, False)
    refused = CommandRefused(again.command_id, again.host_id, start.plan.group_id, AWAY)
    assert w.do(refused) == []
    w.do(HostsSeen(tuple(w.reports.values())))
    decided = w.later(RELEASE_DEADLINE_S)
    assert [f.record.instance_id for f in of(decided, ForgetInstance)] == [left.instance_id]
    assert len(of(decided, RevokeCredential)) == 1
    assert of(decided, CancelGroup) == []
    assert len(w.view.groups) == 1


def test_a_release_of_the_worker_that_is_refused_keeps_no_stage_that_is_left_behind() -> None:
    w = group_world(facts=folding(2, keep_alive_s=1.0))
    start, _ = whole(w)
    switched(w, start, inflight=0, idle_since_wall_ms=1, keep_alive_s=1.0)
    (release,) = [r for r in of(w.later(2.0), ReleaseInstance) if r.reason == "keep_alive"]
    w.do(CommandRefused(release.command_id, release.host_id, start.plan.group_id, AWAY))
    devices = {h.host_id: h.devices["cpu"] for h in w.view.hosts.values()}
    assert [devices[s.host].releasing for s in start.plan.stages] == [0, 512 * MIB]


def test_a_host_that_is_lost_with_a_stage_that_is_left_behind_ends_nothing() -> None:
    w = group_world(facts=folding(2))
    start, _ = whole(w)
    switched(w, start)
    lost = start.stages[1].host_id
    decided = w.do(HostsSeen(tuple(r for h, r in w.reports.items() if h != lost)))
    assert of(decided, CancelGroup) == of(decided, DropPlan) == []
    assert len(of(decided, RevokeCredential)) == len(of(decided, ForgetInstance)) == 1
    assert held(w) == {start.stages[0].host_id: 1024 * MIB}


def test_a_host_that_is_drained_with_a_stage_that_is_left_behind_leaves_the_worker_alone() -> None:
    w = group_world(facts=folding(2))
    start, _ = whole(w)
    switched(w, start)
    there = start.stages[1].host_id
    drained = {**w.reports, there: replace(w.reports[there], draining=True)}
    assert of(w.do(HostsSeen(tuple(drained.values()))), ReleaseInstance) == []


def test_the_end_of_the_worker_before_the_others_revokes_its_credential_and_keeps_them_leaving() -> None:
    w = group_world(facts=folding(3))
    start, _ = whole(w)
    switched(w, start)
    decided = w.said(start, GONE, 0, n_stages=1, error=LOST)
    kinds = [type(d) for d in decided if isinstance(d, RevokeCredential | DropPlan)]
    assert kinds == [RevokeCredential, DropPlan]
    for k in (1, 2):
        assert of(w.said(start, GONE, k), RevokeCredential) == []
    assert (w.view.groups, w.view.instances, held(w)) == ({}, {}, {})


def test_a_late_word_of_a_stage_that_is_left_behind_ends_nothing() -> None:
    w = group_world(facts=folding(2))
    start, _ = whole(w)
    switched(w, start)
    assert w.said(start, READY, 1) == []
    assert len(w.view.groups) == 1


def test_the_refused_release_of_a_worker_is_its_own_though_a_stage_that_leaves_is_on_its_host() -> None:
    w = group_world(n_hosts=1, facts=folding(2, keep_alive_s=1.0))
    while w.view.new_id() != "id6":  # then the worker is id9, and the other stage id11 comes before it
        pass
    start, _ = whole(w)
    assert start.stages[0].instance_id > start.stages[1].instance_id
    switched(w, start, inflight=0, idle_since_wall_ms=1, keep_alive_s=1.0)
    (release,) = [r for r in of(w.later(2.0), ReleaseInstance) if r.reason == "keep_alive"]
    w.do(CommandRefused(release.command_id, release.host_id, start.plan.group_id, AWAY))
    releasing = {m.record.stage: m.releasing is not None for m in w.view.members(start.plan.group_id)}
    assert releasing == {0: False, 1: True}


def test_a_worker_whose_group_was_given_up_before_its_word_came_serves_by_itself() -> None:
    """A stage dies after the switch, and the scheduler hears of that first.  The host ends no worker that switched."""
    w = group_world(facts=folding(2))
    start, _ = whole(w)
    assert len(of(w.said(start, GONE, 1, error=LOST), CancelGroup)) == 1
    assert of(switched(w, start), CancelGroup) == []
    head = w.view.instances[start.stages[0].instance_id]
    assert (head.releasing, w.view.action(CHAT).n_serving) == (None, 1)
    assert w.view.hosts[start.stages[0].host_id].devices["cpu"].releasing == 0
    switched(w, start, inflight=0, idle_since_wall_ms=1)
    assert [r.reason for r in of(w.later(120.0), ReleaseInstance)] == ["keep_alive"]


def test_a_pipeline_that_loses_a_stage_before_the_switch_ends_as_a_whole() -> None:
    w = group_world(facts=folding(2))
    start, _ = whole(w)
    w.said(start, GONE, 1, error=LOST)
    w.said(start, GONE, 0, error=LOST)
    assert of(w.later(7_200.0), ConsolidateInstance) == []
    assert start.plan.group_id not in w.view.groups


# an idle group -----------------------------------------------------------------------------------------------------


def test_an_idle_group_gives_way_to_a_successor_only_when_it_stays_a_pipeline() -> None:
    w = group_world(facts=chat(slo_ttft_s=7.5, max_stages=4))
    start, _ = whole(w, idle=True)
    there = (Resident("s3://m", SMOLLM2.n_bytes),)
    first = start.plan.stages[0].host
    w.do(HostsSeen(tuple(replace(r, resident=there if r.host_id == first else ()) for r in w.reports.values())))
    assert of(w.later(20.0), ReleaseInstance) == []
    w.stays_a_pipeline(start)
    assert [r.reason for r in of(w.later(3.0), ReleaseInstance)] == ["successor"]


# another scheduler -------------------------------------------------------------------------------------------------


def rebuilt(start: StartGroup, *records: Any, plan: Plan | None = None, **fields: Any) -> Rebuilt:
    plain: dict[str, Any] = {
        "wall_ms": 10_000,
        "hosts": tuple(report(f"h{i}") for i in range(4)),
        "instances": records,
        "demand": (),
        "plans": (plan or start.plan,),
        "models": (SMOLLM2,),
        "actions": (folding(),),
        "credentials": (start.plan.group_id,),
    }
    return Rebuilt(**{**plain, **fields})


def successor() -> World:
    return World(ids="s", relay_url="redis://relay:6379/0")


def records(start: StartGroup, *stages: int, has_switched: bool = False) -> list[Any]:
    """Return the registry's records of these stages."""
    one = {"n_stages": 1, "slots": 8}
    return [record_of(start, READY, k, inflight=1, **(one if has_switched and k == 0 else {})) for k in stages]


@pytest.fixture
def start() -> StartGroup:
    return whole(group_world(facts=folding()))[0]


def undone(decided: list[Decision]) -> list[Decision]:
    return [*of(decided, CancelGroup), *of(decided, DropPlan)]


def test_a_successor_asks_a_whole_pipeline_again(start: StartGroup) -> None:
    w = successor()
    decided = w.do(rebuilt(start, *records(start, 0, 1, 2, 3)))
    assert asked(decided).instance_id == start.stages[0].instance_id
    assert undone(decided) == of(decided, RevokeCredential) == []


def test_a_successor_asks_a_pipeline_that_starts_still_when_it_is_whole(start: StartGroup) -> None:
    w = successor()
    starting = record_of(start, InstanceState.STARTING, 3)
    assert of(w.do(rebuilt(start, *records(start, 0, 1, 2), starting)), ConsolidateInstance) == []
    assert asked(w.said(start, READY, 3)).instance_id == start.stages[0].instance_id


def test_a_successor_releases_a_stage_that_was_left_behind_and_that_it_hears_of_late(start: StartGroup) -> None:
    w = successor()
    w.do(rebuilt(start, *records(start, 0, has_switched=True)))
    (release,) = of(w.said(start, READY, 2), ReleaseInstance)
    assert (release.instance_id, release.reason) == (start.stages[2].instance_id, "consolidated")
    assert len(of(w.said(start, GONE, 2), RevokeCredential)) == 1


def test_a_successor_that_finds_one_worker_with_the_plan_of_a_pipeline_rewrites_it_and_releases_the_others(
    start: StartGroup,
) -> None:
    w = successor()
    decided = w.do(rebuilt(start, *records(start, 0, 1, 2, 3, has_switched=True)))
    done = [d for d in decided if isinstance(d, RewritePlan | ReleaseInstance)]
    assert [type(d) for d in done] == [RewritePlan, ReleaseInstance, ReleaseInstance, ReleaseInstance]
    assert of(decided, RewritePlan)[0].plan == folded(start.plan)
    assert undone(decided) == of(decided, RevokeCredential) == of(decided, ConsolidateInstance) == []
    for k in (1, 2):
        assert of(w.said(start, GONE, k), RevokeCredential) == []
    assert len(of(w.said(start, GONE, 3), RevokeCredential)) == 1
    assert held(w) == {start.stages[0].host_id: 1024 * MIB}


def test_a_successor_does_not_miss_stages_that_one_worker_left_behind(start: StartGroup) -> None:
    w = successor()
    decided = w.do(rebuilt(start, *records(start, 0, 2, has_switched=True)))
    assert [r.instance_id for r in of(decided, ReleaseInstance)] == [start.stages[2].instance_id]
    assert undone(decided) == []


@pytest.mark.parametrize("left", [(1, 2, 3), (3,)])
def test_a_successor_releases_what_was_left_behind_when_the_plan_was_rewritten(
    start: StartGroup, left: tuple[int, ...]
) -> None:
    w = successor()
    decided = w.do(rebuilt(start, *records(start, 0, *left, has_switched=True), plan=folded(start.plan)))
    assert [r.instance_id for r in of(decided, ReleaseInstance)] == [start.stages[k].instance_id for k in left]
    assert of(decided, RewritePlan) == undone(decided) == of(decided, RevokeCredential) == []


@pytest.mark.parametrize("is_rewritten", [True, False])
def test_a_successor_revokes_the_credential_of_a_worker_whose_pipeline_has_gone(
    start: StartGroup, *, is_rewritten: bool
) -> None:
    w = successor()
    plan = folded(start.plan) if is_rewritten else start.plan
    decided = w.do(rebuilt(start, *records(start, 0, has_switched=True), plan=plan))
    assert [d.group_id for d in of(decided, RevokeCredential)] == [start.plan.group_id]
    assert undone(decided) == []
    assert len(w.view.groups) == 1


def test_a_successor_that_finds_only_what_a_worker_left_behind_ends_it(start: StartGroup) -> None:
    w = successor()
    decided = w.do(rebuilt(start, *records(start, 1, 3), plan=folded(start.plan)))
    assert {c.host_id for c in of(decided, CancelGroup)} == {start.stages[k].host_id for k in (0, 1, 3)}
    assert len(of(decided, RevokeCredential)) == len(of(decided, DropPlan)) == 1


def test_a_worker_by_itself_keeps_its_claim_on_the_pool_under_a_successor(start: StartGroup) -> None:
    w = successor()
    hosts = tuple(report(f"h{i}", pool=pool(8)) for i in range(4))
    w.do(rebuilt(start, *records(start, 0, has_switched=True), plan=folded(start.plan), hosts=hosts))
    host = w.view.hosts[start.stages[0].host_id]
    assert start.stages[0].instance_id in host.pool._claims
