"""Which path the messages between the stages of a pipeline took, according to the traces.

A hop is one link of the ring: stage 0 → 1 → … → s−1 → 0.  The sending stage knows the path.  Stage 0 collects all paths
and writes them into the trace of each request at its first token, and again at its end if a path has changed.
This module is pure: events in, values out.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from thaw.tracing.trace import TraceEvent

ATTRIBUTE: Final = "hops"
"""The attribute of ``prefill.end`` and ``run.end`` that lists the path from each stage to the next one, and from the
last stage to stage 0.
"""
MIXED: Final = "mixed"


class HopPath(enum.StrEnum):
    """The path that carried a message from one stage to another."""

    RELAY = "relay"  # the Redis server that both ends reach
    TCP = "tcp"  # a TCP connection from one end to the other
    OBJECT = "object"  # files or objects of a store that both ends reach
    UNKNOWN = "unknown"  # the stage has not reported its path


@dataclass(frozen=True, slots=True)
class Hop:
    """``paths`` is in the order of time and holds one path, unless the path changed during the answer."""

    stage: int
    to: int
    paths: tuple[HopPath, ...]


def hops_of(events: Iterable[TraceEvent]) -> tuple[Hop, ...]:
    """The hops in order of stage; empty for an answer of a single container."""
    told = sorted((e for e in events if ATTRIBUTE in e.attrs), key=lambda e: e.wall_ns)
    seen = [_paths(e.attrs[ATTRIBUTE]) for e in told]
    n_stages = max(map(len, seen), default=0)
    columns = [[paths[stage] for paths in seen if stage < len(paths)] for stage in range(n_stages)]
    return tuple(Hop(k, (k + 1) % n_stages, _without_repeats(paths)) for k, paths in enumerate(columns))


def path_of(hops: Sequence[Hop]) -> str:
    """The one path that all hops took, or ``mixed``; "" if there are no hops because there is only one stage."""
    paths = {path for hop in hops for path in hop.paths}
    return "" if not paths else paths.pop().value if len(paths) == 1 else MIXED


def _paths(value: object) -> tuple[HopPath, ...]:
    named = value if isinstance(value, (list, tuple)) else ()
    return tuple(next((path for path in HopPath if path == name), HopPath.UNKNOWN) for name in named)


def _without_repeats(paths: Sequence[HopPath]) -> tuple[HopPath, ...]:
    return tuple(path for i, path in enumerate(paths) if i == 0 or path is not paths[i - 1])
