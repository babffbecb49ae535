"""How long each phase of a start took according to its trace, with each second counted once.

Phases overlap: an engine imports while its container is still being made.  A moment that two phases cover belongs to
the first of them in ``_ORDER``, so the times of one stage never add up to more than the stage took.  Therefore the
least times of the phases can be added up to a bound (``tracing/bound.py``).  This module is pure: events in, seconds
out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from thaw.tracing.trace import Phase, TraceEvent

Span = tuple[int, int]
"""Begin and end, in nanoseconds of one boot's monotonic clock."""
_ORDER: Final = ("container", "context", "libraries", "model", "kv", "load")
_BEGINS: Final = (Phase.COMMAND, Phase.FETCH_BEGIN, Phase.CONTAINER_BEGIN)
_NS: Final = 1e9


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of one phase that are not counted for any other phase."""

    part: str
    seconds: float


@dataclass(frozen=True, slots=True)
class StageTook:
    """One stage of a start.  ``fetch`` lasts from the request for its bytes until the engine had them."""

    stage: int
    host: str
    mode: str  # "cold", "prewarmed"; empty if the trace does not say
    parts: tuple[Took, ...]
    part_bytes: int = 0  # the bytes of the stage's part of the model
    link_bytes: int = 0  # how many of these bytes crossed the link
    fetch: Span | None = None
    within_memory: bool = False  # another segment of the host had all of these bytes

    def seconds(self, part: str) -> float:
        """Seconds of a phase; 0 for a phase that this start did not need."""
        return math.fsum(t.seconds for t in self.parts if t.part == part)

    @property
    def fetch_s(self) -> float:
        return 0.0 if self.fetch is None else (self.fetch[1] - self.fetch[0]) / _NS


@dataclass(frozen=True, slots=True)
class StartTook:
    """A whole start.  Stages whose trace is not complete are left out."""

    stages: tuple[StageTook, ...] = ()
    prefill_s: float | None = None
    prompt_tokens: int | None = None

    def fetching_s(self) -> dict[str, float]:
        """Per host, the seconds from the first begin to the last end of the fetches that used its link."""
        spans: dict[str, list[Span]] = {}
        for stage in self.stages:
            if stage.fetch is not None and stage.link_bytes:
                spans.setdefault(stage.host, []).append(stage.fetch)
        return {host: (max(e for _, e in each) - min(b for b, _ in each)) / _NS for host, each in spans.items()}


def start_took(events: Iterable[TraceEvent]) -> StartTook:
    """Read the times from the trace of a start's group.  The prefill is known only if ``events`` also holds the trace
    of the request that the start was made for.
    """
    by_stage: dict[int, list[TraceEvent]] = {}
    for event in events:
        by_stage.setdefault(event.stage, []).append(event)
    found = (_stage_took(stage, by_stage[stage]) for stage in sorted(by_stage))
    prefill_s, prompt_tokens = _prefill(by_stage.get(0, ()))
    return StartTook(tuple(s for s in found if s is not None), prefill_s, prompt_tokens)


def _stage_took(stage: int, events: Sequence[TraceEvent]) -> StageTook | None:
    ready = _last(events, Phase.READY)
    if ready is None:
        return None
    here = (e for e in events if e.boot_id == ready.boot_id)
    # The event that all bytes are there may come after the engine already has them.
    until_ready = (e for e in here if e.mono_ns <= ready.mono_ns or e.name == Phase.FETCH_END)
    mine = sorted(until_ready, key=lambda e: e.mono_ns)
    begin_ns = min((e.mono_ns for e in mine if e.name in _BEGINS), default=ready.mono_ns)
    engine = _last(mine, Phase.ENGINE_BEGIN)
    engine_ns = ready.mono_ns if engine is None else engine.mono_ns
    parts = [Took("engine", _total_s(_clipped(_spans(mine, "engine"), engine_ns, ready.mono_ns)))]
    before = _exclusive({p: _clipped(_spans(mine, p), begin_ns, engine_ns) for p in _ORDER})
    container, load = _last(mine, Phase.CONTAINER_END), _last(mine, Phase.LOAD_END)
    idle_s = {
        "container": _number(container, "stem_cell_wait_s") + _number(container, "image_pull_s"),
        "load": _number(load, "wait_s") + _number(load, "rehearsal_s"),
    }
    for part, seconds in before.items():
        parts.append(Took("copy" if part == "load" else part, max(0.0, seconds - idle_s.get(part, 0.0))))
    mode = "" if container is None else str(container.attrs.get("mode", ""))
    return _with_fetch(StageTook(stage, ready.host, mode, tuple(t for t in parts if t.seconds > 0)), mine, engine_ns)


def _with_fetch(stage: StageTook, events: Sequence[TraceEvent], until_ns: int) -> StageTook:
    begin, end = next((e for e in events if e.name == Phase.FETCH_BEGIN), None), _last(events, Phase.FETCH_END)
    if begin is None or end is None or begin.boot_id != end.boot_id:
        return stage
    n_bytes, copied = end.n_bytes or 0, int(_number(end, "copied_bytes"))
    resident = end.attrs.get("resident") is True
    crossed = 0 if resident else max(int(_number(end, "fetched_bytes")), n_bytes - copied)
    span = (begin.mono_ns, max(begin.mono_ns, min(end.mono_ns, until_ns)))
    return replace(
        stage, part_bytes=n_bytes, link_bytes=crossed, fetch=span, within_memory=not resident and 0 < n_bytes <= copied
    )


def _prefill(events: Sequence[TraceEvent]) -> tuple[float | None, int | None]:
    """Seconds and prompt tokens of the request's first prefill.

    A request that was continued by another instance has a second prefill.
    """
    begin = next((e for e in events if e.name == Phase.PREFILL_BEGIN), None)
    if begin is None:
        return None, None
    ends = (e for e in events if e.name == Phase.PREFILL_END and e.boot_id == begin.boot_id)
    end = next((e for e in ends if e.mono_ns >= begin.mono_ns), None)
    tokens = begin.attrs.get("prompt_tokens")
    seconds = None if end is None else (end.mono_ns - begin.mono_ns) / _NS
    return seconds, tokens if isinstance(tokens, int) else None


def _spans(events: Sequence[TraceEvent], phase: str) -> list[Span]:
    """The spans of a phase, which may have several parts; a part without an end is left out."""
    found, open_ns = list[Span](), list[int]()
    for event in events:
        name, _, edge = event.name.partition(".")
        if name == phase and edge == "begin":
            open_ns.append(event.mono_ns)
        elif name == phase and edge == "end" and open_ns:
            found.append((open_ns.pop(), event.mono_ns))
    return found


def _clipped(spans: Iterable[Span], begin_ns: int, end_ns: int) -> list[Span]:
    cut = ((max(begin, begin_ns), min(end, end_ns)) for begin, end in spans)
    return [(begin, end) for begin, end in cut if end > begin]


def _exclusive(spans: dict[str, list[Span]]) -> dict[str, float]:
    """Seconds of each phase that no phase before it covers."""
    found, covered, before_s = dict[str, float](), list[Span](), 0.0
    for phase, each in spans.items():
        covered += each
        together_s = _total_s(covered)
        found[phase], before_s = together_s - before_s, together_s
    return found


def _total_s(spans: Iterable[Span]) -> float:
    """Seconds that the union of the spans covers."""
    total_ns, reached_ns = 0, 0
    for begin, end in sorted(spans):
        if end > max(begin, reached_ns):
            total_ns += end - max(begin, reached_ns)
            reached_ns = end
    return total_ns / _NS


def _last(events: Sequence[TraceEvent], name: Phase) -> TraceEvent | None:
    return next((e for e in reversed(events) if e.name == name), None)


def _number(event: TraceEvent | None, name: str) -> float:
    """An attribute that is a number; 0 where it is absent."""
    value = None if event is None else event.attrs.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
