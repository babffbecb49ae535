"""The least time that a start can take, as terms that each name where they come from.

The terms of one stage form two chains that run side by side and meet where the engine has its weights::

    plan ─┬─ bytes over the link ─────────────────────────────────┐
          └─ container ─ context ─ libraries ─ model ─ kv ─ copy ─┴─ engine ─┐
                                         (every stage of the group) ─────────┴─ prefill ─ first token

Only what must come one after another is added up, and no waiting is in it.  Every term is either the bytes over the
link's capacity or the least time that the phase has ever taken, so no start is faster than its bound.  A term that
nobody knows counts as nothing: the bound is then *partial*, which makes it lower and never wrong.  The same record
carries the terms of a prediction (``gateway/scheduler/placement/expected.py``): expected times and waits.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from thaw.start_times import StageTook, StartTook

SUSTAINED_BYTES: Final = 16 * 1024 * 1024
"""A shorter fetch may be served from buffers on the way, so it says nothing about the link and has no bytes' term."""
_SHORTEST_PROMPT: Final = 16


class Part(enum.StrEnum):
    """What a term is of."""

    BYTES = "bytes"  # over the host's link
    MEMORY = "memory"  # in place of bytes: from another segment of the host's memory
    CONTAINER = "container"
    CONTEXT = "context"
    LIBRARIES = "libraries"
    MODEL = "model"  # the empty modules
    KV = "kv"
    COPY = "copy"  # from the host's memory to the device
    ENGINE = "engine"  # from complete weights to an engine that accepts requests
    PREFILL = "prefill"
    # of predictions only
    WAITED = "waited"  # by the request, before it was planned
    CELL = "stem cell"  # until the one is made that the start takes
    PROMISED = "promised"  # until the link has served the fetches that were promised it before
    BOUND = "no sooner than its bound"  # where all other terms together are less than that
    TAIL = "tail"  # from all that the cost model knows to an engine that accepts requests


FETCH: Final = (Part.BYTES, Part.MEMORY)
RUNTIME: Final = (Part.CONTAINER, Part.CONTEXT, Part.LIBRARIES, Part.MODEL, Part.KV, Part.COPY)


class Source(enum.StrEnum):
    """Where a term's seconds come from."""

    UNKNOWN = "unknown"
    DECLARED = "declared"  # the link's rate, as the host's operator declares it
    MEASURED = "measured"  # the link's rate, as the host has measured it
    BEST = "best"  # the least of ``n_starts`` starts
    RESIDENT = "resident"  # the bytes were in the host's memory
    SHARED = "shared"  # another start on the host is fetching them already
    THIS_START = "this start"  # it was faster than all before it
    TYPICAL = "typical"  # the median of recent starts
    DEFAULT = "default"  # no start has shown it yet
    HOST = "host"  # what the host reports of now
    CLOCK = "clock"


@dataclass(frozen=True, slots=True)
class Term:
    """``seconds`` is None for what is not known.  ``part`` and ``source`` are a Part and a Source, or words that only a
    newer scheduler has."""

    part: str
    seconds: float | None
    source: str
    stage: int = 0
    host: str = ""
    n_starts: int = 0
    n_bytes: int = 0
    prompt_tokens: int = 0  # of a prefill: that of prompts in this bucket


def least_s(terms: Sequence[Term]) -> float | None:
    """Seconds from the plan to the first token that no start can fall below; None when no term is known.

    Stages that share a host share its link: their bytes are also added up, before the engine of whichever is last."""
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
    """Prompts of up to so many tokens count as equally long: powers of two."""
    return max(_SHORTEST_PROMPT, 1 << max(0, n_tokens - 1).bit_length())


def for_prompt(terms: Iterable[Term], n_tokens: int) -> tuple[Term, ...]:
    """The terms with one prefill, that of a prompt of this length: of its bucket, else of the nearest one with shorter
    prompts, which take no longer."""
    terms = tuple(terms)
    bucket = prompt_bucket(n_tokens)
    prefills = sorted((t for t in terms if t.part == Part.PREFILL and t.prompt_tokens <= bucket),
                      key=lambda t: t.prompt_tokens)  # fmt: skip
    chosen = prefills[-1] if prefills else Term(Part.PREFILL, None, Source.UNKNOWN, prompt_tokens=bucket)
    return (*(t for t in terms if t.part != Part.PREFILL), chosen)


def with_this_start(terms: Iterable[Term], took: StartTook) -> tuple[Term, ...]:
    """The bound of a start that has ended: no term is longer than what the start itself has shown, because the least
    of all starts includes this one.  What was not known stays unknown; what its trace does not tell becomes unknown."""
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
    """Less than was planned may have crossed the link: the host had a part, or another start fetched it."""
    crossed = stage.link_bytes / term.n_bytes if term.part == Part.BYTES and term.n_bytes else 1.0
    return min(stage.fetch_s, (term.seconds or 0.0) * min(1.0, crossed))


def _within_the_link(terms: tuple[Term, ...], took: StartTook) -> tuple[Term, ...]:
    """Fetches side by side on one host ended together no later than the start has shown."""
    for host, spent_s in took.fetching_s().items():
        here = [t for t in terms if t.part == Part.BYTES and t.host == host and t.seconds]
        together_s = math.fsum(t.seconds or 0.0 for t in here)
        if together_s > spent_s:
            terms = tuple(replace(t, seconds=(t.seconds or 0.0) * spent_s / together_s, source=Source.THIS_START)
                          if t in here else t for t in terms)  # fmt: skip
    return terms
