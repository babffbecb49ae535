"""Turn a trace into intervals on one axis, and find the gaps that no interval explains.

This module is pure: events in, values out.  ``thaw activation explain`` draws the timeline, and benchmarks count with
it.

::

    received                                                     first token
    |── queued ───────────────────────────────────────────────────|          holds others: not a leaf
      |planned|  |── fetch ───────────────────────|                          leaves
                 |container|      |── load ────────|engine| |prefill|
    |-|                                                   |-|                gaps: no leaf covers them

A *leaf* is an interval in which some work is done.  ``queued``, ``init`` and ``run`` usually hold other intervals; they
are leaves only if they hold none (an ordinary function's init is its own explanation).  ``stopped`` is never a leaf: it
says why the leaves of a process took longer.  ``consolidate`` and ``move`` are none either: no request waits for them.
thaw/tracing/evidence.py computes how much of a leaf is explained.

The monotonic clock of a boot places the events of that boot on the axis.  For events of another boot, the distance of
the two clocks is added (clocks.py), which is known only to within an error.  Lengths are exact, because begin and end
of an interval come from one machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from thaw.tracing.clocks import ClockSkew, compare
from thaw.tracing.trace import Phase, TraceEvent

_HOLDERS = ("queued", "init", "run")
_NO_LEAVES = ("stopped", "consolidate", "move")
_NS = 1e9


@dataclass(frozen=True, slots=True)
class Interval:
    """Times are seconds since the request's arrival.  If ``is_open`` is set, the end was never written, and the
    interval is drawn up to the last event.
    """

    phase: str
    host: str
    stage: int
    begin_s: float
    end_s: float
    n_bytes: int | None = None
    attrs: tuple[tuple[str, object], ...] = ()
    is_open: bool = False
    is_leaf: bool = True

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    @property
    def was_resident(self) -> bool:
        """Whether the bytes of a fetch were in the host's memory before it began: then no byte moved, and there is no
        rate.
        """
        return dict(self.attrs).get("resident") is True

    @property
    def bytes_per_s(self) -> float | None:
        if self.was_resident or not self.n_bytes or self.seconds <= 0:
            return None
        return self.n_bytes / self.seconds


@dataclass(frozen=True, slots=True)
class Instant:
    phase: str
    host: str
    stage: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Gap:
    """Time that no leaf covers, named by the phase that ended before it and the phase that began after it."""

    begin_s: float
    end_s: float
    after: str
    before: str

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """``end_s`` is the first token's time, or the end of the run of a function that has no tokens.

    ``gaps`` are the times that no leaf covers; overlapping leaves do not matter.
    """

    intervals: tuple[Interval, ...]
    instants: tuple[Instant, ...]
    end_s: float
    end_name: str
    gaps: tuple[Gap, ...]
    clocks: tuple[ClockSkew, ...] = ()  # for the other machines than the one on which the request arrived

    @property
    def longest_gap(self) -> Gap | None:
        return max(self.gaps, key=lambda g: g.seconds, default=None)

    @property
    def longest_leaf(self) -> Interval | None:
        return max((i for i in self.intervals if i.is_leaf), key=lambda i: i.seconds, default=None)

    @property
    def fetched_bytes(self) -> int:
        return sum(i.n_bytes or 0 for i in self.intervals if i.phase == "fetch")


def analyse(events: Sequence[TraceEvent]) -> Timeline | None:
    """The timeline of a trace; None if there are no events."""
    if not events:
        return None
    place = _Axis(events)
    intervals, instants = _pair([e for e in events if e.name is not Phase.CLOCK], place)
    end_s, end_name = _end(instants, intervals)
    shown = _mark_leaves([i for i in intervals if i.end_s >= 0])  # an interval before the request did not serve it
    leaves = [i for i in shown if i.is_leaf]
    covered = union((max(0.0, i.begin_s), min(end_s, i.end_s)) for i in leaves)
    return Timeline(
        tuple(sorted(shown, key=lambda i: (i.begin_s, -i.end_s))),
        tuple(sorted(instants, key=lambda i: i.at_s)),
        end_s,
        end_name,
        tuple(_gaps(covered, end_s, end_name, leaves)),
        place.clocks,
    )


class _Axis:
    """Converts nanoseconds of each machine's clock to seconds since the request's arrival."""

    def __init__(self, events: Sequence[TraceEvent]) -> None:
        received = [e for e in events if e.name is Phase.RECEIVED]
        self._zero = received[0] if received else min(events, key=lambda e: e.wall_ns)
        self._clocks = compare(events, self._zero)

    @property
    def clocks(self) -> tuple[ClockSkew, ...]:
        return tuple(self._clocks.values())

    def __call__(self, event: TraceEvent) -> float:
        clock = self._clocks.get(event.boot_id)
        return (event.mono_ns + (clock.shift_ns if clock else 0) - self._zero.mono_ns) / _NS


def _pair(events: Iterable[TraceEvent], place: _Axis) -> tuple[list[Interval], list[Instant]]:
    """Pair the begin and end events of the same phase, place and owner.

    A repeated phase (a second try) gives a second interval.
    """
    open_: dict[tuple[object, ...], list[TraceEvent]] = {}
    intervals: list[Interval] = []
    instants: list[Instant] = []
    ordered = sorted(events, key=lambda e: (place(e), not e.name.endswith(".begin")))
    for event in ordered:
        phase, _, edge = event.name.partition(".")
        key = (phase, event.boot_id, event.host, event.stage, event.activation_id or event.group_id)
        if edge == "begin":
            open_.setdefault(key, []).append(event)
        elif edge == "end" and open_.get(key):
            intervals.append(_interval(open_[key].pop(), event, place))
        elif edge != "end":  # an end alone is ignored: its begin was on a machine that is gone
            instants.append(Instant(str(event.name), event.host, event.stage, place(event)))
    last = place(ordered[-1])
    for event in (e for waiting in open_.values() for e in waiting):
        phase = event.name.partition(".")[0]
        begin = place(event)
        intervals.append(
            Interval(
                phase,
                event.host,
                event.stage,
                begin,
                max(begin, last),
                event.n_bytes,
                tuple(event.attrs.items()),
                is_open=True,
            )
        )
    return intervals, instants


def _interval(begin: TraceEvent, end: TraceEvent, place: _Axis) -> Interval:
    begin_s = place(begin)
    end_s = begin_s + (end.mono_ns - begin.mono_ns) / _NS  # one machine's clock: exact, wherever begin is placed
    n_bytes = end.n_bytes if end.n_bytes is not None else begin.n_bytes
    attrs = {**begin.attrs, **end.attrs}
    fetched = attrs.get("fetched_bytes")
    if isinstance(fetched, int):
        n_bytes = fetched  # the bytes that crossed the link; the segment is a little larger, its ranges are aligned
    return Interval(
        begin.name.partition(".")[0], begin.host, begin.stage, begin_s, end_s, n_bytes, tuple(attrs.items())
    )


def _end(instants: list[Instant], intervals: list[Interval]) -> tuple[float, str]:
    for name in (Phase.FIRST_TOKEN, Phase.FINISHED):
        found = [i.at_s for i in instants if i.phase == name and i.at_s >= 0]
        if found:
            return min(found), str(name)
    ends = [i.end_s for i in intervals if i.phase == "run"] or [i.end_s for i in intervals]
    return max([0.0, *ends]), "end of run" if any(i.phase == "run" for i in intervals) else "last event"


def _mark_leaves(intervals: list[Interval]) -> list[Interval]:
    beside = [_with_leaf(i, False) for i in intervals if i.phase in _NO_LEAVES]
    marked = [*beside, *(i for i in intervals if i.phase not in (*_HOLDERS, *_NO_LEAVES))]
    # The shortest come first, so that a queue that holds only an init is known to hold a leaf.
    for holder in sorted((i for i in intervals if i.phase in _HOLDERS), key=lambda i: i.seconds):
        holds = any(i.is_leaf and i.begin_s < holder.end_s and i.end_s > holder.begin_s for i in marked)
        marked.append(_with_leaf(holder, not holds))
    return marked


def _with_leaf(i: Interval, is_leaf: bool) -> Interval:
    return Interval(i.phase, i.host, i.stage, i.begin_s, i.end_s, i.n_bytes, i.attrs, i.is_open, is_leaf)


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of the spans as disjoint spans in order."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(s for s in spans if s[1] > s[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _gaps(covered: list[tuple[float, float]], end_s: float, end_name: str, leaves: list[Interval]) -> Iterable[Gap]:
    edges = [0.0, *(t for span in covered for t in span), end_s]
    for begin, end in zip(edges[0::2], edges[1::2], strict=True):
        if end > begin:
            before = next((i.phase for i in sorted(leaves, key=lambda i: i.begin_s) if i.begin_s >= end), end_name)
            ended = max((i for i in leaves if i.end_s <= begin), key=lambda i: i.end_s, default=None)
            yield Gap(begin, end, ended.phase if ended else "received", before if end < end_s else end_name)
