"""The lines of ``explain`` for the measured time, the bound and the prediction, with their terms and sources.

*Measured* is the time in the trace.  *Bound* is the least time that the bytes and the best of all starts allow
(``tracing/bound.py``).  It counts from the plan, and once this start has ended, it is among those starts..
 *Predicted* is the time that the scheduler expected when it planned, waits included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from thaw import wire
from thaw.cli.output.tables import duration, size
from thaw.errors import ProtocolError
from thaw.plan import Plan
from thaw.tracing.bound import FETCH, RUNTIME, Part, Source, Term, is_partial, last_stage, least_s, with_this_start
from thaw.tracing.start_times import start_took
from thaw.tracing.timeline import Timeline
from thaw.tracing.trace import Phase, TraceEvent

_WORTH_SAYING_S: Final = 0.0005
_NS: Final = 1e9
_WORDS: Final = {
    Source.UNKNOWN: "not known",
    Source.DECLARED: "at the declared rate of the link",
    Source.MEASURED: "at the rate that the host has measured",
    Source.BEST: "the best of earlier starts",
    Source.RESIDENT: "in the host's memory",
    Source.SHARED: "another start was fetching them",
    Source.THIS_START: "this start, which was faster than all before",
    Source.TYPICAL: "the median of recent starts",
    Source.DEFAULT: "a default, because no start has shown it yet",
    Source.HOST: "as the host reported it then",
    Source.CLOCK: "by the scheduler's clock",
}


@dataclass(frozen=True, slots=True)
class _Told:
    """The prediction and the bound for the start that served a request, and how long the start took."""

    predicted_s: float | None
    predicted: tuple[Term, ...]
    bound_s: float | None
    bound: tuple[Term, ...]
    measured_s: float  # counted from the plan, as prediction and bound are
    joined_s: float  # seconds from the plan to the request; 0 if the start was planned for it


def lines(timeline: Timeline, plan: Plan | None, events: Sequence[TraceEvent]) -> Iterator[str]:
    what = timeline.end_name.replace("_", " ")
    yield f"measured:  {what} after {duration(timeline.end_s)}"
    ready = [i.at_s for i in timeline.instants if i.phase == Phase.READY]
    if ready and max(ready) < 0:
        yield "bound:     none, an instance was ready and nothing was started for this request"
        return
    told = _told(timeline, plan, events)
    if told.joined_s > 0:
        yield (
            f"the request came {duration(told.joined_s)} after its start was planned, "
            f"which took {duration(told.measured_s)}"
        )
    yield from _bound(told)
    yield from _predicted(told)


def _bound(told: _Told) -> Iterator[str]:
    if not told.bound:  # this is an ordinary function, or the scheduler names no terms
        return
    if told.bound_s is None:
        yield "bound:     not known, no start has shown any of its terms"
        return
    ratio = f" (measured / bound = {told.measured_s / told.bound_s:.2f})" if told.bound_s > 0 else ""
    partial = "; partial, because not all of its terms are known" if is_partial(told.bound) else ""
    yield f"bound:     {duration(told.bound_s)} from the plan on{ratio}{partial}"
    stages = {t.stage for t in told.bound}
    stage = last_stage(told.bound)
    if len(stages) > 1:
        yield f"  of {len(stages)} stages, stage {stage} has the latest"
    mine = [t for t in told.bound if t.stage == stage or t.part == Part.PREFILL]
    yield from _row("fetch", [t for t in mine if t.part in FETCH])
    yield from _row("beside it", [t for t in mine if t.part in RUNTIME])
    yield from _row("then", [t for t in mine if t.part in (Part.ENGINE, Part.PREFILL)])


def _row(label: str, terms: Sequence[Term]) -> Iterator[str]:
    """One line for ``terms``, with terms of the same source together.  Terms that take no time are left out, unless all
    of them take none.
    """
    long_ones = [t for t in terms if t.seconds is None or t.seconds >= _WORTH_SAYING_S]
    by_source: dict[str, list[str]] = {}
    for term in long_ones or terms:
        by_source.setdefault(_source(term), []).append(_term(term))
    if by_source:
        said = "; ".join(f"{', '.join(each)}: {source}" for source, each in by_source.items())
        yield f"  {label:<9} {said}"


def _predicted(told: _Told) -> Iterator[str]:
    if told.predicted_s is None:
        return
    off = told.measured_s / told.predicted_s - 1
    yield f"predicted: {duration(told.predicted_s)} (measured {off:+.0%})"
    if len({t.stage for t in told.bound}) > 1:
        yield f"  stage {max((t.stage for t in told.predicted), default=0)} was expected to be ready last"
    yield from _row("of which", told.predicted)


def _term(term: Term) -> str:
    prompts = f" of up to {term.prompt_tokens} tokens" if term.prompt_tokens else ""
    name = size(term.n_bytes) if term.n_bytes and term.part in FETCH else term.part
    seconds = "" if term.seconds is None else f" {duration(term.seconds)}"
    return f"{name}{prompts}{seconds}"


def _source(term: Term) -> str:
    if term.source == Source.BEST and term.n_starts:
        rate = "the best rate" if term.part in (*FETCH, Part.COPY) else "the best"
        return f"{rate} of {term.n_starts} start{'s' if term.n_starts != 1 else ''}"
    return _WORDS.get(Source(term.source), term.source) if term.source in set(Source) else term.source


def _told(timeline: Timeline, plan: Plan | None, events: Sequence[TraceEvent]) -> _Told:
    """Read the prediction from the plan.  A plan is deleted with its group; then read it from the ``planned`` event."""
    attrs = dict(next((e.attrs for e in events if e.name == Phase.PLANNED_END), {}))
    if plan is not None:
        predicted, bound = plan.predicted_terms, plan.bound_terms
        predicted_s, bound_s = plan.predicted_ttft_s, plan.bound_ttft_s
    else:
        predicted, bound = _read(attrs.get("predicted_terms")), _read(attrs.get("bound_terms"))
        predicted_s, bound_s = _number(attrs.get("predicted_ttft_s")), _number(attrs.get("bound_ttft_s"))
    if bound and timeline.end_name == Phase.FIRST_TOKEN:
        bound = with_this_start(bound, start_took(events))
        bound_s = least_s(bound)
    joined_s = _joined_s(timeline, events)
    return _Told(predicted_s, predicted, bound_s, bound, timeline.end_s + joined_s, joined_s)


def _joined_s(timeline: Timeline, events: Sequence[TraceEvent]) -> float:
    """The seconds from the start of planning to the request; 0 if the request came before planning ended.

    The scheduler reads a demand before it plans, so nothing that counts from the plan begins earlier.
    """
    received = next((e for e in events if e.name == Phase.RECEIVED), None)
    begin, end = (
        next((e for e in events if e.name == name), None) for name in (Phase.PLANNED_BEGIN, Phase.PLANNED_END)
    )
    if received is None or begin is None or end is None:
        return 0.0
    shift_ns = next((c.shift_ns for c in timeline.clocks if c.boot_id == begin.boot_id), 0)
    if end.mono_ns + shift_ns >= received.mono_ns:
        return 0.0
    return (received.mono_ns - begin.mono_ns - shift_ns) / _NS


def _read(plain: object) -> tuple[Term, ...]:
    """The terms in ``plain``; () if this command line cannot read them."""
    try:
        return tuple(wire.from_plain(Term, each) for each in plain) if isinstance(plain, list) else ()
    except ProtocolError:
        return ()


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
