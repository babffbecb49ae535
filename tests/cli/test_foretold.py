"""`thaw activation explain` prints the measured time, the bound and the prediction, each with its source.

For a group it prints its size and other sizes, its hosts, and its parallel fetches.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli import test_timeline
from tests.cli.test_timeline import COLD, Line, _draw, analysed, trace
from thaw import wire
from thaw.cli.explanation import foretold
from thaw.plan import Plan
from thaw.tracing.bound import Part, Source, Term, least_s
from thaw.tracing.trace import Phase, TraceEvent

P = Phase
MODEL_BYTES = 50_000_000
BOUND = (
    Term(Part.BYTES, 1.9, Source.DECLARED, 0, "h", n_bytes=MODEL_BYTES),
    Term(Part.CONTAINER, 0.04, Source.BEST, 0, "h", 4),
    Term(Part.CONTEXT, None, Source.UNKNOWN, 0, "h"),
    Term(Part.MODEL, 0.5, Source.BEST, 0, "h", 1),
    Term(Part.ENGINE, 0.1, Source.BEST, 0, "h", 4),
    Term(Part.PREFILL, 0.1, Source.BEST, n_starts=3, prompt_tokens=64),
)
PREDICTED = (
    Term(Part.WAITED, 0.006, Source.CLOCK),
    Term(Part.CELL, 0.0, Source.HOST),
    Term(Part.CONTAINER, 0.05, Source.TYPICAL),
    Term(Part.BYTES, 2.0, Source.HOST, n_bytes=MODEL_BYTES),
    Term(Part.PREFILL, 0.2, Source.DEFAULT),
)


def plan(bound: tuple[Term, ...] = BOUND) -> Plan:
    said = {"predicted_ttft_s": 2.5, "bound_ttft_s": least_s(bound)}
    return test_timeline.plan(predicted_terms=PREDICTED, bound_terms=bound, **said)


def lines(line: Line = COLD, of: Plan | None = None, **attrs: Any) -> list[str]:
    events = [_with(e, attrs) for e in trace(line)]
    return list(foretold.lines(analysed(events), of, events))


def _with(event: TraceEvent, attrs: dict[str, Any]) -> TraceEvent:
    plain = wire.to_plain(event)
    mine = {P.PREFILL_BEGIN: {"prompt_tokens": 35}, P.PLANNED_END: attrs}.get(event.name, {})
    return wire.from_plain(TraceEvent, plain | {"attrs": mine})


THREE_ROWS = [
    "measured:  first token after 2.39 s",
    "bound:     2.10 s from the plan on (measured / bound = 1.14); partial, because not all of its terms are known",
    "  fetch     47.7 MiB 1.90 s: at the declared rate of the link",
    "  beside it container 40 ms: the best of 4 starts; context: not known; "
    "model 240 ms: this start, which was faster than all before",
    "  then      engine 100 ms: the best of 4 starts; prefill of up to 64 tokens 100 ms: the best of 3 starts",
    "predicted: 2.50 s (measured -4%)",
    "  of which  waited 6.0 ms: by the scheduler's clock; container 50 ms: the median of recent starts; "
    "47.7 MiB 2.00 s: as the host reported it then; prefill 200 ms: a default, because no start has shown it yet",
]


def test_measured_bound_and_predicted_are_three_rows_with_terms_that_say_where_they_come_from() -> None:
    assert lines(of=plan()) == THREE_ROWS


def test_what_was_foretold_is_told_when_the_plan_has_gone_with_its_group() -> None:
    attrs = {
        "predicted_ttft_s": 2.5,
        "bound_ttft_s": least_s(BOUND),
        "predicted_terms": wire.to_plain(PREDICTED),
        "bound_terms": wire.to_plain(BOUND),
    }
    assert lines(**attrs) == THREE_ROWS


def test_a_start_without_a_first_token_yet_is_given_the_bound_of_its_plan() -> None:
    running = [e for e in COLD if e[1] not in (P.FIRST_TOKEN, P.FINISHED)]
    assert not [line for line in lines(running, plan()) if "this start" in line]
    assert any(line.startswith("bound:     2.10 s") for line in lines(running, plan()))


def test_a_request_that_an_instance_was_ready_for_had_no_start_and_has_no_bound() -> None:
    before = [(at - 5_000, name, host) for at, name, host in COLD if name < P.PREFILL_BEGIN or name == P.READY]
    warm: Line = [
        *[e for e in before if e[1] is not P.RECEIVED],
        (0, P.RECEIVED, ""),
        (2, P.PREFILL_BEGIN, "h"),
        (90, P.PREFILL_END, "h"),
        (92, P.FIRST_TOKEN, ""),
    ]
    assert lines(warm, plan()) == [
        "measured:  first token after 92 ms",
        "bound:     none, an instance was ready and nothing was started for this request",
    ]


def test_a_request_that_came_while_its_start_went_on_is_measured_from_the_plan_as_the_bound_is() -> None:
    joined = [(1_500, name, host) if name is P.RECEIVED else (at, name, host) for at, name, host in COLD]
    said = lines(joined, plan())
    assert said[:2] == [
        "measured:  first token after 892 ms",
        "the request came 1.50 s after its start was planned, which took 2.39 s",
    ]
    assert said[2].startswith("bound:     2.10 s from the plan on (measured / bound = 1.14)")


def test_of_a_group_the_stage_with_the_latest_bound_is_shown() -> None:
    second = tuple(Term(t.part, t.seconds and 0.01, t.source, 1, "h1") for t in BOUND if t.part != Part.PREFILL)
    said = lines([e for e in COLD if e[1] is not P.FIRST_TOKEN], plan((*BOUND, *second)))
    assert "  of 2 stages, stage 0 has the latest" in said
    assert "  stage 0 was expected to be ready last" in said


def test_a_start_of_which_nothing_is_known_says_so() -> None:
    unknown = tuple(Term(part, None, Source.UNKNOWN) for part in (Part.BYTES, Part.PREFILL))
    assert "bound:     not known, no start has shown any of its terms" in lines(of=plan(unknown))


def test_without_a_plan_there_is_only_the_measurement() -> None:
    assert lines() == ["measured:  first token after 2.39 s"]


def test_a_prediction_that_was_raised_to_the_bound_says_so() -> None:
    raised = wire.to_plain([PREDICTED[0], Term(Part.BOUND, 2.1, Source.BEST)])
    assert lines(predicted_ttft_s=2.1, predicted_terms=raised)[-1] == (
        "  of which  waited 6.0 ms: by the scheduler's clock; "
        "no sooner than its bound 2.10 s: the best of earlier starts"
    )


def test_words_of_a_newer_scheduler_are_printed_as_they_are() -> None:
    newer = wire.to_plain([Term("teleport", 0.1, "a dream")])
    assert lines(predicted_ttft_s=2.5, predicted_terms=newer)[-1] == "  of which  teleport 100 ms: a dream"


SIZES = [
    {"stages": 1, "full": 1, "why": "ttft", "ttft_s": 10.938, "tpot_s": 0.0058},
    {"stages": 2, "full": 1, "why": "chosen", "ttft_s": 6.709, "tpot_s": 0.0113},
    {"stages": 3, "full": 1, "why": "memory", "ttft_s": 4.756, "tpot_s": 0.017},
    {"stages": 4, "full": 1, "why": "no room"},
]
PLANNED = {
    **{"action": "guest/chat", "stages": 2, "full": 1, "host": "h0", "hosts": ["h0", "h1"], "transport": "redis"},
    **{"predicted_ttft_s": 6.709, "bound_ttft_s": 6.5, "fallback": False, "sizes": SIZES},
    **{"slo_ttft_s": 7.5, "slo_tpot_s": 0.2, "t_w_s": 0.25},
}


def event(
    ms: float, name: Phase, host: str = "", stage: int = 0, n: int | None = None, attrs: dict[str, Any] | None = None
) -> TraceEvent:
    return TraceEvent(name, "a" * 32, "", stage, host, "boot", int(ms * 1e6), int(ms * 1e6), n, attrs or {})


def group(planned: dict[str, Any]) -> list[TraceEvent]:
    """The events of two stages whose fetches overlap for most of their time."""
    return [
        event(0, Phase.RECEIVED),
        event(1, Phase.PLANNED_BEGIN),
        event(2, Phase.PLANNED_END, attrs=planned),
        event(10, Phase.FETCH_BEGIN, "h0", 0),
        event(12, Phase.CONTAINER_BEGIN, "h1", 1),
        event(14, Phase.FETCH_BEGIN, "h1", 1),
        event(40, Phase.CONTAINER_END, "h1", 1),
        event(6010, Phase.FETCH_END, "h0", 0, 150_000_000),
        event(6514, Phase.FETCH_END, "h1", 1, 162_500_000),
        event(6600, Phase.FIRST_TOKEN),
    ]


def drawn(planned: dict[str, Any]) -> list[str]:
    return _draw(group(planned), None)


def test_a_groups_size_is_explained_by_what_the_others_were_worth() -> None:
    lines = drawn(PLANNED)
    at = lines.index("2 stages, 1 full, over redis: h0 (full), h1")
    assert lines[at + 1 : at + 6] == [
        "objective: first token in 7.50 s, of which 250 ms were waited when it was planned",
        "  1 stage, 1 full:  first token in 10.94 s, then 5.8 ms a token: first token later than the objective",
        "  2 stages, 1 full: first token in 6.71 s, then 11 ms a token: chosen",
        "  3 stages, 1 full: first token in 4.76 s, then 17 ms a token: in time too, but holds more memory",
        "  4 stages, 1 full: no room for so many workers on hosts of their own",
    ]


def candidate(host: str, source: str, ready_s: float, runtime_s: float, copied_s: float, **more: Any) -> dict[str, Any]:
    times = {"ready_s": ready_s, "runtime_s": runtime_s, "copied_s": copied_s}
    return {"host": host, "from": source, **times, **more}


CANDIDATES = [
    candidate("h0", "remote", 6.5, 0.7, 1.3, role="full", fetched_s=6.5, queue_s=0.4),
    candidate("host-1", "memory", 3.1, 3.1, 0.9, role="low", fetched_s=0.2, cell_wait_s=2.4),
    candidate("h2", "resident", 0.9, 0.7, 0.9),
    {"host": "h3", "from": "remote", "why": "promised"},
]


def test_each_host_that_was_looked_at_says_when_a_worker_would_have_its_part_there_and_why() -> None:
    lines = drawn(PLANNED | {"candidates": CANDIDATES})
    at = lines.index("a worker would have its part on")
    assert lines[at + 1 : at + 5] == [
        "  h0 (chosen, full):    after 6.50 s: its bytes come over the network; all there after 6.50 s, 400 ms of it"
        " behind others; runtime after 700 ms; copied after 1.30 s at the earliest",
        "  host-1 (chosen, low): after 3.10 s: its bytes are copied within host memory; all there after 200 ms;"
        " runtime after 3.10 s, 2.40 s of it until its stem cell is made; copied after 900 ms at the earliest",
        "  h2:                   after 900 ms: its bytes lie in host memory; runtime after 700 ms; copied after 900 ms"
        " at the earliest",
        "  h3:                   not now: would break the deadline of a fetch that was admitted",
    ]


def test_the_fetches_of_a_group_stand_one_above_the_other_and_are_added_up() -> None:
    lines = drawn(PLANNED)
    rows = [i for i, line in enumerate(lines) if " fetch " in line and "█" in line]
    assert len(rows) == 2
    assert rows[1] == rows[0] + 1
    together = [a == b == "█" for a, b in zip(*(lines[i] for i in rows), strict=False)]
    assert sum(together) > 40
    assert "2 fetches side by side: 298 MiB in 6.50 s, 384 Mbit/s; one after another 12.50 s" in lines


def test_a_forced_size_says_so_and_an_objective_that_cannot_be_had_too() -> None:
    forced = {k: v for k, v in PLANNED.items() if k != "sizes"} | {"fallback": True, "t_w_s": 0.0}
    lines = drawn(forced)
    assert "2 stages, 1 full, over redis: h0 (full), h1; the size was forced by scaling.stages" in lines
    assert "objective: first token in 7.50 s; it cannot be met, so no fetch has a deadline" in lines


@pytest.mark.parametrize("planned", [{}, {"action": "guest/hello", "stages": 1, "host": "h0"}])
def test_an_ordinary_function_has_no_reasons(planned: dict[str, Any]) -> None:
    assert not any(line.startswith(("objective", "1 stage")) for line in drawn(planned))
