"""How much of a start its trace explains, stricter than the drawing in ``thaw activation explain``.

A leaf of at most 100 ms explains itself.  A longer one explains only what its own evidence does: the bytes it moved at
the link's rate (measured elsewhere), the CPU seconds it used, the time it waited for a core, for the other threads of
a kernel it called, or for something it names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from thaw.plan import Plan
from thaw.timeline import Interval, Timeline, analyse
from thaw.trace import Phase, TraceEvent

_SHORT_S = 0.1
_LINK_SLACK = 1.02  # a shaped link's payload rate is known to about this


@dataclass(frozen=True, slots=True)
class Start:
    """One cold start as its trace tells it; seconds from the request's arrival."""

    ttft_s: float
    first_byte_s: float
    last_byte_s: float
    unexplained_s: float
    timeline: Timeline


def read_start(events: Sequence[TraceEvent], plan: Plan | None, link_bytes_per_s: float) -> Start:
    timeline = analyse(events, plan)
    if timeline is None or timeline.end_name != Phase.FIRST_TOKEN:
        raise SystemExit(f"no first token in the trace: {[e.name for e in events]}")
    first = min((i.at_s for i in timeline.instants if i.phase == Phase.FETCH_FIRST_BYTE), default=float("nan"))
    last = max((i.end_s for i in timeline.intervals if i.phase == "fetch"), default=float("nan"))
    return Start(timeline.end_s, first, last, unexplained_s(timeline, link_bytes_per_s), timeline)


def unexplained_s(timeline: Timeline, link_bytes_per_s: float) -> float:
    """From arrival to first token, less the union of what the leaves explain."""
    spans = [_explained(i, link_bytes_per_s) for i in timeline.intervals if i.is_leaf]
    return timeline.end_s - _union_s((max(0.0, b), min(timeline.end_s, e)) for b, e in spans)


def _explained(leaf: Interval, link_bytes_per_s: float) -> tuple[float, float]:
    if leaf.seconds <= _SHORT_S:
        return leaf.begin_s, leaf.end_s
    attrs = dict(leaf.attrs)
    known = sum(_number(attrs.get(name)) for name in ("cpu_s", "wait_s", "core_wait_s", "threads_wait_s"))
    if leaf.n_bytes and leaf.phase == "fetch":
        known = max(known, leaf.n_bytes / link_bytes_per_s * _LINK_SLACK)
    if attrs.get("waited_for") and "wait_s" not in attrs:
        known = leaf.seconds
    return leaf.begin_s, leaf.begin_s + min(leaf.seconds, max(known, _SHORT_S))


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _union_s(spans: Iterable[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        if end > max(begin, reached):
            total += end - max(begin, reached)
            reached = end
    return total
