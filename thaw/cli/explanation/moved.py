"""The lines of ``explain`` for a running request that moved to another worker, or was to."""

from __future__ import annotations

from collections.abc import Iterator

from thaw.cli.output.tables import duration
from thaw.tracing.timeline import Interval, Timeline

PHASE = "move"


def lines(timeline: Timeline) -> Iterator[str]:
    for tried in (i for i in timeline.intervals if i.phase == PHASE):
        yield _line(tried)


def _line(tried: Interval) -> str:
    said = dict(tried.attrs)
    source = said.get("from", "its host")
    if tried.is_open:
        return f"move: {source} was to be emptied; whether the answer moved is not known"
    if "stayed" in said:
        return f"move: the answer stayed on {source}, which was to be emptied: {said['stayed']}"
    if said.get("lost"):
        return f"move: {source} was lost at {duration(tried.end_s)}; {said['to']} was at hand and went on"
    rounds = "1 round" if said.get("rounds") == 1 else f"{said.get('rounds')} rounds"
    took = said.get("rounds_s")
    within = f" in {duration(float(took))}" if isinstance(took, int | float) else ""
    line = f"move: at {duration(tried.end_s)} the answer went on on {said.get('to')}, because {source} was emptied"
    pause = said.get("pause_s")
    paused = f", and no token came for {duration(float(pause))}" if isinstance(pause, int | float) else ""
    return (
        f"{line}: it asked for a slot {duration(tried.seconds)} before, {rounds} computed {said.get('tokens')} tokens"
        f" there{within}{paused}"
    )
