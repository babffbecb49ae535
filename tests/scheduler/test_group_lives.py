"""Groups of several stages as the policy sees them: from their start to their end, under one scheduler and the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.scheduler.decisions import (
    CancelGroup,
    Decision,
    DropPlan,
    ForgetInstance,
    LearnFrom,
    ReleaseInstance,
    RevokeCredential,
    StartGroup,
)
from gateway.scheduler.events import StartRefused
from gateway.scheduler.placement.plans import later_key
from gateway.scheduler.policy.starts import GATHER_S
from relay.protocol.messages import CommandRefused, DemandRemoved
from tests.scheduler.facts import CHAT, HELLO, LOST, MIB, READY, SMOLLM2, STARTING, demand, forced, hello, report
from tests.scheduler.groups import group_world, nothing_is_left, taken_over
from tests.scheduler.world import World, foretold_s, llm_world, of, record_of, serving, starting
from thaw.errors import ErrorInfo
from thaw.host import FetchReport
from thaw.ids import ActionName, CommandId, GroupId, HostId
from thaw.instance import InstanceState

# life --------------------------------------------------------------------------------------------------------------


def test_a_group_is_ready_when_its_last_stage_is_and_teaches_once() -> None:
    w, start = starting(group_world(facts=forced(4)))
    early = [d for k in (0, 2, 3) for d in w.said(start, READY, k)]
    assert of(early, LearnFrom) == []
    (learn,) = of(w.said(start, READY, 1), LearnFrom)
    assert (learn.n_stages, learn.n_full) == (4, 1)
    assert of(w.said(start, READY, 1), LearnFrom) == []


def test_a_groups_slots_are_those_of_as_many_batches_as_it_has_stages() -> None:
    w = group_world(facts=forced(4))
    w.started(CHAT)
    w.now += GATHER_S
    assert [of(w.ask(CHAT), StartGroup) for _ in range(15)] == [[]] * 15  # 16 waiting and 16 new fill 32
    assert len(of(w.ask(CHAT), StartGroup)) == 1


def test_an_early_first_stage_is_not_released_while_others_start() -> None:
    w, start = starting(group_world(facts=forced(2, keep_alive_s=1.0)))
    w.do(DemandRemoved(start.activation_ids[0], CHAT))
    w.said(start, READY, 0, idle_since_wall_ms=1, keep_alive_s=1.0)
    assert of(w.later(20.0), ReleaseInstance) == []
    decided = w.said(start, READY, 1)
    (release,) = of(decided + w.later(1.1), ReleaseInstance)
    assert release.instance_id == start.stages[0].instance_id


def test_only_the_first_stage_is_released_and_the_others_go_with_it() -> None:
    w, start = serving(group_world(facts=forced(4)))
    (release,) = of(w.later(61.0), ReleaseInstance)
    assert release.instance_id == start.stages[0].instance_id
    decided = w.gone(start, 0)
    assert sorted(c.host_id for c in of(decided, CancelGroup)) == sorted(s.host for s in start.plan.stages[1:])
    _ended_in_order(decided, start)
    w.gone(start, 1, 2, 3)
    nothing_is_left(w)


def _ended_in_order(decided: list[Decision], start: StartGroup) -> None:
    """The plan is dropped last.  While it exists, a successor scheduler finds the steps that remain to be undone."""
    kinds = [type(d) for d in decided if isinstance(d, CancelGroup | RevokeCredential | DropPlan)]
    assert kinds == [CancelGroup] * (len(kinds) - 2) + [RevokeCredential, DropPlan]
    assert {d.group_id for d in of(decided, RevokeCredential)} == {start.plan.group_id}


@pytest.mark.parametrize("lost", [0, 1, 3])
@pytest.mark.parametrize("whole", [True, False])
def test_a_stage_that_is_lost_in_any_state_ends_its_whole_group(lost: int, *, whole: bool) -> None:
    w, start = starting(group_world(facts=forced(4)))
    for k in range(4):
        w.said(start, READY if whole or k != 2 else STARTING, k)
    w.do(DemandRemoved(start.activation_ids[0], CHAT))
    decided = w.gone(start, lost, error=LOST)
    others = sorted(s.host for s in start.plan.stages if s.stage != lost)
    assert sorted(c.host_id for c in of(decided, CancelGroup)) == others
    _ended_in_order(decided, start)
    w.gone(start, *(k for k in range(4) if k != lost))
    nothing_is_left(w)


def test_who_waited_for_a_group_that_was_lost_waits_with_its_age() -> None:
    w, start = starting(group_world(facts=forced(2)))
    w.said(start, STARTING, 0)
    w.later(3.0)
    decided = w.gone(start, 1, error=LOST) + w.gone(start, 0) + w.later(1.0)
    (again,) = of(decided, StartGroup)
    assert again.activation_ids == start.activation_ids
    assert foretold_s(again) - foretold_s(start) >= 3.0  # t_w counts


def test_who_was_being_served_by_a_group_that_was_lost_comes_back_before_those_that_came_later() -> None:
    w, start = serving(group_world(facts=forced(2, slots=1)), idle=False)
    w.later(5.0)
    for _ in range(2):
        w.ask(CHAT)
    w.gone(start, 1, error=LOST)
    w.do(demand(start.activation_ids[0], CHAT))
    assert next(iter(w.view.action(CHAT).waiting)) == start.activation_ids[0]


def test_one_that_a_former_scheduler_saw_served_stands_where_its_age_puts_it() -> None:
    w = group_world(facts=forced(2, slots=1, max_instances=0))
    w.ask(CHAT)
    w.later(2.0)
    w.ask(CHAT)
    for name, waited_ms in (("between", 1_000), ("oldest", 60_000), ("clockless", 10**12)):
        w.do(demand(name, CHAT, waited_ms=waited_ms))
    assert list(w.view.action(CHAT).waiting) == ["clockless", "oldest", "a0", "between", "a1"]
    assert w.view.action(CHAT).window.count(w.now) == 1  # requests that come back are no arrivals of the last second


def test_a_lost_host_takes_the_whole_group_along_and_the_group_begins_anew_elsewhere() -> None:
    w, start = starting(group_world(n_hosts=5, facts=forced(4)))
    lost = start.plan.stages[2].host
    decided = w.see(*(r for h, r in w.reports.items() if h != lost))
    assert {c.host_id for c in of(decided, CancelGroup)} == {s.host for s in start.plan.stages}
    assert [f.record.stage for f in of(decided, ForgetInstance)] == [2]
    (again,) = of(decided + w.later(1.0), StartGroup)
    assert lost not in {s.host for s in again.plan.stages}
    assert again.activation_ids == start.activation_ids


def test_a_start_without_progress_on_any_stage_is_cancelled_on_every_host() -> None:
    hosts = [report(f"h{i}") for i in range(4)]
    w = llm_world(*hosts, facts=forced(4), model=SMOLLM2, relay_url="redis://r:1", start_deadline_s=10.0)
    start = w.started(CHAT)
    for done in range(1, 4):  # only the start's last stage makes progress
        w.see_all(start.plan.stages[3].host, fetches=(FetchReport(start.plan.group_id, 10, done, 1.0, 3),))
        assert of(w.later(9.0), CancelGroup) == []
    decided = w.later(2.0)
    assert {c.host_id for c in of(decided, CancelGroup)} == {s.host for s in start.plan.stages}


def test_a_stage_that_its_host_refuses_ends_the_group_and_holds_no_memory() -> None:
    w, start = starting(group_world(facts=forced(2)))
    refused = CommandRefused(
        start.stages[1].command_id, start.stages[1].host_id, start.plan.group_id, ErrorInfo("Unavailable", "draining")
    )
    decided = w.do(refused)
    assert [c.host_id for c in of(decided, CancelGroup)] == [start.stages[0].host_id]
    w.said(start, STARTING, 0)
    w.gone(start, 0)
    w.do(DemandRemoved(start.activation_ids[0], CHAT))
    nothing_is_left(w)


def test_a_group_whose_credential_was_not_made_is_tried_again_and_tells_no_host_to_stop() -> None:
    w, start = starting(group_world(facts=forced(2)))
    decided = w.do(StartRefused(start.plan.group_id, ErrorInfo("Unavailable", "the relay does not answer")))
    assert of(decided, CancelGroup) == []
    assert len(of(decided, DropPlan)) == 1
    (again,) = of(w.later(1.0), StartGroup)
    assert again.activation_ids == start.activation_ids


def test_a_word_that_crossed_the_cancel_is_answered_with_another() -> None:
    w, start = starting(group_world(facts=forced(2)))
    w.gone(start, 0, error=LOST)
    w.gone(start, 1)
    (cancel,) = of(w.said(start, READY, 1), CancelGroup)
    assert (cancel.host_id, cancel.group_id) == (start.stages[1].host_id, start.plan.group_id)
    assert w.view.action(CHAT).facts is not None
    assert of(w.said(start, READY, 1), CancelGroup) == []


def test_a_cancel_that_nobody_answers_is_sent_again_until_the_host_does_not_have_the_instance() -> None:
    w, start = starting(group_world(facts=forced(2)))
    for k in (0, 1):
        w.said(start, STARTING, k)
    w.do(DemandRemoved(start.activation_ids[0], CHAT))
    w.gone(start, 0, error=LOST)
    at = start.stages[1]
    w.see_all(at.host_id, instances=(at.instance_id,))
    assert [c.host_id for c in of(w.later(61.0), CancelGroup)] == [at.host_id]
    w.see_all()
    assert [f.record.instance_id for f in of(w.later(61.0), ForgetInstance)] == [at.instance_id]
    nothing_is_left(w)


def test_the_rest_that_a_full_stage_fetches_is_booked_without_a_promise_and_ends_with_the_group() -> None:
    w, start = serving(group_world(facts=forced(2)))
    stage = start.plan.stages[0]
    fetches = w.view.hosts[stage.host].ledger.fetches()
    assert [(k, f.promised) for k, f in fetches.items()] == [(later_key(start.plan.group_id, 0), False)]
    w.gone(start, 0)
    assert w.view.hosts[stage.host].ledger.fetches() == {}


# memory ------------------------------------------------------------------------------------------------------------


def test_an_idle_group_is_evicted_for_the_memory_of_its_stage_on_one_device() -> None:
    w, start = serving(group_world(n_hosts=2, facts=forced(2, need_bytes=2000 * MIB)))
    follower = start.plan.stages[1]
    other = replace(hello(need_bytes=3500 * MIB), name=ActionName("guest/large"))
    w.deploy(other)
    (release,) = of(w.ask(other.name), ReleaseInstance)
    assert release.instance_id == start.stages[0].instance_id  # stage 0 is released, wherever the memory is needed
    devices = {h.host_id: h.devices["cpu"] for h in w.view.hosts.values()}
    assert devices[follower.host].releasing == follower.reserve_bytes
    assert of(w.later(1.5), ReleaseInstance) == []


def test_a_group_counts_once_for_the_minimum_and_the_maximum() -> None:
    w = group_world(facts=forced(4, min_instances=1, max_instances=1))
    assert len(w.view.groups) == 1
    assert len(w.view.instances) == 4
    for _ in range(60):
        assert of(w.ask(CHAT), StartGroup) == []


def test_a_refused_release_of_a_group_gives_no_memory_away() -> None:
    w, _ = serving(group_world(facts=forced(2)))
    (release,) = of(w.later(61.0), ReleaseInstance)
    w.refused(release)
    assert [d.releasing for h in w.view.hosts.values() for d in h.devices.values()] == [0] * 4


# successors --------------------------------------------------------------------------------------------------------


def found(start: StartGroup, states: dict[int, InstanceState], **fields: Any) -> tuple[World, list[Decision]]:
    """Another scheduler that finds stages in these states, and its decisions."""
    records = [record_of(start, state, k) for k, state in states.items()]
    return taken_over(start, *records, actions=(forced(4),), **fields)


@pytest.fixture
def start() -> StartGroup:
    return group_world(facts=forced(4)).started()


def test_a_successor_cancels_a_group_of_which_a_stage_was_never_confirmed(start: StartGroup) -> None:
    w, decided = found(start, {0: READY, 1: STARTING, 3: READY})
    assert {c.host_id for c in of(decided, CancelGroup)} == {s.host for s in start.plan.stages}
    _ended_in_order(decided, start)
    w.gone(start, 0, 1, 3)
    nothing_is_left(w)


def test_a_successor_goes_on_with_a_group_of_which_every_stage_was_confirmed(start: StartGroup) -> None:
    w, decided = found(start, {0: READY, 1: STARTING, 2: READY, 3: STARTING})
    assert of(decided, CancelGroup) == of(decided, DropPlan) == of(decided, RevokeCredential) == []
    w.said(start, READY, 3)
    (learn,) = of(w.said(start, READY, 1), LearnFrom)
    assert learn.n_stages == 4
    assert {c.host_id for c in of(w.gone(start, 2, error=LOST), CancelGroup)} == {
        s.host for s in start.plan.stages if s.stage != 2
    }


def test_a_successor_takes_back_credentials_without_a_plan_and_stages_without_one(start: StartGroup) -> None:
    _, decided = found(start, {1: READY}, plans=(), credentials=(start.plan.group_id, GroupId("old")))
    assert {d.group_id for d in of(decided, RevokeCredential)} == {start.plan.group_id, "old"}
    assert [c.host_id for c in of(decided, CancelGroup)] == [start.plan.stages[1].host]


def test_a_command_id_that_is_no_start_is_nobodys() -> None:
    w = group_world(facts=forced(2))
    error = ErrorInfo("ProtocolError", "x")
    assert w.do(CommandRefused(CommandId("none"), HostId("h0"), GroupId("none"), error)) == []
    assert w.view.action(HELLO).facts is None
