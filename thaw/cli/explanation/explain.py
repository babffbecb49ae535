"""Draw a timeline in the terminal: one row for each interval, time from left to right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from rich.console import Console
from rich.text import Text

from thaw import wire
from thaw.cli.explanation import consolidated, foretold, moved, why
from thaw.cli.explanation.between_hosts import clock_lines, hop_lines
from thaw.cli.explanation.evidence import evidence_lines
from thaw.cli.output.tables import duration, size
from thaw.errors import NotFound, ProtocolError
from thaw.plan import Plan
from thaw.tracing.evidence import explain
from thaw.tracing.timeline import Interval, Timeline, analyse
from thaw.tracing.trace import Phase, TraceEvent

_COLOURS = {
    "fetch": "cyan",
    "load": "blue",
    "container": "magenta",
    "libraries": "magenta",
    "context": "magenta",
    "model": "yellow",
    "kv": "yellow",
    "engine": "yellow",
    "tokenizer": "yellow",
    "prefill": "green",
    "planned": "white",
    "init": "bright_black",
    "queued": "bright_black",
    "run": "bright_black",
    "stopped": "red",
    "consolidate": "bright_black",
    "move": "bright_black",
}
_NOTED = (
    "mode",
    "stem_cell_wait_s",
    "image_pull_s",
    "cpu_s",
    "core_wait_s",
    "threads_wait_s",
    "disk_wait_s",
    "programs_s",
    "wait_s",
    "waits_for",
    "source",
    "error",
    "resident",
    "cached_tokens",
    "process",
    "signal",
)
_MIN_BAR, _TEXT_COLUMNS = 20, 62


def show(console: Console, reply: Mapping[str, Any], activation_id: str) -> None:
    """Raises NotFound when the activation has no trace, ProtocolError when it cannot be read."""
    events = tuple(wire.from_plain(TraceEvent, e) for e in _known(reply.get("events", [])))
    plan = wire.from_plain(Plan, reply["plan"]) if reply.get("plan") else None
    links = wire.from_plain(dict[str, float], reply.get("links", {}))
    timeline = analyse(events)
    if timeline is None:
        raise NotFound(f"activation {activation_id} has no trace", hint="traces are kept for seven days")
    _head(console, plan, reply, activation_id, events)
    for line in clock_lines(events, timeline):
        console.print(Text(line), soft_wrap=True)
    _bars(console, timeline)
    for line in chain(verdict(timeline, plan, links, events), hop_lines(events, timeline)):
        console.print(Text(line), soft_wrap=True)


def _known(events: Any) -> Iterator[Any]:
    """Leave out events that this command line cannot read: a newer platform may have phases that it does not know."""
    for event in events:
        try:
            wire.from_plain(TraceEvent, event)
        except ProtocolError:
            continue
        yield event


def _head(
    console: Console, plan: Plan | None, reply: Mapping[str, Any], activation_id: str, events: Sequence[TraceEvent]
) -> None:
    line = Text(f"activation {activation_id}", style="bold")
    if plan is not None:
        n = _n_stages(plan, events)
        line.append(f"  {_called(reply) or plan.action}, {n} stage{'s' if n != 1 else ''}", style="not bold")
    elif group_id := str(reply.get("group_id") or ""):
        line.append(f"  group {group_id}", style="not bold")
    console.print(line, soft_wrap=True)


def _called(reply: Mapping[str, Any]) -> str:
    """The function that was called, which may share its instances with others: those are of a pool then."""
    notes = (reply.get("activation") or {}).get("annotations") or []
    return next((f"{note['value']}" for note in notes if note["key"] == "path"), "")


def _n_stages(plan: Plan, events: Sequence[TraceEvent]) -> int:
    """Return how many stages began.  The plan of a pipeline that has become one worker has one."""
    planned = next((e for e in events if e.name is Phase.PLANNED_END), None)
    n = planned.attrs.get("stages") if planned is not None else None
    return n if isinstance(n, int) else len(plan.stages)


def _bars(console: Console, timeline: Timeline) -> None:
    width = max(_MIN_BAR, console.width - _TEXT_COLUMNS)
    total = max([timeline.end_s, *(i.end_s for i in timeline.intervals if i.is_leaf)]) or 1e-9
    names = {id(i): _label(i, timeline) for i in timeline.intervals}
    longest = max((len(n) for n in names.values()), default=0)
    for interval in _rows(timeline):
        row = Text(f"{names[id(interval)]:<{longest}} ")
        row.append(_bar(interval, total, width), style=_COLOURS.get(interval.phase, "white"))
        row.append(f" {duration(max(0.0, interval.begin_s)):>8} +{duration(interval.seconds):<8}")
        row.append(_note(interval), style="dim")
        console.print(row, soft_wrap=True)
    mark = min(width - 1, int(timeline.end_s / total * width))
    pointer = f"{'':<{longest}} {' ' * mark}^ {timeline.end_name} at {duration(timeline.end_s)}"
    console.print(Text(pointer), soft_wrap=True)


def _rows(timeline: Timeline) -> list[Interval]:
    """The intervals, sorted by time.  For a group of several stages, the rows of a phase stand together, so that phases
    that ran at the same time are next to each other.
    """
    if len({i.stage for i in timeline.intervals}) < 2:
        return list(timeline.intervals)
    first: dict[str, float] = {}
    for i in timeline.intervals:
        first[i.phase] = min(first.get(i.phase, i.begin_s), i.begin_s)
    return sorted(timeline.intervals, key=lambda i: (first[i.phase], i.phase, i.stage, i.begin_s))


def _label(interval: Interval, timeline: Timeline) -> str:
    several = len({i.stage for i in timeline.intervals}) > 1
    where = "/".join([interval.host or "gateway", *([f"stage {interval.stage}"] if several and interval.host else [])])
    return f"{where} {interval.phase}"


def _bar(interval: Interval, total: float, width: int) -> str:
    """A bar of at least one cell.  It is thin for an interval that contains others, and an arrow ends an open one."""
    begin = min(width - 1, max(0, int(interval.begin_s / total * width)))
    end = min(width, max(begin + 1, round(interval.end_s / total * width)))
    cell = "█" if interval.is_leaf else "─"
    bar = cell * (end - begin)
    if interval.is_open:
        bar = bar[:-1] + "▶"
    return " " * begin + bar + " " * (width - end)


def _note(interval: Interval) -> str:
    parts = []
    if interval.n_bytes:
        parts.append(size(interval.n_bytes))
    if interval.n_bytes and interval.bytes_per_s and interval.phase in ("fetch", "load"):
        parts.append(f"{interval.bytes_per_s * 8 / 1e6:.0f} Mbit/s")
    attrs = dict(interval.attrs)
    parts += [
        f"{key}={attrs[key]:.3g}" if isinstance(attrs[key], float) else f"{key}={attrs[key]}"
        for key in _NOTED
        if key in attrs
    ]
    if interval.is_open:
        parts.append("never ended")
    return " ".join(parts)


def verdict(
    timeline: Timeline, plan: Plan | None, links: Mapping[str, float], events: Sequence[TraceEvent] = ()
) -> Iterator[str]:
    """Describe the picture in sentences."""
    yield ""
    yield from foretold.lines(timeline, plan, events)
    yield from why.lines(timeline)
    yield from consolidated.lines(timeline)
    yield from moved.lines(timeline)
    fetches = sorted((i for i in timeline.intervals if i.phase == "fetch" and i.n_bytes), key=lambda i: i.stage)
    yield from (_fetch_line(i, plan, links, several=len(fetches) > 1) for i in fetches)
    yield from why.side_by_side([i for i in fetches if i.bytes_per_s])
    leaf, gap = timeline.longest_leaf, timeline.longest_gap
    if leaf is not None:
        yield f"longest phase: {leaf.phase}{f' on {leaf.host}' if leaf.host else ''}, {duration(leaf.seconds)}"
    if gap is not None:
        yield f"longest gap: {duration(gap.seconds)} between {gap.after} and {gap.before}, at {duration(gap.begin_s)}"
    yield from evidence_lines(explain(timeline, lambda fetch: _most_bytes_per_s(fetch, plan, links)))


def _fetch_line(fetch: Interval, plan: Plan | None, links: Mapping[str, float], *, several: bool) -> str:
    rate, where = fetch.bytes_per_s or 0.0, f" on {fetch.host}" if fetch.host else ""
    where += f" (stage {fetch.stage})" if several else ""
    if fetch.was_resident:
        return f"fetch{where}: none, {size(fetch.n_bytes or 0)} were in the host's memory"
    line = f"fetch{where}: {size(fetch.n_bytes or 0)} at {rate * 8 / 1e6:.0f} Mbit/s"
    most = _most_bytes_per_s(fetch, plan, links)
    if not most:
        return line
    mbit = f"{most * 8 / 1e6:.0f} Mbit/s"
    whose = f"the {mbit} of its resources.fetch_mbit" if most == _pace(fetch, plan) else f"the link's {mbit}"
    return f"{line}, {rate / most:.0%} of {whose}"


def _most_bytes_per_s(fetch: Interval, plan: Plan | None, links: Mapping[str, float]) -> float | None:
    """The rate of the link, as fetchd reported it or as the host declares it, or the function's own limit below it.
    None where neither is known."""
    reported = dict(fetch.attrs).get("link_bytes_per_s")
    link = float(reported) if isinstance(reported, (int, float)) and reported > 0 else links.get(fetch.host)
    known = [rate for rate in (link, _pace(fetch, plan)) if rate]
    return min(known, default=None)


def _pace(fetch: Interval, plan: Plan | None) -> float | None:
    stages = [s for s in plan.stages if s.stage == fetch.stage] if plan is not None else []
    return float(stages[0].pace_bytes_per_s) if stages and stages[0].pace_bytes_per_s else None
