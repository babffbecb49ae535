"""What ``explain`` says about the hosts of an answer together: the path of each hop between two stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from thaw.hops import Hop, hops_of
from thaw.timeline import Timeline
from thaw.trace import TraceEvent


def hop_lines(events: Iterable[TraceEvent], timeline: Timeline) -> Iterator[str]:
    """One line for each hop; none for an answer of a single container."""
    hosts = {i.stage: i.host for i in timeline.intervals if i.host}
    return (_hop_line(hop, hosts) for hop in hops_of(events))


def _hop_line(hop: Hop, hosts: dict[int, str]) -> str:
    ends = [f"stage {stage}" + (f" ({hosts[stage]})" if stage in hosts else "") for stage in (hop.stage, hop.to)]
    return f"hop {ends[0]} → {ends[1]}: {', then '.join(hop.paths)}"
