"""Memory for models on the hosts (fetchd's pool), which may be full where a device has room."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from gateway.scheduler.decisions import CancelGroup, Decision, FailDemand, ReleaseInstance, StartGroup
from gateway.scheduler.events import ActionDeleted, HostSeen
from gateway.scheduler.policy.starts import GATHER_S, RETRY_BASE_S
from relay.protocol.messages import ModelInspected
from relay.protocol.pool import n_slabs
from tests.scheduler.facts import CHAT, FACTS, MIB, OTHER, READY, SMOLLM2, STARTING, chat, pool, pool_after, report
from tests.scheduler.groups import group_world, taken_over
from tests.scheduler.world import (
    World,
    foretold_s,
    free_slabs,
    llm_world,
    of,
    rebuilt,
    record_of,
    serving,
    starting,
    world,
)
from thaw.errors import ErrorInfo
from thaw.host import HeldSegment, HostReport, Resident
from thaw.ids import HostId
from thaw.plan import StageRole

SMALL = replace(FACTS, uri="s3://m/other", n_bytes=20 * MIB, weight_bytes=19 * MIB, files={"w": 20 * MIB})
FULL = ErrorInfo("PoolFull", "the model needs 104857600 bytes of host memory")


def host(name: str, n_slabs: int, held: int = 0, seen_ms: int = 1_000) -> HostReport:
    """A host whose pool has ``n_slabs``.  The model of most tests takes two slabs."""
    return report(name, pool=pool(n_slabs, held, seen_ms), seen_wall_ms=seen_ms)


def test_a_start_goes_where_the_pool_has_room_and_waits_where_none_has() -> None:
    w, start = starting(llm_world(host("h0", 2, 1), host("h1", 2)))
    assert start.plan.stages[0].host == "h1"
    w.ready(start, idle=False)
    full = report("h1", pool=pool_after(start, 2, 2, 2_000))
    w.see(host("h0", 2, 1, 2_000), full)
    w.later(2.0)
    assert of(w.ask(CHAT), StartGroup) == []
    again = of(w.see(host("h0", 2, 0, 3_000), full), StartGroup)
    assert [s.plan.stages[0].host for s in again] == ["h0"]


def test_a_start_counts_in_slabs_and_not_in_bytes() -> None:
    """100 + 20 MiB are less than two slabs of 64 MiB hold, but together they take three slabs."""
    for n, expected in ((2, 1), (3, 2)):
        w = llm_world(host("h0", n))
        w.deploy(chat(name=OTHER, model_uri="s3://m/other"))
        w.do(ModelInspected("s3://m/other", HostId("h0"), SMALL))
        assert len(of(w.ask(CHAT), StartGroup) + of(w.ask(OTHER), StartGroup)) == expected


def test_an_instance_beside_one_that_has_the_whole_model_takes_nothing_of_the_pool() -> None:
    w, start = serving(llm_world(host("h0", 3), facts=chat(slots=1)), idle=False)
    stages, mine = w.view.model("s3://m/x").stages, start.stages[0].instance_id
    for complete in (False, True):  # an incomplete fetch may still fail, and then each instance needs its own slabs
        segment = HeldSegment(stages.whole.key, 2, complete, (mine,))
        said = w.do(HostSeen(report("h0", pool=pool(3, 0, 2_000 + complete, held=(segment,), users=(mine,)))))
        w.now += GATHER_S
        assert bool(of(said + w.ask(CHAT), StartGroup)) is complete


def test_what_a_start_took_counts_until_the_host_says_that_it_is_free() -> None:
    w, start = starting(llm_world(host("h0", 2), facts=chat(slots=1)))
    mine = start.stages[0].instance_id
    w.gone(start, created_wall_ms=1_500)
    w.later(1.0)
    assert of(w.ask(CHAT), StartGroup) == []
    assert of(w.do(HostSeen(host("h0", 2, 0, 1_400))), StartGroup) == []  # this report is older than the start
    held = (HeldSegment("its", 2, False),)  # the fetch is being given up
    assert of(w.do(HostSeen(report("h0", pool=pool(2, 0, 1_600, held=held, users=(mine,))))), StartGroup) == []
    assert of(w.do(HostSeen(report("h0", pool=pool(2, 0, 1_700, held=held)))), StartGroup) == []
    assert len(of(w.do(HostSeen(host("h0", 2, 0, 1_800))), StartGroup)) == 1


def test_an_instance_whose_fetchd_died_and_came_back_takes_nothing_of_its_pool() -> None:
    w, start = starting(llm_world(host("h0", 2), facts=chat(slots=1)))
    mine = start.stages[0].instance_id
    w.ready(start)
    assert free_slabs(w) == {"h0": 0}
    w.see(report("h0", seen_wall_ms=2_000))  # fetchd died before a report showed the model
    assert free_slabs(w) == {"h0": 0}
    w.see(report("h0", pool=pool(2, 0, 3_000, users=(mine,)), seen_wall_ms=3_000))
    assert free_slabs(w) == {"h0": 2}


def test_a_model_that_fits_no_pool_fails_with_what_it_needs_and_what_there_is() -> None:
    w = llm_world(host("h0", 1), report("h1", pool=pool(3, slab_mb=32)))
    (failed,) = of(w.ask(CHAT), FailDemand)
    assert failed.error == ErrorInfo(
        "MemoryTooSmall",
        "guest/chat needs 128 MiB of host memory for its model; the largest pool of 2 host(s) has 96 MiB",
        "raise THAW_FETCHD_POOL_MB",
    )


def test_a_model_that_fits_no_pool_whole_starts_in_stages_that_do() -> None:
    for slo_ttft_s in (60.0, 1.0):  # the start is in time, or late
        w = group_world(facts=chat(max_stages=4, slo_ttft_s=slo_ttft_s), pool=pool(3))
        start = of(w.ask(CHAT), StartGroup)[0]
        assert len(start.plan.stages) == 2


def test_who_is_refused_by_a_full_pool_starts_elsewhere_and_is_not_failed_for_it() -> None:
    w, start = starting(llm_world(host("h0", 16), host("h1", 16), max_attempts=1))
    decided = w.gone(start, error=FULL, created_wall_ms=1_100) + w.later(1.0)
    (again,) = of(decided, StartGroup)
    assert of(decided, FailDemand) == []
    assert again.activation_ids == start.activation_ids
    assert again.plan.stages[0].host != start.plan.stages[0].host
    w.gone(again, error=FULL, created_wall_ms=1_200)
    assert of(w.later(5.0), StartGroup) == []  # both hosts have refused, and no report says why
    (third,) = of(w.do(HostSeen(host(again.plan.stages[0].host, 16, 0, 1_300))), StartGroup)
    assert third.plan.stages[0].host == again.plan.stages[0].host


def with_idle_other(held: int) -> tuple[World, StartGroup]:
    """One host with a pool of three slabs: an idle instance of another model, and ``held`` slabs of an unknown owner."""
    w = llm_world(host("h0", 3), facts=chat(name=OTHER, model_uri="s3://m/other"))
    w.do(ModelInspected("s3://m/other", HostId("h0"), replace(FACTS, uri="s3://m/other")))
    start = w.serving(OTHER)
    w.deploy(chat())
    mine = start.stages[0].instance_id
    segments = (HeldSegment("its", 2, True, (mine,)), *((HeldSegment("other", held, True),) if held else ()))
    w.see(report("h0", pool=pool(3, 0, 2_000, held=segments, users=(mine,))))
    return w, start


def test_an_idle_instance_of_another_model_goes_for_its_room_in_the_pool() -> None:
    w, start = with_idle_other(0)
    decided = w.ask(CHAT)
    assert of(decided, StartGroup) == []
    assert [r.instance_id for r in of(decided, ReleaseInstance)] == [start.stages[0].instance_id]
    assert of(w.ask(CHAT), ReleaseInstance) == []  # the release is on its way


def test_an_instance_is_not_evicted_when_its_model_would_not_make_enough_room() -> None:
    w, _ = with_idle_other(2)
    decided = w.ask(CHAT)
    assert of(decided, StartGroup) + of(decided, ReleaseInstance) == []


@pytest.mark.parametrize("why", ["busy", "kept", "asked for"])
def test_an_instance_that_is_needed_is_not_evicted_for_its_room_in_the_pool(why: str) -> None:
    w, start = with_idle_other(0)
    match why:
        case "busy":
            w.said(start, READY, inflight=1)
        case "kept":
            w.deploy(chat(name=OTHER, model_uri="s3://m/other", min_instances=1))
        case "asked for":
            w.do(*(w.request(OTHER) for _ in range(9)))  # one request more than there are slots
    assert of(w.ask(CHAT), ReleaseInstance) == []


def test_a_successor_counts_what_a_group_has_on_a_host_that_it_hears_of_later() -> None:
    start = llm_world(host("h0", 5), host("h1", 5)).started()
    where = start.plan.stages[0].host
    w = World()
    found = {"plans": (start.plan,), "models": (FACTS,), "actions": (chat(),)}
    w.do(rebuilt(hosts=(host("h2", 5),), instances=(record_of(start, STARTING),), **found))
    w.do(HostSeen(host(where, 5, 0, 2_000)))
    assert free_slabs(w) == {"h2": 5, where: 3}


def test_a_function_without_a_model_counts_nothing_on_a_host_that_is_heard_of_later() -> None:
    w, start = World(), world(host("h0", 5)).started()
    w.do(rebuilt(hosts=(), instances=(record_of(start, READY),), plans=(start.plan,)))
    w.do(HostSeen(host("h0", 5, 0, 2_000)))
    assert free_slabs(w) == {"h0": 5}


# groups ------------------------------------------------------------------------------------------------------------

SIX = pool(6)
"""384 MiB.  The whole of SmolLM2 takes five slabs, and each of four stages takes two."""


FOUR = chat(forced_stages=4, max_stages=4)


def slabs_by_host(start: StartGroup) -> Counter[str]:
    found: Counter[str] = Counter()
    for stage in start.plan.stages:
        found[stage.host] += n_slabs((*stage.first_ranges, *stage.later_ranges), 64 * MIB)
    return found


def test_a_group_is_counted_whole_before_any_host_has_said_a_word() -> None:
    w, start = starting(group_world(facts=FOUR, pool=SIX))
    free = free_slabs(w)
    assert free == {host_id: 6 - n for host_id, n in slabs_by_host(start).items()}
    assert sorted(free.values()) == [1, 4, 4, 4]


def test_a_group_that_one_host_refuses_leaves_nothing_on_any() -> None:
    w, start = starting(group_world(facts=FOUR, pool=SIX))
    decided = w.gone(start, 2, error=FULL, created_wall_ms=1_100)
    others = {s.host for s in start.plan.stages if s.stage != 2}
    assert {c.host_id for c in of(decided, CancelGroup)} == others
    assert of(decided, StartGroup) == []
    w.gone(start, 0, 1, 3, created_wall_ms=1_100)
    w.see_all(*w.reports, pool=replace(SIX, seen_wall_ms=1_200))
    (again,) = of(w.later(0.3), StartGroup)
    assert len(slabs_by_host(again)) == 4


def test_the_rest_of_a_model_is_left_out_of_the_plan_where_the_pool_has_no_room_for_it() -> None:
    for n, left_out in ((6, False), (4, True)):
        start = group_world(facts=FOUR, pool=pool(n)).started()
        (full,) = (s for s in start.plan.stages if s.role is StageRole.FULL)
        assert (full.later_ranges == ()) is left_out
        assert ("left_out_bytes" in start.attrs) is left_out
        assert max(slabs_by_host(start).values()) <= n


def world_after_a_worker() -> tuple[World, StartGroup, str]:
    """Four hosts with six slabs each.  One has the whole model for an action that has just been deleted."""
    w = group_world(facts=chat(name=OTHER, forced_stages=1), pool=SIX)
    first = w.serving(OTHER)
    where = first.plan.stages[0].host
    w.see_all(where, pool=pool_after(first, 6, 5, 2_000))
    w.deploy(FOUR)
    w.do(ActionDeleted(OTHER))
    return w, first, where


def test_a_forced_size_waits_for_the_host_that_is_being_emptied_and_stacks_no_stages() -> None:
    w, first, where = world_after_a_worker()
    began_s = w.now
    assert of(w.ask(CHAT), StartGroup) == []
    assert of(w.later(0.4) + w.gone(first, created_wall_ms=1_500), StartGroup) == []
    w.now += 0.1
    (start,) = of(w.do(HostSeen(replace(w.reports[HostId(where)], pool=pool(6, 0, 3_000)))), StartGroup)
    assert len(slabs_by_host(start)) == 4
    assert w.now - began_s < 0.51, "the start followed the host's word, and no timer"


def test_a_host_that_does_not_come_free_is_not_waited_for_for_ever() -> None:
    w, *_ = world_after_a_worker()
    w.ask(CHAT)
    (start,) = of(w.later(120.0), StartGroup)
    assert len(slabs_by_host(start)) == 3


def test_a_forced_size_uses_the_hosts_that_are_left_where_another_is_busy() -> None:
    w = group_world(facts=FOUR, pool=SIX)
    w.see_all("h3", pool=pool(6, 5, 2_000))
    start = w.started()
    assert set(slabs_by_host(start)) == {"h0", "h1", "h2"}
    assert max(slabs_by_host(start).values()) <= 6


def test_who_waits_for_a_pool_is_not_held_up_by_who_waits_for_more_of_it() -> None:
    w = llm_world(host("h0", 3, 3), host("h1", 3, 3))
    w.deploy(chat(name=OTHER, model_uri="s3://m/other", need_bytes=2048 * MIB))
    w.do(ModelInspected("s3://m/other", HostId("h0"), SMALL))
    assert of(w.ask(CHAT) + w.ask(OTHER), StartGroup) == []
    (start,) = of(w.see(host("h0", 3, 2, 2_000), host("h1", 3, 2, 2_000)), StartGroup)
    assert start.plan.action == OTHER


@pytest.mark.parametrize("wait_s", [0.3, 3.0, 30.0])
@pytest.mark.parametrize("n_refusals", [0, 1, 5])
def test_a_start_that_has_to_wait_takes_the_wait_and_one_start(wait_s: float, n_refusals: int) -> None:
    """A start only waits for room, independent of how often it was refused and how long it has waited."""
    w = group_world(facts=FOUR, pool=SIX)
    seen_ms = 2_000

    def seen(taken: int) -> list[Decision]:
        nonlocal seen_ms
        seen_ms += 1_000
        return w.see_all(*w.reports, pool=pool(6, taken, seen_ms))

    if not n_refusals:
        seen(6)
    began_s, decided = w.now, w.ask(CHAT)
    for _ in range(n_refusals):  # a host that has not reported its segments refuses the start
        (start,) = of(decided + w.later(RETRY_BASE_S), StartGroup)
        w.gone(start, 0, 1, 2, 3, error=FULL, created_wall_ms=seen_ms)
        decided = seen(0)
    seen(6)
    assert of(w.later(wait_s), StartGroup) == []
    until_room_s = w.now - began_s
    (start,) = of(seen(0), StartGroup)
    assert len(slabs_by_host(start)) == 4
    alone = group_world(facts=FOUR, pool=SIX).started()
    assert foretold_s(start) <= until_room_s + foretold_s(alone) + 0.01


def test_a_group_gives_way_to_one_worker_only_where_the_pool_has_room_for_both() -> None:
    for n, gives_way in ((9, False), (10, True)):
        w, start = serving(group_world(facts=chat(max_stages=4, slo_ttft_s=4.5, keep_alive_s=600.0), pool=pool(n)))
        assert len(start.plan.stages) > 1
        w.stays_a_pipeline(start)
        there = (Resident("s3://m/x", SMOLLM2.n_bytes, "aa"),)
        w.see_all(start.plan.stages[0].host, pool=pool_after(start, n, 5, 2_000), resident=there)
        assert bool(of(w.later(5.0), ReleaseInstance)) is gives_way


# a successor ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_confirmed", [0, 2])
def test_a_start_that_a_successor_cancels_counts_until_its_hosts_have_nothing_of_it(n_confirmed: int) -> None:
    old, start = starting(group_world(facts=FOUR, pool=SIX))
    records = [record_of(start, STARTING, k, created_wall_ms=900) for k in range(n_confirmed)]
    w, decided = taken_over(start, *records, hosts=tuple(old.reports.values()), actions=(FOUR,))
    assert len(of(decided, CancelGroup)) == 4
    assert free_slabs(w) == free_slabs(old)
    there = {r.host_id: (r.instance_id,) for r in records}
    later = [replace(r, pool=replace(SIX, seen_wall_ms=2_000, users=there.get(h, ()))) for h, r in old.reports.items()]
    w.see(*later)
    assert free_slabs(w) == {h: n if h in there else SIX.n_slabs for h, n in free_slabs(old).items()}
    for k in range(n_confirmed):
        w.gone(start, k, created_wall_ms=900)
    w.see(*(replace(r, pool=replace(SIX, seen_wall_ms=3_000)) for r in old.reports.values()))
    assert set(free_slabs(w).values()) == {SIX.n_slabs}
