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
from gateway.scheduler.placement.plans import later_key
from gateway.scheduler.policy.consolidation import TRIES, folded
from gateway.scheduler.policy.groups import RELEASE_DEADLINE_S
from relay.protocol.messages import CommandRefused, ConsolidationFailed
from tests.scheduler.facts import CHAT, HELLO, LOST, MIB, READY, SMOLLM2, STARTING, chat, forced, hello, pool, report
from tests.scheduler.groups import FOLDING, group_world, held, nothing_is_left, one_worker, switched, taken_over, whole
from tests.scheduler.world import World, of, record_of, starting
from thaw.errors import ErrorInfo
from thaw.host import Resident
from thaw.ids import CommandId
from thaw.instance import InstanceRecord
from thaw.plan import PlanTransport, StageRole

AWAY = ErrorInfo("Unavailable", "not now")
TWO, SHORT = forced(2, keep=1), forced(2, keep=1, keep_alive_s=1.0)
IDLE = {"inflight": 0, "idle_since_wall_ms": 1}


def asked(decided: list[Decision]) -> ConsolidateInstance:
    (found,) = of(decided, ConsolidateInstance)
    return found


def failed(w: World, start: StartGroup, error: ErrorInfo = AWAY) -> list[Decision]:
    head = start.stages[0]
    return w.do(ConsolidationFailed(head.instance_id, head.host_id, start.plan.group_id, error))


# asking ------------------------------------------------------------------------------------------------------------


def test_a_pipeline_that_is_whole_is_to_become_one_worker_at_once() -> None:
    w, start, decided = whole()
    ask = asked(decided)
    head = start.stages[0]
    assert (ask.host_id, ask.instance_id, ask.group_id) == (head.host_id, head.instance_id, start.plan.group_id)
    assert of(w.said(start, READY, 2), ConsolidateInstance) == []


def test_a_pipeline_whose_size_the_objective_chose_is_to_become_one_worker() -> None:
    _, start, decided = whole(chat(slo_ttft_s=4.2, max_stages=4), stem_kinds=("llm:vllm",))
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
    assert of(whole(replace(FOLDING, **fields))[2], ConsolidateInstance) == []


def test_a_policy_without_consolidation_asks_nobody() -> None:
    w = group_world(facts=FOLDING)
    w.view.parts = Parts(consolidation=False)
    assert of(w.ready(w.started()), ConsolidateInstance) == []


def test_a_stage_0_for_whose_rest_its_pool_has_no_room_is_not_asked() -> None:
    _, start, decided = whole(pool=pool(3))
    assert (start.plan.stages[0].role, start.plan.stages[0].later_ranges) == (StageRole.FULL, ())
    assert of(decided, ConsolidateInstance) == []


def test_a_group_of_which_a_stage_starts_still_is_not_asked() -> None:
    w, start = starting(group_world(facts=FOLDING))
    assert [of(w.said(start, READY, k), ConsolidateInstance) for k in (0, 1, 3)] == [[], [], []]


def test_only_workers_that_may_stay_fetch_the_rest_of_the_model() -> None:
    facts = chat(max_stages=4, need_bytes=600 * MIB, slo_ttft_s=60.0)
    for start in of(group_world(n_hosts=8, facts=facts).burst(30), StartGroup):
        assert [s.role for s in start.plan.stages] == [StageRole.FULL] * 4
        assert [bool(s.later_ranges) for s in start.plan.stages] == [True] * 4  # the burst needs all of them
    (start, _) = of(group_world(n_hosts=8, facts=replace(facts, keep=2)).burst(30), StartGroup)
    assert [bool(s.later_ranges) for s in start.plan.stages] == [True, True, False, False]


# failures ----------------------------------------------------------------------------------------------------------


def test_after_a_failure_it_is_asked_again_after_pauses_that_grow_and_in_the_end_stays_a_pipeline() -> None:
    w, start, decided = whole()
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
    w, start, _ = whole()
    w.stays_a_pipeline(start)
    assert of(w.later(7_200.0), ConsolidateInstance) == []


def test_a_refused_command_is_a_failure_and_one_of_another_group_is_not() -> None:
    w, _, decided = whole()
    ask = asked(decided)
    w.do(CommandRefused(CommandId("another"), ask.host_id, ask.group_id, AWAY))
    assert of(w.later(100.0), ConsolidateInstance) == []
    w.refused(ask, AWAY)
    assert asked(w.later(5.0)).command_id != ask.command_id
    assert len(w.view.groups) == 1


def test_a_host_that_does_not_answer_is_asked_again_after_the_deadline() -> None:
    w, start, _ = whole()
    assert of(w.later(w.view.settings.consolidate_deadline_s - 1.0), ConsolidateInstance) == []
    assert asked(w.later(1.0 + 5.0)).instance_id == start.stages[0].instance_id


def test_the_deadline_of_an_earlier_try_does_not_end_a_later_one() -> None:
    w, start, _ = whole()
    failed(w, start)
    asked(w.later(5.0))
    assert of(w.later(w.view.settings.consolidate_deadline_s - 1.0), Flag) == []
    assert len(of(w.later(1.0), Flag)) == 1


def test_a_failure_of_what_was_not_asked_changes_nothing() -> None:
    w, start, _ = whole()
    failed(w, start)
    assert failed(w, start) == []
    assert asked(w.later(5.0)).group_id == start.plan.group_id


def test_a_group_that_is_being_released_is_asked_only_if_it_stays_after_all() -> None:
    w, start, _ = whole(idle=True)
    failed(w, start)
    (release,) = of(w.see_all(start.stages[1].host_id, draining=True), ReleaseInstance)
    assert of(w.later(20.0), ConsolidateInstance) == []
    w.see_all()
    w.refused(release, AWAY)
    assert asked(w.later(10.0)).group_id == start.plan.group_id


def test_a_group_of_an_older_version_is_not_asked() -> None:
    w, start, _ = whole()
    failed(w, start)
    w.deploy(replace(FOLDING, version="2"))
    assert of(w.later(60.0), ConsolidateInstance) == []
    assert start.plan.action_version == "1"


# the switch --------------------------------------------------------------------------------------------------------


def test_when_stage_0_is_one_worker_its_plan_is_rewritten_before_the_other_stages_are_released() -> None:
    w, start, _ = whole()
    decided = switched(w, start)
    rewritten, *releases = [d for d in decided if isinstance(d, RewritePlan | ReleaseInstance | RevokeCredential)]
    assert isinstance(rewritten, RewritePlan)
    plan = rewritten.plan
    assert plan.stages == (replace(start.plan.stages[0], layers=(0, 30)),)
    assert (plan.group_id, plan.transport, plan.keep) == (start.plan.group_id, PlanTransport(), 1)
    assert [(r.instance_id, r.host_id, r.only_idle, r.reason) for r in of(releases, ReleaseInstance)] == [
        (s.instance_id, s.host_id, False, "consolidated") for s in start.stages[1:]
    ]
    assert len(releases) == 3
    assert (w.view.groups[plan.group_id].plan, w.view.groups[plan.group_id].slots) == (plan, 8)


def test_the_memory_of_the_other_stages_is_free_when_they_have_gone_and_the_worker_serves_on() -> None:
    w, start = one_worker()
    devices = {h.host_id: h.devices["cpu"] for h in w.view.hosts.values()}
    assert [devices[s.host].releasing for s in start.plan.stages] == [0, 256 * MIB, 256 * MIB, 256 * MIB]
    assert of(w.gone(start, 3, 1), RevokeCredential) == []
    decided = w.gone(start, 2, error=LOST)
    assert [d.group_id for d in of(decided, RevokeCredential)] == [start.plan.group_id]
    assert of(decided, CancelGroup) == of(decided, DropPlan) == []
    assert held(w) == {start.plan.stages[0].host: 1024 * MIB}
    assert [d.releasing for d in devices.values()] == [0] * 4
    (group,) = w.view.groups.values()
    assert group.instance_ids == (start.stages[0].instance_id,)


def test_the_worker_ends_like_one_that_started_alone_and_nothing_is_left() -> None:
    w, start = one_worker()
    w.gone(start, 1, 2, 3)
    switched(w, start, **IDLE)
    (release,) = of(w.later(61.0), ReleaseInstance)
    assert (release.instance_id, release.reason) == (start.stages[0].instance_id, "keep_alive")
    decided = w.gone(start, n_stages=1)
    assert of(decided, RevokeCredential) == of(decided, CancelGroup) == []
    assert len(of(decided, DropPlan)) == 1
    nothing_is_left(w)


def test_the_link_is_told_that_the_rest_of_the_model_has_arrived() -> None:
    w, start, _ = whole()
    ledger = w.view.hosts[start.plan.stages[0].host].ledger
    assert list(ledger.fetches()) == [later_key(start.plan.group_id, 0)]
    switched(w, start)
    assert ledger.fetches() == {}


def test_room_that_the_other_stages_leave_is_given_to_those_who_wait() -> None:
    w, start, _ = whole(forced(4, keep=1, need_bytes=4000 * MIB))
    w.deploy(hello(need_bytes=3500 * MIB))
    assert of(w.ask(HELLO), StartGroup) == []
    switched(w, start)
    (other,) = of(w.gone(start, 2), StartGroup)
    assert other.plan.stages[0].host == start.plan.stages[2].host


def test_the_pools_of_the_other_hosts_are_free_again() -> None:
    w, start, _ = whole(pool=pool(8))
    free = {h: v.pool.free_slabs() for h, v in w.view.hosts.items()}
    assert all(n < 8 for n in free.values())
    switched(w, start)
    w.gone(start, 1, 2, 3)
    first = start.plan.stages[0].host
    assert {h: v.pool.free_slabs() for h, v in w.view.hosts.items()} == {h: free[h] if h == first else 8 for h in free}


def test_more_requests_than_the_worker_has_slots_are_no_free_slots_and_a_new_one_gets_a_start() -> None:
    w, _ = one_worker(TWO, n_hosts=8, inflight=14)
    w.later(5.0)
    assert len(of(w.ask(CHAT), StartGroup)) == 1


def test_an_idle_worker_is_evicted_for_its_own_memory_only() -> None:
    w, start = one_worker(forced(2, keep=1, need_bytes=2000 * MIB), n_hosts=2, **IDLE)
    left = start.plan.stages[1].host
    assert [where for where, _ in w.view.idle.releasing(for_model=True)] == [(left, "cpu")]
    w.gone(start, 1)
    w.deploy(hello(need_bytes=3500 * MIB))
    assert w.started(HELLO).plan.stages[0].host == left
    assert [r.reason for r in of(w.ask(HELLO), ReleaseInstance)] == ["memory"]


# stages that are left behind ---------------------------------------------------------------------------------------


def test_the_release_of_a_stage_that_is_left_behind_is_sent_again_until_its_host_does_not_have_it() -> None:
    w, start = one_worker(TWO)
    left = start.stages[1]
    w.see_all(left.host_id, instances=(left.instance_id,))
    (again,) = of(w.later(RELEASE_DEADLINE_S), ReleaseInstance)
    assert (again.instance_id, again.only_idle) == (left.instance_id, False)
    assert w.refused(again, AWAY) == []
    w.see_all()
    decided = w.later(RELEASE_DEADLINE_S)
    assert [f.record.instance_id for f in of(decided, ForgetInstance)] == [left.instance_id]
    assert len(of(decided, RevokeCredential)) == 1
    assert of(decided, CancelGroup) == []
    assert len(w.view.groups) == 1


@pytest.mark.parametrize("n_hosts", [4, 1])
def test_the_refused_release_of_a_worker_keeps_no_stage_that_is_left_behind(n_hosts: int) -> None:
    """The release is the worker's own even where a stage that leaves is on its host."""
    w = group_world(n_hosts, SHORT)
    while w.view.new_id() != "id6":  # then the worker is id9, and the other stage id11 comes before it
        pass
    start = w.started()
    assert start.stages[0].instance_id > start.stages[1].instance_id
    w.ready(start, idle=False)
    switched(w, start, **IDLE, keep_alive_s=1.0)
    (release,) = [r for r in of(w.later(2.0), ReleaseInstance) if r.reason == "keep_alive"]
    w.refused(release, AWAY)
    releasing = {m.record.stage: m.releasing is not None for m in w.view.members(start.plan.group_id)}
    assert releasing == {0: False, 1: True}
    assert sum(h.devices["cpu"].releasing for h in w.view.hosts.values()) == 512 * MIB


def test_a_host_that_is_lost_with_a_stage_that_is_left_behind_ends_nothing() -> None:
    w, start = one_worker(TWO)
    decided = w.see(*(r for h, r in w.reports.items() if h != start.stages[1].host_id))
    assert of(decided, CancelGroup) == of(decided, DropPlan) == []
    assert len(of(decided, RevokeCredential)) == len(of(decided, ForgetInstance)) == 1
    assert held(w) == {start.stages[0].host_id: 1024 * MIB}


def test_a_host_that_is_drained_with_a_stage_that_is_left_behind_leaves_the_worker_alone() -> None:
    w, start = one_worker(TWO)
    assert of(w.see_all(start.stages[1].host_id, draining=True), ReleaseInstance) == []


def test_the_end_of_the_worker_before_the_others_revokes_its_credential_and_keeps_them_leaving() -> None:
    w, start = one_worker(forced(3, keep=1))
    decided = w.gone(start, n_stages=1, error=LOST)
    kinds = [type(d) for d in decided if isinstance(d, RevokeCredential | DropPlan)]
    assert kinds == [RevokeCredential, DropPlan]
    assert of(w.gone(start, 1, 2), RevokeCredential) == []
    nothing_is_left(w)


def test_a_worker_whose_group_was_given_up_before_its_word_came_serves_by_itself() -> None:
    """A stage dies after the switch, and the scheduler hears of that first.  The host ends no worker that switched."""
    w, start, _ = whole(TWO)
    assert len(of(w.gone(start, 1, error=LOST), CancelGroup)) == 1
    assert of(switched(w, start), CancelGroup) == []
    head = w.view.instances[start.stages[0].instance_id]
    assert (head.releasing, w.view.action(CHAT).n_serving) == (None, 1)
    assert w.view.hosts[start.stages[0].host_id].devices["cpu"].releasing == 0
    switched(w, start, **IDLE)
    assert [r.reason for r in of(w.later(120.0), ReleaseInstance)] == ["keep_alive"]


# an idle group -----------------------------------------------------------------------------------------------------


def test_an_idle_group_gives_way_to_a_successor_only_when_it_stays_a_pipeline() -> None:
    w, start, _ = whole(chat(slo_ttft_s=7.5, max_stages=4), idle=True)
    w.see_all(start.plan.stages[0].host, resident=(Resident("s3://m/x", SMOLLM2.n_bytes),))
    assert of(w.later(20.0), ReleaseInstance) == []
    w.stays_a_pipeline(start)
    assert [r.reason for r in of(w.later(3.0), ReleaseInstance)] == ["successor"]


# another scheduler -------------------------------------------------------------------------------------------------


@pytest.fixture
def start() -> StartGroup:
    return whole()[1]


def stages(start: StartGroup, *stages: int) -> list[InstanceRecord]:
    """The registry's records of stages that serve."""
    return [record_of(start, READY, k, inflight=1) for k in stages]


def switched_stages(start: StartGroup, *others: int) -> list[InstanceRecord]:
    """The registry's records after the switch of stage 0."""
    return [record_of(start, READY, 0, inflight=1, n_stages=1, slots=8), *stages(start, *others)]


def undone(decided: list[Decision]) -> list[Decision]:
    return [*of(decided, CancelGroup), *of(decided, DropPlan)]


def test_a_successor_asks_a_whole_pipeline_again(start: StartGroup) -> None:
    _, decided = taken_over(start, *stages(start, 0, 1, 2, 3))
    assert asked(decided).instance_id == start.stages[0].instance_id
    assert undone(decided) == of(decided, RevokeCredential) == []


def test_a_successor_asks_a_pipeline_that_starts_still_when_it_is_whole(start: StartGroup) -> None:
    w, decided = taken_over(start, *stages(start, 0, 1, 2), record_of(start, STARTING, 3))
    assert of(decided, ConsolidateInstance) == []
    assert asked(w.said(start, READY, 3)).instance_id == start.stages[0].instance_id


def test_a_successor_releases_a_stage_that_was_left_behind_and_that_it_hears_of_late(start: StartGroup) -> None:
    w, _ = taken_over(start, *switched_stages(start))
    (release,) = of(w.said(start, READY, 2), ReleaseInstance)
    assert (release.instance_id, release.reason) == (start.stages[2].instance_id, "consolidated")
    assert len(of(w.gone(start, 2), RevokeCredential)) == 1


def test_a_successor_that_finds_one_worker_with_the_plan_of_a_pipeline_rewrites_it_and_releases_the_others(
    start: StartGroup,
) -> None:
    w, decided = taken_over(start, *switched_stages(start, 1, 2, 3))
    done = [d for d in decided if isinstance(d, RewritePlan | ReleaseInstance)]
    assert [type(d) for d in done] == [RewritePlan, ReleaseInstance, ReleaseInstance, ReleaseInstance]
    assert of(decided, RewritePlan)[0].plan == folded(start.plan)
    assert undone(decided) == of(decided, RevokeCredential) == of(decided, ConsolidateInstance) == []
    assert of(w.gone(start, 1, 2), RevokeCredential) == []
    assert len(of(w.gone(start, 3), RevokeCredential)) == 1
    assert held(w) == {start.stages[0].host_id: 1024 * MIB}


@pytest.mark.parametrize(
    ("left", "is_rewritten"), [((2,), False), ((1, 2, 3), True), ((3,), True)], ids=["missing", "all", "one"]
)
def test_a_successor_releases_what_one_worker_left_behind_and_does_not_miss_the_others(
    start: StartGroup, left: tuple[int, ...], is_rewritten: bool
) -> None:
    plan = folded(start.plan) if is_rewritten else start.plan
    _, decided = taken_over(start, *switched_stages(start, *left), plans=(plan,))
    assert [r.instance_id for r in of(decided, ReleaseInstance)] == [start.stages[k].instance_id for k in left]
    assert undone(decided) == of(decided, RevokeCredential) == []
    assert len(of(decided, RewritePlan)) == (not is_rewritten)


@pytest.mark.parametrize("is_rewritten", [True, False])
def test_a_successor_revokes_the_credential_of_a_worker_whose_pipeline_has_gone(
    start: StartGroup, is_rewritten: bool
) -> None:
    plan = folded(start.plan) if is_rewritten else start.plan
    w, decided = taken_over(start, *switched_stages(start), plans=(plan,))
    assert [d.group_id for d in of(decided, RevokeCredential)] == [start.plan.group_id]
    assert undone(decided) == []
    assert len(w.view.groups) == 1


def test_a_successor_that_finds_only_what_a_worker_left_behind_ends_it(start: StartGroup) -> None:
    _, decided = taken_over(start, *stages(start, 1, 3), plans=(folded(start.plan),))
    assert {c.host_id for c in of(decided, CancelGroup)} == {start.stages[k].host_id for k in (0, 1, 3)}
    assert len(of(decided, RevokeCredential)) == len(of(decided, DropPlan)) == 1


def test_a_worker_by_itself_keeps_its_claim_on_the_pool_under_a_successor(start: StartGroup) -> None:
    hosts = tuple(report(f"h{i}", pool=pool(8)) for i in range(4))
    w, _ = taken_over(start, *switched_stages(start), plans=(folded(start.plan),), hosts=hosts)
    assert start.stages[0].instance_id in w.view.hosts[start.stages[0].host_id].pool._claims
