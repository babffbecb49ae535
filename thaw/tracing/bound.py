"""The least time that a start can take, as a set of terms; each term names the source of its seconds.

The terms of one stage form two chains that run side by side and meet where the engine has its weights::

    plan ─┬─ bytes over the link ─────────────────────────────────┐
          └─ container ─ context ─ libraries ─ model ─ kv ─ copy ─┴─ engine ─┐
                                         (every stage of the group) ─────────┴─ prefill ─ first token

The bound adds up only steps that must follow one another, and it contains no waiting.  Every term is either the bytes
divided by the link's capacity or the least time that the phase has ever taken, so no start is faster than its bound.
A term with unknown seconds counts as zero: the bound is then *partial*, which makes it lower and never wrong.  The same
record carries the terms of a prediction (``gateway/scheduler/placement/expected.py``): expected times and waits.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from thaw.tracing.start_times import StageTook, StartTook

SUSTAINED_BYTES: Final = 16 * 1024 * 1024
"""Buffers on the way may serve a shorter fetch, so such a fetch says nothing about the link and has no BYTES term."""
_SHORTEST_PROMPT: Final = 16


class Part(enum.StrEnum):
    """The phase, or another part of a start, that a term describes."""

    BYTES = "bytes"  # over the host's link
    MEMORY = "memory"  # replaces BYTES where the bytes come from another segment of the host's memory
    CONTAINER = "container"
    CONTEXT = "context"
    LIBRARIES = "libraries"
    MODEL = "model"  # building the empty modules
    KV = "kv"
    COPY = "copy"  # from the host's memory to the device
    ENGINE = "engine"  # from complete weights to an engine that accepts requests
    PREFILL = "prefill"
    # The parts below occur in predictions only.
    WAITED = "waited"  # the request's wait before its start was planned
    CELL = "stem cell"  # the wait until the host has made the stem cell that the start takes
    PROMISED = "promised"  # the wait until the link has served the fetches that were promised before this one
    BOUND = "no sooner than its bound"  # the bound itself, where all other terms together are less
    TAIL = "tail"  # from the end of the phases in the cost model to an engine that accepts requests


FETCH: Final = (Part.BYTES, Part.MEMORY)
RUNTIME: Final = (Part.CONTAINER, Part.CONTEXT, Part.LIBRARIES, Part.MODEL, Part.KV, Part.COPY)


class Source(enum.StrEnum):
    """Where a term's seconds come from."""

    UNKNOWN = "unknown"
    DECLARED = "declared"  # the link's rate that the host's operator declares
    MEASURED = "measured"  # the link's rate that the host has measured
    BEST = "best"  # the least of ``n_starts`` starts
    RESIDENT = "resident"  # the bytes were in the host's memory
    SHARED = "shared"  # another start on the host is already fetching the bytes
    THIS_START = "this start"  # this start was faster than all starts before it
    TYPICAL = "typical"  # the median of recent starts
    DEFAULT = "default"  # a default value, because no start has shown the time yet
    HOST = "host"  # the host's current report
    CLOCK = "clock"


@dataclass(frozen=True, slots=True)
class Term:
    """``seconds`` is None when the time is not known.  ``part`` and ``source`` are a Part and a Source, or words that
    only a newer scheduler has.
    """

    part: str
    seconds: float | None
    source: str
    stage: int = 0
    host: str = ""
    n_starts: int = 0
    n_bytes: int = 0
    prompt_tokens: int = 0  # for a prefill: the bucket of prompt lengths that the term describes


def least_s(terms: Sequence[Term]) -> float | None:
    """Seconds from the plan to the first token that no start can fall below; None when no term is known.

    Stages that share a host share its link, so the bytes of these stages are also added up; the shortest engine term
    among them follows, because one of the engines comes last.
    """
    if all(t.seconds is None for t in terms):
        return None
    stages = {t.stage: t.host for t in terms if t.part != Part.PREFILL}
    ready = [_stage_s(terms, stage) for stage in stages]
    for host in set(stages.values()):
        here = [stage for stage, at in stages.items() if at == host]
        engine_s = min(_sum(terms, stage, (Part.ENGINE,)) for stage in here)
        ready.append(math.fsum(_sum(terms, stage, (Part.BYTES,)) for stage in here) + engine_s)
    prefills = [t.seconds or 0.0 for t in terms if t.part == Part.PREFILL]
    return max(ready, default=0.0) + min(prefills, default=0.0)


def is_partial(terms: Iterable[Term]) -> bool:
    return any(t.seconds is None for t in terms)


def last_stage(terms: Sequence[Term]) -> int:
    """The stage whose chains take longest."""
    return max(sorted({t.stage for t in terms}), key=lambda stage: _stage_s(terms, stage), default=0)


def _stage_s(terms: Sequence[Term], stage: int) -> float:
    chains = (_sum(terms, stage, FETCH), _sum(terms, stage, RUNTIME))
    return max(chains) + _sum(terms, stage, (Part.ENGINE,))


def _sum(terms: Sequence[Term], stage: int, parts: Sequence[str]) -> float:
    return math.fsum(t.seconds or 0.0 for t in terms if t.stage == stage and t.part in parts)


def prompt_bucket(n_tokens: int) -> int:
    """The upper limit (a power of two) of the bucket of prompts that count as equally long."""
    return max(_SHORTEST_PROMPT, 1 << max(0, n_tokens - 1).bit_length())


def for_prompt(terms: Iterable[Term], n_tokens: int) -> tuple[Term, ...]:
    """Keep one prefill term: the term of this prompt's bucket, else that of the nearest bucket of shorter prompts,
    whose prefill takes no longer.
    """
    terms = tuple(terms)
    bucket = prompt_bucket(n_tokens)
    prefills = sorted(
        (t for t in terms if t.part == Part.PREFILL and t.prompt_tokens <= bucket), key=lambda t: t.prompt_tokens
    )
    chosen = prefills[-1] if prefills else Term(Part.PREFILL, None, Source.UNKNOWN, prompt_tokens=bucket)
    return (*(t for t in terms if t.part != Part.PREFILL), chosen)


def with_this_start(terms: Iterable[Term], took: StartTook) -> tuple[Term, ...]:
    """The bound of a start that has ended.  No term is longer than the time that the start itself has shown, because
    the least time of all starts includes this start.  An unknown term stays unknown, and a term that the start's trace
    does not show becomes unknown.
    """
    if took.prompt_tokens is not None:
        terms = for_prompt(terms, took.prompt_tokens)
    stages = {s.stage: s for s in took.stages}
    lowered = tuple(_lowered(term, stages.get(term.stage), took) for term in terms)
    return _within_the_link(lowered, took)


def _lowered(term: Term, stage: StageTook | None, took: StartTook) -> Term:
    if term.seconds is None:
        return term
    if term.part == Part.PREFILL:
        shown_s = took.prefill_s
    elif stage is None:
        shown_s = None
    elif term.part in FETCH:
        shown_s = _bytes_s(term, stage)
    else:
        shown_s = stage.seconds(term.part)
    if shown_s is None:
        return replace(term, seconds=None, source=Source.UNKNOWN)
    return term if term.seconds <= shown_s else replace(term, seconds=shown_s, source=Source.THIS_START)


def _bytes_s(term: Term, stage: StageTook) -> float:
    """Fewer bytes than planned may have crossed the link: the host had a part already, or another start fetched it."""
    crossed = stage.link_bytes / term.n_bytes if term.part == Part.BYTES and term.n_bytes else 1.0
    return min(stage.fetch_s, (term.seconds or 0.0) * min(1.0, crossed))


def _within_the_link(terms: tuple[Term, ...], took: StartTook) -> tuple[Term, ...]:
    """Parallel fetches on one host together took no longer than the start has shown, so their BYTES terms are scaled
    down to that time.
    """
    for host, spent_s in took.fetching_s().items():
        here = [t for t in terms if t.part == Part.BYTES and t.host == host and t.seconds]
        together_s = math.fsum(t.seconds or 0.0 for t in here)
        if together_s > spent_s:
            terms = tuple(
                replace(t, seconds=(t.seconds or 0.0) * spent_s / together_s, source=Source.THIS_START)
                if t in here
                else t
                for t in terms
            )
    return terms
