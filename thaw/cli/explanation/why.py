"""Says in sentences why a group has its size and its hosts, from the reasons that the scheduler noted with its plan.

The ``planned`` event carries the reasons (gateway/scheduler/placement/reasons.py), so they outlive the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from thaw.cli.output.tables import duration, size
from thaw.tracing.timeline import Interval, Timeline

_REASONS = {
    "chosen": "chosen",
    "no room": "no room for so many workers on hosts of their own",
    "ttft": "first token later than the objective",
    "tpot": "tokens slower than the objective",
    "promised": "would break the deadline of a fetch that was admitted",
    "sharing": "in time too, but more of its workers share a device",
    "memory": "in time too, but holds more memory",
    "larger": "in time too, with more stages",
}
_SOURCES = {
    "resident": "its bytes lie in host memory",
    "memory": "its bytes are copied within host memory",
    "ssd": "its bytes come from the disk",
    "remote": "its bytes come over the network",
}


def lines(timeline: Timeline) -> Iterator[str]:
    """Yield no line for an ordinary function, or for a trace without the reasons."""
    planned = next((dict(i.attrs) for i in timeline.intervals if i.phase == "planned"), {})
    if "slo_ttft_s" not in planned:
        return
    yield _shape(planned)
    yield _objective(planned)
    yield from (_size(each) for each in _sizes(planned))
    yield from _hosts(planned)


def _shape(planned: Mapping[str, Any]) -> str:
    n = int(planned.get("stages", 1))
    if n == 1:
        return f"1 stage on {planned.get('host', '?')}{_forced(planned)}"
    full = int(planned.get("full", 0))
    hosts = [f"{host} (full)" if k < full else str(host) for k, host in enumerate(planned.get("hosts", ()))]
    return f"{n} stages, {full} full, over {planned.get('transport', '?')}: {', '.join(hosts)}{_forced(planned)}"


def _forced(planned: Mapping[str, Any]) -> str:
    return "" if "sizes" in planned else "; the size was forced by scaling.stages"


def _objective(planned: Mapping[str, Any]) -> str:
    waited = float(planned.get("t_w_s", 0.0))
    line = f"objective: first token in {duration(float(planned['slo_ttft_s']))}"
    if waited >= 0.001:
        line += f", of which {duration(waited)} were waited when it was planned"
    if planned.get("fallback"):
        return line + "; it cannot be met, so no fetch has a deadline"
    return line


def _sizes(planned: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    sizes = planned.get("sizes", ())
    return [s for s in sizes if isinstance(s, Mapping)] if len(sizes) > 1 else []


def _size(each: Mapping[str, Any]) -> str:
    n = int(each.get("stages", 0))
    name = f"{n} stage{'s' if n != 1 else ''}, {each.get('full', '?')} full:"
    reason = _REASONS.get(str(each.get("why")), str(each.get("why")))
    if "ttft_s" not in each:
        return f"  {name:<17} {reason}"
    ttft, tpot = duration(float(each["ttft_s"])), duration(float(each.get("tpot_s", 0.0)))
    return f"  {name:<17} first token in {ttft}, then {tpot} a token: {reason}"


def _hosts(planned: Mapping[str, Any]) -> Iterator[str]:
    """Say for each host that the scheduler considered: when a worker would have its part, and which step takes
    longest."""
    candidates = [c for c in planned.get("candidates", ()) if isinstance(c, Mapping)]
    width = max((len(_host(c)) for c in candidates), default=0)
    if candidates:
        yield "a worker would have its part on"
    for each in candidates:
        yield f"  {_host(each):<{width}} {_estimate(each)}"


def _host(candidate: Mapping[str, Any]) -> str:
    role = candidate.get("role")
    return f"{candidate.get('host', '?')} (chosen, {role}):" if role else f"{candidate.get('host', '?')}:"


def _estimate(candidate: Mapping[str, Any]) -> str:
    source = _SOURCES.get(str(candidate.get("from")), str(candidate.get("from")))
    if "ready_s" not in candidate:
        return f"not now: {_REASONS.get(str(candidate.get('why')), candidate.get('why'))}"

    def seconds(name: str) -> str:
        return duration(float(candidate.get(name, 0.0)))

    parts = [f"after {seconds('ready_s')}: {source}"]
    if "fetched_s" in candidate:
        behind = f", {seconds('queue_s')} of it behind others" if "queue_s" in candidate else ""
        parts.append(f"all there after {seconds('fetched_s')}{behind}")
    cell = f", {seconds('cell_wait_s')} of it until its stem cell is made" if "cell_wait_s" in candidate else ""
    parts.append(f"runtime after {seconds('runtime_s')}{cell}")
    parts.append(f"copied after {seconds('copied_s')} at the earliest")
    return "; ".join(parts)


def side_by_side(fetches: Sequence[Interval]) -> Iterator[str]:
    """Compare the fetches at the same time with fetches one after another."""
    if len(fetches) < 2:
        return
    begin, end = min(f.begin_s for f in fetches), max(f.end_s for f in fetches)
    n_bytes, apart = sum(f.n_bytes or 0 for f in fetches), sum(f.seconds for f in fetches)
    rate = f", {n_bytes * 8 / (end - begin) / 1e6:.0f} Mbit/s" if end > begin else ""
    yield (
        f"{len(fetches)} fetches side by side: {size(n_bytes)} in {duration(end - begin)}{rate}; "
        f"one after another {duration(apart)}"
    )
