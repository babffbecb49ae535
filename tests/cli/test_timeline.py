"""A trace becomes intervals, leaves, gaps and a picture."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from thaw import wire
from thaw.cli.explanation import explain
from thaw.errors import NotFound
from thaw.ids import ActionName, GroupId, HostId, PlanId
from thaw.model import FileRange
from thaw.plan import Plan, PlanModel, PlanStage, StageRole
from thaw.tracing.timeline import Timeline, analyse, union
from thaw.tracing.trace import Phase, TraceEvent

P = Phase
COLD = [  # (ms, phase, host): a cold start as it is recorded
    *((0, P.RECEIVED, ""), (1, P.QUEUED_BEGIN, ""), (2, P.PLANNED_BEGIN, ""), (8, P.PLANNED_END, "")),
    *((9, P.FETCH_BEGIN, "h"), (9, P.COMMAND, "h"), (10, P.CONTAINER_BEGIN, "h"), (12, P.FETCH_FIRST_BYTE, "h")),
    *((60, P.CONTAINER_END, "h"), (60, P.INIT_BEGIN, "h"), (60, P.MODEL_BEGIN, "h"), (300, P.MODEL_END, "h")),
    *((300, P.LOAD_BEGIN, "h"), (2009, P.FETCH_END, "h"), (2050, P.LOAD_END, "h")),
    *((2050, P.ENGINE_BEGIN, "h"), (2200, P.ENGINE_END, "h"), (2201, P.INIT_END, "h"), (2201, P.READY, "h")),
    *((2202, P.QUEUED_END, ""), (2203, P.DISPATCHED, ""), (2204, P.PREFILL_BEGIN, "h"), (2390, P.PREFILL_END, "h")),
    *((2392, P.FIRST_TOKEN, ""), (3000, P.FINISHED, "")),
]
Line = Sequence[tuple[float, Phase, str]]


def trace(line: Line, boots: dict[str, str] | None = None, wall_error_ms: float = 0.0) -> list[TraceEvent]:
    """Events whose monotonic times begin at another value on every boot."""
    found = []
    for at, name, host in line:
        boot = (boots or {}).get(host, "boot")
        foreign = boot != "boot"
        mono = int(at * 1e6) + (777_000_000_000 if foreign else 5_000_000_000)
        wall = int((at + (wall_error_ms if foreign else 0.0)) * 1e6) + 1_700_000_000_000_000_000
        n_bytes = 50_000_000 if name is P.FETCH_END else None
        found.append(TraceEvent(name, "a" * 32, "", 0, host, boot, mono, wall, n_bytes))
    return found


def analysed(events: list[TraceEvent]) -> Timeline:
    timeline = analyse(events)
    assert timeline is not None
    return timeline


def shifted(line: Line, after_ms: float, by_ms: float) -> Line:
    return [(at + (by_ms if at > after_ms else 0), name, host) for at, name, host in line]


def test_a_cold_start_is_explained_by_the_union_of_its_leaves() -> None:
    timeline = analysed(trace(COLD))
    assert timeline.end_s == pytest.approx(2.392)
    assert timeline.end_name == "first_token"
    # no phase covers 0 to 2, 8 to 9, 2200 to 2204, and 2390 to 2392
    assert sum(g.seconds for g in timeline.gaps) == pytest.approx(0.009)
    assert {i.phase for i in timeline.intervals if not i.is_leaf} == {"queued", "init"}
    assert timeline.longest_leaf is not None
    assert timeline.longest_leaf.phase == "fetch"


@pytest.mark.parametrize(
    ("after_ms", "after", "before"),
    [
        (8, "planned", "fetch"),
        (2201, "engine", "prefill"),
        (2390, "prefill", "first_token"),
        (1, "received", "planned"),
    ],
)
def test_a_wait_of_300_ms_between_two_phases_is_the_longest_gap(after_ms: float, after: str, before: str) -> None:
    timeline = analysed(trace(shifted(COLD, after_ms, 300)))
    gap = timeline.longest_gap
    assert gap is not None
    assert (gap.after, gap.before) == (after, before)
    assert 0.300 <= gap.seconds <= 0.305
    text = "\n".join(explain.verdict(timeline, None, {}))
    assert f"longest gap: {gap.seconds * 1000:.0f} ms between {after} and {before}" in text


def test_a_wait_below_a_running_fetch_is_no_gap() -> None:
    before, after = analysed(trace(COLD)), analysed(trace(shifted(COLD, 60, 300)))
    assert sum(g.seconds for g in after.gaps) == pytest.approx(sum(g.seconds for g in before.gaps))


def test_leaves_and_gaps_add_up_to_the_whole_for_any_order_and_subset() -> None:
    rng = random.Random(7)
    for _ in range(200):
        some = [e for e in trace(COLD) if e.name is P.RECEIVED or rng.random() < 0.7]
        rng.shuffle(some)
        timeline = analysed(some)
        leaves = union((max(0, i.begin_s), min(timeline.end_s, i.end_s)) for i in timeline.intervals if i.is_leaf)
        covered_s = sum(end - begin for begin, end in leaves)
        assert covered_s + sum(g.seconds for g in timeline.gaps) == pytest.approx(timeline.end_s)
        assert all(a.end_s <= b.begin_s for a, b in itertools.pairwise(timeline.gaps))


def test_a_phase_that_never_ended_is_open_and_drawn_to_the_last_event() -> None:
    timeline = analysed(trace([e for e in COLD if e[1] not in (P.FETCH_END, P.FIRST_TOKEN, P.FINISHED)]))
    fetch = next(i for i in timeline.intervals if i.phase == "fetch")
    assert fetch.is_open
    assert fetch.end_s == pytest.approx(2.390)


def test_another_machine_s_clock_is_set_right_by_the_order_of_what_it_was_told_and_answered() -> None:
    """The host gets its command after the plan was begun, and is ready before the request is sent to it."""
    timeline = analysed(trace(COLD, boots={"h": "other"}, wall_error_ms=25_000))
    fetch = next(i for i in timeline.intervals if i.phase == "fetch")
    (clock,) = timeline.clocks
    assert clock.error_ns is not None
    assert abs(fetch.begin_s - 0.009) <= clock.error_ns / 1e9
    assert abs(clock.ahead_ns - 25_000_000_000) <= clock.error_ns < 10_000_000
    assert fetch.seconds == pytest.approx(2.0)


def test_a_machine_that_nothing_compares_stands_where_its_own_clock_puts_it() -> None:
    line = [e for e in COLD if e[1] in (P.RECEIVED, P.FETCH_BEGIN, P.FETCH_END, P.FIRST_TOKEN)]
    events = trace(line, boots={"h": "other"}, wall_error_ms=25)
    timeline = analysed(events)
    fetch = next(i for i in timeline.intervals if i.phase == "fetch")
    assert (fetch.begin_s, fetch.seconds) == (pytest.approx(0.034), pytest.approx(2.0))
    assert [c.error_ns for c in timeline.clocks] == [None]
    text = "clocks: nothing compares h with the gateway; its phases stand where its own clock puts them"
    assert text in _draw(events, None)


def test_a_warm_request_does_not_count_the_start_of_its_container() -> None:
    warm: Line = [
        *((-5000, P.FETCH_BEGIN, "h"), (-3000, P.FETCH_END, "h"), (0, P.RECEIVED, ""), (1, P.DISPATCHED, "")),
        *((2, P.PREFILL_BEGIN, "h"), (90, P.PREFILL_END, "h"), (92, P.FIRST_TOKEN, "")),
    ]
    timeline = analysed(trace(warm))
    assert [i.phase for i in timeline.intervals] == ["prefill"]
    assert timeline.end_s == pytest.approx(0.092)


def test_an_ordinary_function_is_explained_by_its_init_and_run() -> None:
    line: Line = [
        *((0, P.RECEIVED, ""), (1, P.INIT_BEGIN, "h"), (80, P.INIT_END, "h")),
        *((80, P.RUN_BEGIN, "h"), (100, P.RUN_END, "h"), (101, P.FINISHED, "")),
    ]
    timeline = analysed(trace(line))
    assert timeline.end_name == "finished"
    assert sum(g.seconds for g in timeline.gaps) == pytest.approx(0.002)


def plan(*stages: PlanStage, **more: Any) -> Plan:
    return Plan(1, PlanId("p"), GroupId("g" * 32), 1, ActionName("guest/chat"), "0.0.1", stages, **more)


def _plan() -> Plan:
    files = (FileRange("m", 0, 50_000_000),)
    stage = PlanStage(0, HostId("h"), "cpu", StageRole.FULL, (0, 30), files, pace_bytes_per_s=25_000_000)
    return plan(stage, model=PlanModel("s3://m/x", "", "", 50_000_000), predicted_ttft_s=2.5)


def _draw(events: list[TraceEvent], plan: Plan | None, width: int = 120) -> list[str]:
    screen = io.StringIO()
    reply = {"events": [wire.to_plain(e) for e in events], "plan": wire.to_plain(plan) if plan else None}
    explain.show(Console(file=screen, width=width), reply, "a" * 32)
    return screen.getvalue().splitlines()


def test_the_picture_shows_rates_bound_and_overlap() -> None:
    lines = _draw(trace(COLD), _plan())
    assert lines[0] == f"activation {'a' * 32}  guest/chat, 1 stage"
    fetch = next(x for x in lines if x.startswith("h fetch "))
    load = next(x for x in lines if x.startswith("h load "))
    assert "47.7 MiB 200 Mbit/s" in fetch
    overlap = [a == b == "█" for a, b in zip(fetch, load, strict=False)]
    assert sum(overlap) > 30, "fetch and load run at the same time, one above the other"
    assert "measured:  first token after 2.39 s" in lines
    assert "predicted: 2.50 s (measured -4%)" in lines
    assert "fetch on h: 47.7 MiB at 200 Mbit/s, 100% of the 200 Mbit/s of its resources.fetch_mbit" in lines
    assert any(x.startswith("longest phase: fetch on h, 2.00 s") for x in lines)


def test_a_fetch_with_a_limit_of_its_own_is_measured_by_it() -> None:
    lines = _draw(with_attrs(P.FETCH_END, link_bytes_per_s=125e6), _plan())
    assert "fetch on h: 47.7 MiB at 200 Mbit/s, 100% of the 200 Mbit/s of its resources.fetch_mbit" in lines
    slower = _draw(with_attrs(P.FETCH_END, link_bytes_per_s=20e6), _plan())
    assert any("of the link's 160 Mbit/s" in line for line in slower)


def with_attrs(name: Phase, **attrs: object) -> list[TraceEvent]:
    """The events of the cold start; those of this name have these attributes."""
    return [replace(e, attrs=attrs) if e.name is name else e for e in trace(COLD)]


def consolidation(begin_ms: float, end_ms: float, n_bytes: int | None = None, **attrs: object) -> list[TraceEvent]:
    begin, end = trace([(begin_ms, P.CONSOLIDATE_BEGIN, "h"), (end_ms, P.CONSOLIDATE_END, "h")])
    return [begin, replace(end, n_bytes=n_bytes, attrs=attrs)]


DONE = {"stages": 4, "rounds": 3, "tail_bytes": 300 * 1024, "whole_s": 5.25, "stall_s": 0.018}


def test_a_pipeline_that_became_one_worker_says_when_and_what_it_took() -> None:
    lines = _draw([*with_attrs(P.PLANNED_END, stages=4), *consolidation(2300, 9000, 12 << 20, **DONE)], _plan())
    assert lines[0] == f"activation {'a' * 32}  guest/chat, 4 stages"  # the plan has one stage by now
    (said,) = [line for line in lines if line.startswith("consolidation")]
    assert said == (
        "consolidation: at 9.00 s the pipeline of 4 was one worker on h: it was asked 6.70 s before, waited 5.25 s for the "
        "rest of the model, copied 12 MiB of KV cache in 3 rounds, 300 KiB of it in the last, no token came for 18 ms"
    )


WORKER = {"stages": 4, "rounds": 0, "tail_bytes": 0, "whole_s": 6.5, "stall_s": 0.0, "worker": 1, "build_s": 0.02}


@pytest.mark.parametrize(
    ("tries", "said"),
    [
        (
            [*consolidation(2300, 9000, 0, **WORKER), *consolidation(9100, 9200, stages=4, worker=2, error="no")],
            [
                "at 9.00 s stage 1 was a worker of its own on h: it was asked 6.70 s before, had the whole model and was "
                "alone after 6.50 s, built its engine in 20 ms",
                "at 9.20 s stage 2 could not become a worker on h: no",
            ],
        ),
        (
            [
                *consolidation(2300, 2400, stages=4, error="no room"),
                *consolidation(7400, 7500, stages=4, error="again"),
            ],
            ["at 2.40 s the pipeline of 4 stayed one: no room", "at 7.50 s the pipeline of 4 stayed one: again"],
        ),
    ],
    ids=["a later stage became a worker", "a pipeline could not become one worker"],
)
def test_each_try_to_become_a_worker_says_what_it_took_or_lacked(tries: list[TraceEvent], said: list[str]) -> None:
    lines = _draw([*trace(COLD), *tries], None)
    assert [line for line in lines if line.startswith("consol")] == [f"consolidation: {each}" for each in said]


def test_a_consolidation_explains_no_part_of_the_start_and_stretches_no_picture() -> None:
    plain, with_it = analysed(trace(COLD)), analysed([*trace(COLD), *consolidation(2190, 60_000, 1, **DONE)])
    assert (with_it.end_s, with_it.gaps, with_it.longest_leaf) == (plain.end_s, plain.gaps, plain.longest_leaf)
    rows = [_draw(events, _plan()) for events in (trace(COLD), [*trace(COLD), *consolidation(2190, 60_000, 1, **DONE)])]
    fetches = [next(x for x in lines if x.startswith("h fetch "))[-60:] for lines in rows]
    assert fetches[0] == fetches[1]


def move(begin_ms: float, end_ms: float, **attrs: object) -> list[TraceEvent]:
    begin, end = trace([(begin_ms, P.MOVE_BEGIN, ""), (end_ms, P.MOVE_END, "")])
    return [replace(begin, attrs={"from": "host-1"}), replace(end, attrs=attrs)]


@pytest.mark.parametrize(
    ("attrs", "said"),
    [
        (
            {"to": "host-2", "rounds": 2, "tokens": 412, "rounds_s": 0.82, "pause_s": 0.045},
            "move: at 9.00 s the answer went on on host-2, because host-1 was emptied: it asked for a slot 4.00 s before, "
            "2 rounds computed 412 tokens there in 820 ms, and no token came for 45 ms",
        ),
        (
            {"stayed": "no host has room", "rounds": 0, "tokens": 0},
            "move: the answer stayed on host-1, which was to be emptied: no host has room",
        ),
        (
            {"to": "host-2", "lost": True, "rounds": 1, "tokens": 9},
            "move: host-1 was lost at 9.00 s; host-2 was at hand and went on",
        ),
    ],
)
def test_an_answer_that_moved_or_was_to_move_says_how(attrs: dict[str, object], said: str) -> None:
    lines = _draw([*trace(COLD), *move(5000, 9000, **attrs)], _plan())
    assert [line for line in lines if line.startswith("move:")] == [said]


def test_a_move_explains_no_part_of_the_start() -> None:
    plain, with_it = analysed(trace(COLD)), analysed([*trace(COLD), *move(2190, 60_000, to="h")])
    assert (with_it.end_s, with_it.gaps, with_it.longest_leaf) == (plain.end_s, plain.gaps, plain.longest_leaf)


def test_each_hop_of_a_pipeline_says_which_path_it_took() -> None:
    first_token = next(e for e in trace(COLD) if e.name is P.PREFILL_END)
    events = [
        *trace(COLD),
        replace(first_token, attrs={"hops": ["relay", "tcp", "relay"]}),
        TraceEvent(
            P.RUN_END, boot_id="boot", wall_ns=first_token.wall_ns + 1, attrs={"hops": ["relay", "relay", "relay"]}
        ),
        replace(next(e for e in trace(COLD) if e.name is P.FETCH_BEGIN), stage=1, host="k"),
    ]
    lines = _draw(events, None)
    assert "hop stage 0 (h) → stage 1 (k): relay" in lines
    assert "hop stage 1 (k) → stage 2: tcp, then relay" in lines
    assert "hop stage 2 → stage 0 (h): relay" in lines
    assert not [line for line in _draw(trace(COLD), _plan()) if line.startswith("hop")]


def test_a_model_that_was_in_memory_is_given_no_rate() -> None:
    """256 MB that "arrived" in 0.2 ms would be 10,889,511 Mbit/s, or 3,047,923 % of the link."""
    lines = _draw(with_attrs(P.FETCH_END, resident=True), _plan())
    assert "fetch on h: none, 47.7 MiB were in the host's memory" in lines
    assert not [line for line in lines if line.startswith(("fetch", "h fetch")) and ("Mbit/s" in line or "%" in line)]


def test_the_picture_says_how_far_the_clocks_are_apart_and_how_exactly() -> None:
    events = trace(COLD, boots={"h": "other"}, wall_error_ms=-3200)
    clocks = [line for line in _draw(events, None) if line.startswith("clocks")]
    assert clocks == ["clocks: h is 3,200.5 ms behind the gateway, ± 1.6 ms"]
    assert not [line for line in _draw(trace(COLD), None) if line.startswith("clocks")]


def test_a_narrow_terminal_still_gets_a_picture() -> None:
    assert any("█" in line for line in _draw(trace(COLD), None, width=60))


def test_events_of_a_newer_platform_are_left_out_and_no_trace_is_an_error() -> None:
    screen = Console(file=io.StringIO(), width=100)
    newer = wire.to_plain(trace(COLD)[0]) | {"name": "teleport.begin"}
    with pytest.raises(NotFound, match="has no trace"):
        explain.show(screen, {"events": [newer], "plan": None}, "a" * 32)


def test_the_head_names_the_function_that_was_called_though_others_share_its_instance() -> None:
    screen = io.StringIO()
    activation = {"annotations": [{"key": "kind", "value": "llm:vllm"}, {"key": "path", "value": "guest/poems"}]}
    plan = wire.to_plain(replace(_plan(), action=ActionName("guest/.651ce")))
    reply = {"activation": activation, "events": [wire.to_plain(e) for e in trace(COLD)], "plan": plan}
    explain.show(Console(file=screen, width=120), reply, "a" * 32)
    assert screen.getvalue().splitlines()[0] == f"activation {'a' * 32}  guest/poems, 1 stage"
