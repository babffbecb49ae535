"""The terms of a start's bound, when it is planned: the hosts' declared rates, and the best that starts have shown.

``thaw/tracing/bound.py`` says what the terms mean and how they make a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.scheduler.view.shortest_times import Best, Least
from thaw.instance import StartMode
from thaw.tracing.bound import RUNTIME, SUSTAINED_BYTES, Part, Source, Term


@dataclass(frozen=True, slots=True)
class StageFacts:
    """Where one stage of a group is placed.  ``link_bytes``: the bytes of its part that only the link can bring."""

    stage: int
    host: str
    device_kind: str
    mode: StartMode
    part_bytes: int
    link_bytes: int
    within_memory: bool = False  # its part is copied from another segment of the host's memory
    is_shared: bool = False  # another start on the host is fetching what it lacks
    declared_bytes_per_s: float | None = None
    measured_bytes_per_s: float | None = None


def bound_terms(best: Best, action: str, stages: Sequence[StageFacts]) -> tuple[Term, ...]:
    """One term for each part of each stage, then one for each bucket of prompt lengths whose prefill is known."""
    found: list[Term] = []
    for stage in stages:
        found.append(_bytes(best, stage))
        # a stem cell has its libraries, so no start waits for them
        parts = [p for p in RUNTIME if p is not Part.LIBRARIES or stage.mode is StartMode.COLD]
        found += [_part(best, action, part, stage, len(stages)) for part in (*parts, Part.ENGINE)]
    return (*found, *_prefills(best, action, stages))


def _part(best: Best, action: str, part: Part, stage: StageFacts, n_stages: int) -> Term:
    least = best.part(part, action, stage.device_kind, stage.mode, n_stages)
    scale = stage.part_bytes if part is Part.COPY else 1
    n_bytes = stage.part_bytes if part is Part.COPY else 0
    return _best(Term(part, None, Source.UNKNOWN, stage.stage, stage.host, n_bytes=n_bytes), least, scale)


def _bytes(best: Best, stage: StageFacts) -> Term:
    here = Term(Part.BYTES, None, Source.UNKNOWN, stage.stage, stage.host, n_bytes=stage.link_bytes)
    if stage.within_memory:
        n_bytes = stage.part_bytes
        here = Term(Part.MEMORY, None, Source.UNKNOWN, stage.stage, stage.host, n_bytes=n_bytes)
        return _best(here, best.memory(stage.device_kind), n_bytes)
    if stage.link_bytes == 0:
        source = Source.SHARED if stage.is_shared else Source.RESIDENT
        return Term(Part.BYTES, 0.0, source, stage.stage, stage.host)
    if stage.link_bytes < SUSTAINED_BYTES:
        return here
    return _over_the_link(here, best.link(stage.host), stage)


def _over_the_link(term: Term, least: Least | None, stage: StageFacts) -> Term:
    """Return the term at the highest of three rates: the operator's, the host's, and the best of the starts so far."""
    found = [
        (stage.link_bytes / rate, source)
        for rate, source in (
            (stage.declared_bytes_per_s, Source.DECLARED),
            (stage.measured_bytes_per_s, Source.MEASURED),
        )
        if rate
    ]
    seconds, source = min(found, default=(float("inf"), Source.UNKNOWN))
    if least is not None and stage.link_bytes * least.value < seconds:
        return _best(term, least, stage.link_bytes)
    if not found:
        return term
    return Term(Part.BYTES, seconds, source, term.stage, term.host, n_bytes=term.n_bytes)


def _best(term: Term, least: Least | None, scale: int) -> Term:
    if least is None:
        return term
    return Term(
        term.part,
        least.value * scale,
        Source.BEST,
        term.stage,
        term.host,
        least.n_starts,
        term.n_bytes,
        term.prompt_tokens,
    )


def _prefills(best: Best, action: str, stages: Sequence[StageFacts]) -> list[Term]:
    unknown = Term(Part.PREFILL, None, Source.UNKNOWN)
    if len({s.device_kind for s in stages}) != 1:
        return [unknown]
    found = best.prefills(action, stages[0].device_kind, len(stages))
    known = [
        Term(Part.PREFILL, least.value, Source.BEST, n_starts=least.n_starts, prompt_tokens=bucket)
        for bucket, least in sorted(found)
    ]
    return known or [unknown]
