"""A pipeline becomes several workers: how many stay, the decisions after each report, and a successor scheduler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.scheduler.decisions import (
    CancelGroup,
    ConsolidateInstance,
    Decision,
    DropPlan,
    Flag,
    PlanWorker,
    ReleaseInstance,
    RevokeCredential,
    RewritePlan,
    StartGroup,
)
from gateway.scheduler.events import ActionDeleted, ActionSeen
from gateway.scheduler.placement.plans import later_key
from gateway.scheduler.policy.consolidation import folded
from gateway.scheduler.policy.scale_up import own_plan
from relay.protocol.messages import CommandRefused, ConsolidationFailed, DemandRemoved, InstanceChanged
from tests.scheduler.facts import CHAT, GONE, LOST, MIB, READY, chat, forced, pool
from tests.scheduler.groups import group_world, held, one_worker, switched, taken_over, whole
from tests.scheduler.test_consolidation import AWAY
from tests.scheduler.world import World, of, record_of
from thaw.host import FetchReport
from thaw.ids import GroupId, own_group
from thaw.instance import InstanceRecord
from thaw.plan import PlanTransport

SCALING = forced(4, keep=2, need_bytes=600 * MIB)
"""The function of a model whose pipelines of four stages leave two workers behind."""
BURST = chat(max_stages=4, need_bytes=600 * MIB, slo_ttft_s=60.0)


def asked_stages(start: StartGroup, decided: list[Decision]) -> list[int]:
    stage_of = {s.instance_id: s.stage for s in start.stages}
    return [stage_of[d.instance_id] for d in of(decided, ConsolidateInstance)]


def worker(start: StartGroup, stage: int, **fields: Any) -> InstanceRecord:
    """The record of a later stage that has become a worker."""
    own = own_group(start.plan.group_id, stage)
    one = {"n_stages": 1, "slots": 8, "group_id": own}
    return replace(record_of(start, READY, stage, **{**one, "idle_since_wall_ms": 1, **fields}), stage=0)


def becomes_worker(w: World, start: StartGroup, stage: int = 1, **fields: Any) -> list[Decision]:
    return w.do(InstanceChanged(worker(start, stage, **fields)))


def serving(w: World) -> list[tuple[GroupId, int]]:
    """The groups, and the slots of each."""
    return sorted((g.plan.group_id, g.slots) for g in w.view.groups.values())


def both(start: StartGroup, *stages: int) -> list[tuple[GroupId, int]]:
    return sorted((own_group(start.plan.group_id, k), 8) for k in stages)


def cannot(w: World, start: StartGroup, stage: int) -> list[Decision]:
    at = start.stages[stage]
    return w.do(ConsolidationFailed(at.instance_id, at.host_id, start.plan.group_id, AWAY))


# how many stay -----------------------------------------------------------------------------------------------------


def burst(n: int, *, just_now: bool = False, **fields: Any) -> tuple[World, StartGroup, list[Decision]]:
    """A burst of 16 gets a group of four full workers, and ``n`` of them still wait when it is whole."""
    w = group_world(facts=replace(BURST, **fields))
    (start,) = of(w.burst(16), StartGroup)
    for activation in list(w.view.demand)[n:]:
        w.do(DemandRemoved(activation, CHAT))
    w.now += 0.0 if just_now else 2.0
    decided = [d for k in (3, 2, 1, 0) for d in w.said(start, READY, k, idle_since_wall_ms=1)]
    return w, start, decided


@pytest.mark.parametrize(
    ("n_waiting", "just_now", "n_workers"),
    [(16, True, 4), (8, True, 3), (16, False, 2), (9, False, 2), (8, False, 1), (0, False, 1)],
)
def test_as_many_workers_stay_as_the_requests_need_when_the_group_is_whole(
    n_waiting: int, *, just_now: bool, n_workers: int
) -> None:
    _, start, decided = burst(n_waiting, just_now=just_now)
    assert len(start.stages) == 4
    assert asked_stages(start, decided) == list(range(n_workers))


def test_free_slots_of_other_workers_need_no_further_one() -> None:
    w = group_world(n_hosts=8, facts=BURST)
    first, second = of(w.burst(32), StartGroup)
    w.now += 2.0
    decided = [d for k in range(4) for d in w.said(first, READY, k, idle_since_wall_ms=1)]
    assert (len(first.stages), len(second.stages)) == (4, 4)
    assert asked_stages(first, decided) == [0]


def test_no_more_stay_than_the_function_may_have_instances() -> None:
    _, start, decided = burst(16, just_now=True, max_instances=2)
    assert asked_stages(start, decided) == [0, 1]


@pytest.mark.parametrize(("n", "keep"), [(4, 3), (2, 2)], ids=["three of four", "all"])
def test_a_number_that_the_function_names_stays_whatever_waits(n: int, keep: int) -> None:
    _, start, decided = whole(forced(n, keep=keep, need_bytes=600 * MIB))
    assert asked_stages(start, decided) == list(range(keep))
    assert len({d.command_id for d in of(decided, ConsolidateInstance)}) == keep


def test_a_stage_for_whose_rest_its_pool_has_no_room_does_not_stay() -> None:
    w = group_world(facts=replace(SCALING, keep=3))
    w.see_all("h1", pool=pool(3))
    start = w.started()
    decided = w.ready(start, idle=False)
    on_h1 = [s.stage for s in start.plan.stages if s.host == "h1" and s.stage in (1, 2)]
    assert all(not start.plan.stages[k].later_ranges for k in on_h1)
    assert asked_stages(start, decided) == [k for k in (0, 1, 2) if k not in on_h1]


# the switch, and after it ------------------------------------------------------------------------------------------


def test_at_the_switch_the_plan_of_each_further_worker_is_written_first_and_only_the_others_are_released() -> None:
    w, start, _ = whole(SCALING)
    decided = switched(w, start)
    first, second, *rest = [d for d in decided if isinstance(d, PlanWorker | RewritePlan | ReleaseInstance)]
    assert isinstance(first, PlanWorker)
    assert isinstance(second, RewritePlan)
    made = first.plan
    assert made.stages == (replace(start.plan.stages[1], stage=0, layers=(0, 30)),)
    assert (made.group_id, made.transport, made.keep) == (own_group(start.plan.group_id, 1), PlanTransport(), 1)
    assert [d.instance_id for d in rest if isinstance(d, ReleaseInstance)] == [s.instance_id for s in start.stages[2:]]
    assert second.plan == folded(start.plan)


def test_it_is_a_worker_like_any_other_from_its_record_on() -> None:
    w, start = one_worker(SCALING)
    assert of(w.gone(start, 2, 3), RevokeCredential) == []  # it may be in the pipeline still
    decided = becomes_worker(w, start)
    assert [d.group_id for d in of(decided, RevokeCredential)] == [start.plan.group_id]
    assert of(decided, CancelGroup) == of(decided, ReleaseInstance) == []
    assert serving(w) == both(start, 0, 1)
    assert w.view.action(CHAT).n_serving == 2
    assert held(w) == {s.host: 600 * MIB for s in start.plan.stages[:2]}
    assert [r.instance_id for r in of(w.later(61.0), ReleaseInstance)] == [start.stages[1].instance_id]
    gone = w.do(InstanceChanged(replace(worker(start, 1), state=GONE)))
    assert [d.group_id for d in of(gone, DropPlan)] == [own_group(start.plan.group_id, 1)]
    assert serving(w) == both(start, 0)


def test_requests_that_wait_after_the_switch_wait_for_the_further_workers_and_start_no_other() -> None:
    w, _ = one_worker(SCALING, n_hosts=8, inflight=8)
    w.later(5.0)
    assert of(w.burst(4), StartGroup) == []  # the further worker has slots for them and as many more
    assert len(of(w.burst(4), StartGroup)) == 1


def test_the_end_of_a_stage_that_was_set_apart_gives_back_all_and_demand_starts_another() -> None:
    w, start = one_worker(SCALING, n_hosts=8, inflight=8)
    w.later(5.0)
    assert of(w.burst(4), StartGroup) == []
    decided = w.gone(start, 1, is_consolidating=True, error=LOST)
    assert [d.group_id for d in of(decided, DropPlan)] == [own_group(start.plan.group_id, 1)]
    assert of(decided, CancelGroup) == []
    assert len(of(decided, StartGroup)) == 1
    assert w.view.kept == {}


@pytest.mark.parametrize("how", ["fails", "hangs", "is drained"])
def test_one_that_fails_hangs_or_is_drained_after_the_switch_is_released(how: str) -> None:
    w, start = one_worker(SCALING)
    w.gone(start, 2, 3)
    if how == "fails":
        decided = cannot(w, start, 1)
    elif how == "hangs":
        decided = w.later(w.view.settings.start_deadline_s)
    else:
        decided = w.see_all(start.stages[1].host_id, draining=True)
    (release,) = [r for r in of(decided, ReleaseInstance) if r.instance_id == start.stages[1].instance_id]
    assert release.only_idle  # it may have become a worker just now
    assert own_group(start.plan.group_id, 1) in [d.group_id for d in of(decided, DropPlan)]
    assert w.view.kept == {}
    decided = w.gone(start, 1)
    assert [d.group_id for d in of(decided, RevokeCredential)] == [start.plan.group_id]
    assert serving(w) == both(start, 0)


def test_one_that_was_given_up_in_the_moment_in_which_it_became_a_worker_serves_by_itself() -> None:
    w, start = one_worker(SCALING)
    (release,) = of(cannot(w, start, 1), ReleaseInstance)
    w.do(CommandRefused(release.command_id, release.host_id, own_group(start.plan.group_id, 1), AWAY))
    w.gone(start, 2, 3)
    decided = becomes_worker(w, start, inflight=1, idle_since_wall_ms=None)
    assert (of(decided, ReleaseInstance), len(of(decided, RevokeCredential))) == ([], 1)
    assert w.view.action(CHAT).n_serving == 2
    becomes_worker(w, start)
    assert [r.reason for r in of(w.later(120.0), ReleaseInstance) if r.reason != "consolidated"] == ["keep_alive"]


def test_a_worker_that_ends_before_its_word_came_leaves_no_credential() -> None:
    w, start = one_worker(SCALING)
    w.gone(start, 2, 3)
    decided = w.do(InstanceChanged(replace(worker(start, 1), state=GONE)))
    assert [d.group_id for d in of(decided, RevokeCredential)] == [start.plan.group_id]
    assert (w.view.kept, serving(w)) == ({}, both(start, 0))


def test_one_whose_fetch_goes_on_is_not_given_up() -> None:
    w, start = one_worker(SCALING)
    at = start.stages[1]
    deadline_s = w.view.settings.start_deadline_s
    for done in (1, 2):
        w.later(deadline_s - 1.0)
        fetch = FetchReport(start.plan.group_id, 100, 100, 1e6, 1, 0, later_bytes=1000 - done)
        w.see_all(at.host_id, fetches=(fetch,))
    assert at.instance_id in w.view.kept
    w.later(deadline_s)
    assert at.instance_id not in w.view.kept


def test_one_whose_load_fails_before_the_switch_goes_on_as_a_stage_and_is_left_behind() -> None:
    w, start, _ = whole(SCALING)
    assert [f.name for f in of(cannot(w, start, 1), Flag)] == ["worker_not_kept"]
    assert len(w.view.groups) == 1
    decided = switched(w, start)
    assert of(decided, PlanWorker) == []
    assert [r.instance_id for r in of(decided, ReleaseInstance)] == [s.instance_id for s in start.stages[1:]]


def test_a_host_that_refuses_to_let_a_stage_stay_counts_as_its_failure_only() -> None:
    w, start, decided = whole(SCALING)
    w.refused(of(decided, ConsolidateInstance)[1], AWAY)
    state = w.view.groups[start.plan.group_id].consolidation
    assert (state.n_failed, state.kept) == (0, {})


def test_with_another_try_of_stage_0_a_later_stage_that_failed_is_asked_again_and_one_that_waits_is_not() -> None:
    w, start, _ = whole(replace(SCALING, keep=3))
    cannot(w, start, 1)
    cannot(w, start, 0)
    assert asked_stages(start, w.later(5.0)) == [0, 1]


def test_the_word_of_a_further_worker_may_come_before_that_of_stage_0() -> None:
    w, start, _ = whole(SCALING)
    decided = becomes_worker(w, start)
    assert [d.plan for d in of(decided, PlanWorker)] == [own_plan(start.plan, 1)]
    assert of(decided, RevokeCredential) == []  # the others are in the pipeline still
    decided = switched(w, start)
    assert [r.instance_id for r in of(decided, ReleaseInstance)] == [s.instance_id for s in start.stages[2:]]
    assert serving(w) == both(start, 0, 1)


def test_a_release_of_the_pipeline_is_no_release_of_a_worker_that_has_left_it() -> None:
    w, start, _ = whole(SCALING)
    w.said(start, READY, 0, idle_since_wall_ms=1)
    assert [r.reason for r in of(w.later(61.0), ReleaseInstance)] == ["keep_alive"]
    becomes_worker(w, start, inflight=1, idle_since_wall_ms=None)
    w.gone(start, 0, n_stages=1)
    assert w.view.instances[start.stages[1].instance_id].releasing is None
    becomes_worker(w, start)
    assert start.stages[1].instance_id in [r.instance_id for r in of(w.later(61.0), ReleaseInstance)]


def test_the_end_of_stage_0_after_the_switch_leaves_the_further_workers_alone() -> None:
    w, start = one_worker(SCALING)
    decided = w.gone(start, 0, n_stages=1, error=LOST)
    assert of(decided, CancelGroup) == []
    assert of(becomes_worker(w, start), ReleaseInstance) == []
    assert serving(w) == both(start, 1)


def test_the_rest_of_a_stage_that_was_set_apart_is_fetched_on_until_it_is_a_worker() -> None:
    w, start, _ = whole(SCALING)
    ledger = w.view.hosts[start.plan.stages[1].host].ledger
    switched(w, start)
    assert list(ledger.fetches()) == [later_key(start.plan.group_id, 1)]
    becomes_worker(w, start)
    assert ledger.fetches() == {}


@pytest.mark.parametrize("event", [ActionSeen(replace(SCALING, version="2")), ActionDeleted(CHAT)])
def test_a_worker_of_a_function_that_has_changed_meanwhile_is_released_when_it_is_one(event: Any) -> None:
    w, start = one_worker(SCALING)
    w.do(event)
    assert [r.reason for r in of(becomes_worker(w, start), ReleaseInstance)] == ["outdated"]


# another scheduler -------------------------------------------------------------------------------------------------


@pytest.fixture
def start() -> StartGroup:
    return whole(SCALING)[1]


def state(start: StartGroup, *, is_one: bool) -> list[InstanceRecord]:
    """Return the registry's records: stage 1 was asked to stay, and ``is_one`` says whether stage 0 has switched."""
    one = {"n_stages": 1, "slots": 8} if is_one else {}
    head = record_of(start, READY, 0, inflight=1, **one)
    stays = record_of(start, READY, 1, inflight=1, is_consolidating=True)
    return [head, stays, *(record_of(start, READY, k, inflight=1) for k in (2, 3))]


def test_a_successor_asks_all_that_are_to_stay_again(start: StartGroup) -> None:
    _, decided = taken_over(start, *state(start, is_one=False), actions=(SCALING,))
    assert asked_stages(start, decided) == [0, 1]


@pytest.mark.parametrize("written", ["nothing", "the worker's plan", "both plans"])
def test_a_successor_at_any_point_of_the_switch_lets_the_further_worker_stay(start: StartGroup, written: str) -> None:
    own = own_plan(start.plan, 1)
    plans = {"nothing": (start.plan,), "the worker's plan": (start.plan, own), "both plans": (folded(start.plan), own)}
    w, decided = taken_over(start, *state(start, is_one=True), plans=plans[written], actions=(SCALING,))
    assert [r.instance_id for r in of(decided, ReleaseInstance)] == [s.instance_id for s in start.stages[2:]]
    assert of(decided, CancelGroup) == of(decided, DropPlan) == of(decided, RevokeCredential) == []
    assert len(of(decided, PlanWorker)) == (written != "both plans")  # writing it again changes nothing
    w.gone(start, 2, 3)
    assert len(of(becomes_worker(w, start), RevokeCredential)) == 1
    assert serving(w) == both(start, 0, 1)


def test_a_successor_finds_two_workers(start: StartGroup) -> None:
    own = own_plan(start.plan, 1)
    head = record_of(start, READY, 0, n_stages=1, slots=8)
    w, decided = taken_over(start, head, worker(start, 1), plans=(folded(start.plan), own), actions=(SCALING,))
    assert of(decided, CancelGroup) == of(decided, DropPlan) == of(decided, ReleaseInstance) == []
    assert serving(w) == both(start, 0, 1)
    assert len(of(decided, RevokeCredential)) == 1


def test_a_successor_forgets_the_plan_of_a_worker_that_nobody_becomes(start: StartGroup) -> None:
    own = own_plan(start.plan, 1)
    head = record_of(start, READY, 0, n_stages=1, slots=8)
    w, decided = taken_over(start, head, plans=(folded(start.plan), own), actions=(SCALING,))
    assert [d.group_id for d in of(decided, DropPlan)] == [own.group_id]
    assert serving(w) == both(start, 0)
