"""One cold start as a benchmark reads it from its trace.  ``thaw activation explain`` uses the same accounting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thaw.tracing.evidence import Explanation, explain
from thaw.tracing.timeline import Timeline, analyse
from thaw.tracing.trace import Phase, TraceEvent


@dataclass(frozen=True, slots=True)
class Start:
    """One cold start as its trace tells it.  All times are seconds since the request's arrival."""

    ttft_s: float
    first_byte_s: float
    last_byte_s: float
    timeline: Timeline
    explanation: Explanation

    @property
    def unexplained_s(self) -> float:
        return self.explanation.unexplained_s


def read_start(events: Sequence[TraceEvent], link_bytes_per_s: float) -> Start:
    timeline = analyse(events)
    if timeline is None or timeline.end_name != Phase.FIRST_TOKEN:
        raise SystemExit(f"no first token in the trace: {[e.name for e in events]}")
    first = min((i.at_s for i in timeline.instants if i.phase == Phase.FETCH_FIRST_BYTE), default=float("nan"))
    last = max((i.end_s for i in timeline.intervals if i.phase == "fetch"), default=float("nan"))
    return Start(timeline.end_s, first, last, timeline, explain(timeline, lambda _: link_bytes_per_s))
