"""`thaw activation explain` prints the measured time, the bound and the prediction, each with its source."""

from __future__ import annotations

from typing import Any

from tests.cli.test_timeline import COLD, Line, shifted, trace
from thaw import wire
from thaw.cli.explanation import foretold
from thaw.ids import ActionName, GroupId, PlanId
from thaw.plan import Plan
from thaw.tracing.bound import Part, Source, Term, least_s
from thaw.tracing.timeline import analyse
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
    return Plan(
        1,
        PlanId("p"),
        GroupId("g" * 32),
        1,
        ActionName("guest/chat"),
        "0.0.1",
        (),
        predicted_ttft_s=2.5,
        bound_ttft_s=least_s(bound),
        predicted_terms=PREDICTED,
        bound_terms=bound,
    )


def lines(line: Line = COLD, of: Plan | None = None, **attrs: Any) -> list[str]:
    events = [_with(e, attrs) for e in trace(line)]
    timeline = analyse(events)
    assert timeline is not None
    return list(foretold.lines(timeline, of, events))


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
    assert lines(shifted(COLD, 0, 0)) == ["measured:  first token after 2.39 s"]


def test_a_prediction_that_was_raised_to_the_bound_says_so() -> None:
    raised = wire.to_plain([PREDICTED[0], Term(Part.BOUND, 2.1, Source.BEST)])
    assert lines(predicted_ttft_s=2.1, predicted_terms=raised)[-1] == (
        "  of which  waited 6.0 ms: by the scheduler's clock; "
        "no sooner than its bound 2.10 s: the best of earlier starts"
    )


def test_words_of_a_newer_scheduler_are_printed_as_they_are() -> None:
    newer = wire.to_plain([Term("teleport", 0.1, "a dream")])
    assert lines(predicted_ttft_s=2.5, predicted_terms=newer)[-1] == "  of which  teleport 100 ms: a dream"
