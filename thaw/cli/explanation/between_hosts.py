"""The lines of ``explain`` that compare the hosts of an answer: their clocks, and the path of each hop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from thaw.tracing.clocks import ClockSkew
from thaw.tracing.hops import Hop, hops_of
from thaw.tracing.timeline import Timeline
from thaw.tracing.trace import Phase, TraceEvent


def clock_lines(events: Sequence[TraceEvent], timeline: Timeline) -> Iterator[str]:
    """One line for each machine except the one on which the request arrived."""
    others = {clock.boot_id for clock in timeline.clocks}
    reference = _name([e for e in events if e.boot_id not in others])
    for clock in timeline.clocks:
        yield _clock_line(clock, _name([e for e in events if e.boot_id == clock.boot_id]), reference)


def _clock_line(clock: ClockSkew, name: str, reference: str) -> str:
    if clock.error_ns is None:
        return f"clocks: nothing compares {name} with {reference}; its phases stand where its own clock puts them"
    side = "ahead of" if clock.ahead_ns >= 0 else "behind"
    return f"clocks: {name} is {_ms(abs(clock.ahead_ns))} {side} {reference}, ± {_ms(clock.error_ns)}"


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.1f} ms"


def _name(events: Iterable[TraceEvent]) -> str:
    """The name of the machine that wrote the events: its hosts, else the component that runs there."""
    found = list(events)
    hosts = sorted({e.host for e in found if e.host})
    if hosts:
        return " and ".join(hosts)
    return "the scheduler" if all(e.name in _SCHEDULER for e in found) else "the gateway"


_SCHEDULER = (Phase.PLANNED_BEGIN, Phase.PLANNED_END, Phase.CLOCK)


def hop_lines(events: Iterable[TraceEvent], timeline: Timeline) -> Iterator[str]:
    """One line for each hop; none for an answer of a single container."""
    hosts = {i.stage: i.host for i in timeline.intervals if i.host}
    return (_hop_line(hop, hosts) for hop in hops_of(events))


def _hop_line(hop: Hop, hosts: dict[int, str]) -> str:
    ends = [f"stage {stage}" + (f" ({hosts[stage]})" if stage in hosts else "") for stage in (hop.stage, hop.to)]
    return f"hop {ends[0]} → {ends[1]}: {', then '.join(hop.paths)}"
