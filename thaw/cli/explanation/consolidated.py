"""The lines of ``explain`` for a pipeline that became one worker or several while it answered, or could not."""

from __future__ import annotations

from collections.abc import Iterator

from thaw.cli.output.tables import duration, size
from thaw.tracing.timeline import Interval, Timeline

PHASE = "consolidate"


def lines(timeline: Timeline) -> Iterator[str]:
    for tried in (i for i in timeline.intervals if i.phase == PHASE):
        yield _line(tried)


def _line(tried: Interval) -> str:
    said = dict(tried.attrs)
    pipeline = f"the pipeline of {said['stages']}" if "stages" in said else "the pipeline"
    where = f" on {tried.host}" if tried.host else ""
    if "worker" in said or tried.stage:
        return _further(tried, said, where)
    if tried.is_open:
        return f"consolidation: {pipeline} was to become one worker{where}; how it ended is not known"
    if "error" in said:
        return f"consolidation: at {duration(tried.end_s)} {pipeline} stayed one: {said['error']}"
    line = f"consolidation: at {duration(tried.end_s)} {pipeline} was one worker{where}"
    parts = [f"it was asked {duration(tried.seconds)} before"]
    if _seconds(said.get("whole_s")) is not None:
        parts.append(f"waited {duration(_seconds(said['whole_s']) or 0.0)} for the rest of the model")
    tail = said.get("tail_bytes")
    last = f", {size(tail)} of it in the last" if isinstance(tail, int) else ""
    parts.append(f"copied {size(tried.n_bytes or 0)} of KV cache in {_rounds(said.get('rounds'))}{last}")
    if (stall_s := _seconds(said.get("stall_s"))) is not None:
        parts.append(f"no token came for {duration(stall_s)}")
    return f"{line}: {', '.join(parts)}"


def _further(tried: Interval, said: dict[str, object], where: str) -> str:
    """A later stage, which has become a worker beside stage 0."""
    stage = f"stage {said.get('worker', tried.stage)}"
    if tried.is_open:
        return f"consolidation: {stage} was to become a worker too{where}; how it ended is not known"
    if "error" in said:
        return f"consolidation: at {duration(tried.end_s)} {stage} could not become a worker{where}: {said['error']}"
    line = f"consolidation: at {duration(tried.end_s)} {stage} was a worker of its own{where}"
    parts = [f"it was asked {duration(tried.seconds)} before"]
    if (whole_s := _seconds(said.get("whole_s"))) is not None:
        parts.append(f"had the whole model and was alone after {duration(whole_s)}")
    if (build_s := _seconds(said.get("build_s"))) is not None:
        parts.append(f"built its engine in {duration(build_s)}")
    return f"{line}: {', '.join(parts)}"


def _rounds(n: object) -> str:
    return "1 round" if n == 1 else f"{n} rounds"


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
