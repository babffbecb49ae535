"""How far the clocks of several machines are apart, and how exactly that is known.

Two kinds of facts determine the distance, and both exist anyway.

*A round trip to the state server.*  A process reads its monotonic clock before and after a call, and the answer holds
the server's time.  The server read its clock between the two, so ``server − monotonic`` lies in an interval as long as
the round trip (NTP's estimate, RFC 5905 section 8, kept as an interval).  The intersection with the interval known so
far keeps the shortest round trips.  It contains the true offset as long as no clock drifts faster than DRIFT allows.

*An order of events.*  A command arrives after the planning that led to it began; an answer ends after the run that
produced it.  Each such pair on two machines bounds the difference of their clocks on one side.

Both kinds are inequalities ``x_a − x_b ≤ c`` between the offsets of boots, so shortest paths give the tightest interval
for every boot, and the middles of the intervals keep every order (the mean of two solutions is a solution).

Offsets are those of monotonic clocks, which do not jump when somebody sets the time.  A wall clock places a machine
on the axis only where neither kind of fact does.  This module is pure: it reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from thaw.tracing.trace import Phase, TraceEvent

DRIFT: Final = 30e-6
"""How fast two clocks may drift apart: twice RFC 5905's frequency tolerance of one clock (PHI, 15 ppm)."""
SERVER_TICK_NS: Final = 1000
"""The server reports its time in whole microseconds, rounded down."""
_SERVER: Final = "the state server's clock"
_FAR: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Reading:
    """``low_ns`` ≤ the server's time − this boot's monotonic clock ≤ ``high_ns``, when that clock was ``at_ns``."""

    at_ns: int
    low_ns: int
    high_ns: int

    @property
    def offset_ns(self) -> int:
        return (self.low_ns + self.high_ns) // 2

    @property
    def error_ns(self) -> int:
        return (self.high_ns - self.low_ns + 1) // 2

    def at(self, now_ns: int) -> Reading:
        """The reading at another time of the same clock: the interval widens by the possible drift."""
        slack = _drift_ns(now_ns - self.at_ns)
        return Reading(now_ns, self.low_ns - slack, self.high_ns + slack)


def round_trip(before_ns: int, server_ns: int, after_ns: int) -> Reading:
    """The reading from a server time (rounded down to its tick) that was taken between two of our monotonic times."""
    return Reading(after_ns, server_ns - after_ns, server_ns + SERVER_TICK_NS - before_ns)


def narrowed(known: Reading | None, new: Reading) -> Reading:
    """The intersection of both readings.  If it is empty, the server's clock was set meanwhile or another server
    answered; then the new reading is returned.
    """
    if known is None:
        return new
    old = known.at(new.at_ns)
    low, high = max(old.low_ns, new.low_ns), min(old.high_ns, new.high_ns)
    return Reading(new.at_ns, low, high) if low <= high else new


def event_of(reading: Reading, like: TraceEvent) -> TraceEvent:
    """The reading as an event of the same boot, host and owner as ``like``, valid at the time of ``like``."""
    now = reading.at(like.mono_ns)
    attrs = {"offset_ns": now.offset_ns, "error_ns": now.error_ns}
    return replace(like, name=Phase.CLOCK, n_bytes=None, attrs=attrs)


@dataclass(frozen=True, slots=True)
class ClockSkew:
    """How the clocks of one boot differ from those of the boot on which the axis begins.

    ``ahead_ns`` says how far its wall clock was ahead.  ``error_ns`` says how far its events may be from their drawn
    place.  None means that no fact compares the two boots, so the wall clock determines where its events are drawn.
    """

    boot_id: str
    shift_ns: int  # to be added to its monotonic clock to get the other boot's monotonic clock
    ahead_ns: int
    error_ns: int | None


def compare(events: Sequence[TraceEvent], zero: TraceEvent) -> Mapping[str, ClockSkew]:
    """The skew of every boot that has events, except the boot of ``zero``, by boot id."""
    boots = sorted({e.boot_id for e in events})
    found: dict[str, ClockSkew] = {}
    intervals = _intervals(events, zero) if len(boots) > 1 else {}
    for boot in boots:
        if boot != zero.boot_id:
            own = min((e for e in events if e.boot_id == boot), key=lambda e: abs(e.wall_ns - zero.wall_ns))
            found[boot] = _skew(boot, intervals.get(boot, (-_FAR, _FAR)), own, zero)
    return found


def _skew(boot: str, interval: tuple[float, float], own: TraceEvent, zero: TraceEvent) -> ClockSkew:
    low, high = interval
    by_wall = (own.wall_ns - zero.wall_ns) - (own.mono_ns - zero.mono_ns)
    if low == -_FAR or high == _FAR:
        return ClockSkew(boot, round(min(max(by_wall, low), high)), 0, None)
    shift = (int(low) + int(high)) // 2
    return ClockSkew(boot, shift, by_wall - shift, int(high) - shift)


# ── inequalities ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _AtMost:
    """(offset of ``a``) − (offset of ``b``) ≤ ``ns``.  An offset is the common time minus a monotonic clock."""

    a: str
    b: str
    ns: int


def _intervals(events: Sequence[TraceEvent], zero: TraceEvent) -> dict[str, tuple[float, float]]:
    """For each boot, the interval of its offset minus the offset of ``zero``.

    Bounds that contradict one another are not used.  If all bounds together are contradictory, the orders of the trace
    are tried before the readings, because the server's clock may have been set between two readings.
    """
    age = _Age(events, zero)
    orders = [bound for pair in _pairs(events) for bound in _order(*pair, age)]
    readings = [bound for e in events if e.name is Phase.CLOCK for bound in _read(e, age)]
    boots = {e.boot_id for e in events}
    for bounds in ([*orders, *readings], orders, readings):
        nearest = _shortest(boots | {_SERVER}, bounds)
        if nearest is not None:
            return {boot: (-nearest[zero.boot_id, boot], nearest[boot, zero.boot_id]) for boot in boots}
    return {}


class _Age:
    """How much time may lie between an event and any point of the drawing, by the monotonic clocks alone.

    The drawing lasts from ``zero`` to the last event of its boot; no event of a trace comes later than the request.
    """

    def __init__(self, events: Iterable[TraceEvent], zero: TraceEvent) -> None:
        self._last_ns: dict[str, int] = {}
        for e in events:
            self._last_ns[e.boot_id] = max(e.mono_ns, self._last_ns.get(e.boot_id, e.mono_ns))
        self._drawn_ns = self._last_ns[zero.boot_id] - zero.mono_ns

    def ns(self, event: TraceEvent) -> int:
        return self._last_ns[event.boot_id] - event.mono_ns + self._drawn_ns


def _pairs(events: Sequence[TraceEvent]) -> Iterator[tuple[TraceEvent, TraceEvent]]:
    """(earlier, later): pairs of events that cannot have happened in another order, whatever the clocks say.

    A lost instance does not send its events, and another instance continues the answer.  Then the first token may have
    come before all known prefills.
    """
    by_name: dict[Phase, list[TraceEvent]] = {}
    for e in events:
        by_name.setdefault(e.name, []).append(e)

    def of(*names: Phase) -> Iterator[TraceEvent]:
        return (e for name in names for e in by_name.get(name, ()))

    for begun in of(Phase.PLANNED_BEGIN):
        yield from ((begun, e) for e in of(Phase.COMMAND))
    dispatched = sorted(of(Phase.DISPATCHED), key=lambda e: e.mono_ns)
    if dispatched:
        yield from ((dispatched[0], e) for e in of(Phase.RUN_BEGIN, Phase.PREFILL_BEGIN))
    ended = list(of(Phase.FINISHED))
    yield from ((e, last) for last in ended for e in of(Phase.RUN_END, Phase.PREFILL_END))
    if len(dispatched) == 1:
        yield from ((e, dispatched[0]) for e in of(Phase.READY) if e.stage == 0)
        yield from ((e, first) for first in of(Phase.FIRST_TOKEN) for e in of(Phase.PREFILL_END))


def _order(earlier: TraceEvent, later: TraceEvent, age: _Age) -> Iterator[_AtMost]:
    if earlier.boot_id != later.boot_id:
        slack = _drift_ns(max(age.ns(earlier), age.ns(later)))
        yield _AtMost(earlier.boot_id, later.boot_id, later.mono_ns - earlier.mono_ns + slack)


def _read(told: TraceEvent, age: _Age) -> Iterator[_AtMost]:
    offset, error = told.attrs.get("offset_ns"), told.attrs.get("error_ns")
    if isinstance(offset, int) and isinstance(error, int):
        slack = error + _drift_ns(age.ns(told))
        yield _AtMost(told.boot_id, _SERVER, offset + slack)
        yield _AtMost(_SERVER, told.boot_id, slack - offset)


def _drift_ns(length_ns: int) -> int:
    return round(abs(length_ns) * DRIFT)


def _shortest(nodes: Iterable[str], bounds: Iterable[_AtMost]) -> dict[tuple[str, str], float] | None:
    """The tightest bound of every pair (Floyd and Warshall); None if the bounds contradict one another."""
    names = sorted(nodes)
    nearest = {(a, b): 0 if a == b else _FAR for a in names for b in names}  # integers: times are too long for floats
    for bound in bounds:
        nearest[bound.a, bound.b] = min(nearest[bound.a, bound.b], bound.ns)
    for via in names:
        for a in names:
            for b in names:
                nearest[a, b] = min(nearest[a, b], nearest[a, via] + nearest[via, b])
    return None if any(nearest[name, name] < 0 for name in names) else nearest
