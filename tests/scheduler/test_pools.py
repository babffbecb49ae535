"""Memory for models on the hosts (fetchd's pool), which may be full where a device has room."""

from __future__ import annotations

from dataclasses import replace

from gateway.scheduler.decisions import FailDemand, ReleaseInstance, StartGroup
from gateway.scheduler.events import ActionSeen, HostsSeen
from gateway.scheduler.hosts import POOL_REFUSED_MS
from relay.messages import ModelInspected
from tests.scheduler.world import CHAT, FACTS, MIB, World, chat, group_world, llm_world, of, report
from thaw.errors import ErrorInfo
from thaw.ids import ActionName, HostId
from thaw.instance import InstanceState

FULL = ErrorInfo("PoolFull", "the model needs 104857600 bytes of host memory")
OTHER = ActionName("guest/other")


def pool(host: str, pool_mb: int, held_mb: int = 0, seen_ms: int = 1_000) -> object:
    return report(host, segment_pool_bytes=pool_mb * MIB, segment_held_bytes=held_mb * MIB, seen_wall_ms=seen_ms)


def test_a_start_goes_where_the_pool_has_room_and_waits_where_none_has() -> None:
    w = llm_world(pool("h0", 128, 64), pool("h1", 128))
    (start,) = of(w.ask(CHAT), StartGroup)
    assert start.plan.stages[0].host == "h1"
    w.ready(start, idle=False)
    full = (pool("h0", 128, 64, 2_000), pool("h1", 128, 100, 2_000))
    w.do(HostsSeen(full))
    w.later(2.0)
    assert of(w.ask(CHAT), StartGroup) == []
    again = of(w.do(HostsSeen((pool("h0", 128, 0, 3_000), full[1]))) + w.later(2.0), StartGroup)
    assert [s.plan.stages[0].host for s in again] == ["h0"]


def test_what_was_decided_counts_before_the_host_reports_it() -> None:
    w = llm_world(pool("h0", 128), facts=chat(slots=1))
    assert len(of(w.ask(CHAT), StartGroup)) == 1
    assert of(w.ask(CHAT), StartGroup) == []  # its 100 MiB are on their way into a pool of 128


def test_a_model_that_fits_no_pool_fails_with_what_it_needs_and_what_there_is() -> None:
    w = llm_world(pool("h0", 64), pool("h1", 96))
    (failed,) = of(w.ask(CHAT), FailDemand)
    assert failed.error == ErrorInfo(
        "MemoryTooSmall",
        "guest/chat needs 100 MiB of host memory for its model; the largest pool of 2 host(s) has 96 MiB",
        "raise THAW_FETCHD_POOL_MB",
    )


def test_a_model_that_fits_no_pool_whole_starts_in_stages_that_do() -> None:
    for slo_ttft_s in (60.0, 1.0):  # in time or not
        w = group_world(facts=chat(max_stages=4, slo_ttft_s=slo_ttft_s), segment_pool_bytes=192 * MIB)
        start = of(w.ask(CHAT), StartGroup)[0]
        assert len(start.plan.stages) == 2


def test_a_host_that_does_not_tell_of_its_pool_is_taken_at_its_device_memory() -> None:
    assert len(of(llm_world(report("h0")).ask(CHAT), StartGroup)) == 1


def test_who_is_refused_by_a_full_pool_starts_elsewhere_and_is_not_failed_for_it() -> None:
    w = llm_world(pool("h0", 1024), pool("h1", 1024), max_attempts=1)
    (start,) = of(w.ask(CHAT), StartGroup)
    decided = w.said(start, InstanceState.GONE, error=FULL) + w.later(1.0)
    (again,) = of(decided, StartGroup)
    assert of(decided, FailDemand) == []
    assert again.activation_ids == start.activation_ids
    assert again.plan.stages[0].host != start.plan.stages[0].host
    refused = again.plan.stages[0].host
    w.said(again, InstanceState.GONE, error=FULL)
    assert of(w.later(5.0), StartGroup) == []  # both have refused
    host = pool(refused, 1024, 0, 1_000 + POOL_REFUSED_MS)
    (third,) = of(w.do(HostsSeen((host, pool("h1" if refused == "h0" else "h0", 1024)))) + w.later(2.0), StartGroup)
    assert third.plan.stages[0].host == refused


def with_idle_other(held_mb: int) -> tuple[World, StartGroup]:
    """One host whose pool is held by an idle instance of another model."""
    w = llm_world(pool("h0", 192), facts=chat(name=OTHER, model_uri="s3://other"))
    w.do(ModelInspected("s3://other", HostId("h0"), replace(FACTS, uri="s3://other")))
    (start,) = of(w.ask(OTHER), StartGroup)
    w.ready(start)
    w.do(ActionSeen(chat()))
    w.do(HostsSeen((pool("h0", 192, held_mb, 2_000),)))
    return w, start


def test_an_idle_instance_of_another_model_goes_for_its_room_in_the_pool() -> None:
    w, start = with_idle_other(100)
    decided = w.ask(CHAT)
    assert of(decided, StartGroup) == []
    assert [r.instance_id for r in of(decided, ReleaseInstance)] == [start.stages[0].instance_id]


def test_an_instance_is_not_evicted_when_its_model_would_not_make_enough_room() -> None:
    w, _ = with_idle_other(192 + 100)
    decided = w.ask(CHAT)
    assert of(decided, StartGroup) + of(decided, ReleaseInstance) == []
