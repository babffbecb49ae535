"""The causes of a request's time to first token, found from the request itself and from the start that served it.

A request that finds no free slot waits in a queue, then for the rest of the start that serves it, and perhaps once more
for a slot::

    arrival ─ memory │ slot ─▶ chain of the start ─▶ ready ─ memory │ slot ─▶ submitted ─ prefill │ group ─▶ first token

The phases of a start form chains that run at the same time.  The chain that ends last decides when the start is ready,
so its phases are what the request waited for.  The causes of one request add up to its time to first token.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Waits = dict["Cause", float]
"""Seconds by cause."""


class Cause(enum.StrEnum):
    MEMORY = "memory"  # the function wanted a worker, and no device had room for it
    SLOT = "slot"  # every slot of the function's workers was taken
    RUNTIME = "runtime"  # container, device context, libraries
    SHARED_LINK = "shared link"  # other fetches used the link of the server at the same time
    FETCH = "fetch"  # the bytes themselves, at the rate of the whole link
    LOAD = "load"  # from the host's memory to the device, and the engine's work after the last byte
    PREFILL = "prefill"  # the prefill of the prompt on one whole device
    GROUP = "group"  # the additional time of a pass through several stages
    FAILED = "failed"  # there was no first token


class Span(NamedTuple):
    """A phase of a start, in seconds of simulated time."""

    cause: Cause
    begin_s: float
    end_s: float


class Blocked:
    """The times in which a function wanted a worker and no device had memory for it."""

    __slots__ = ("_since_s", "_spans")

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self._since_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Begin a wait.  A wait that begins at the instant in which the last one ended continues that one."""
        if self._since_s is None:
            goes_on = bool(self._spans) and self._spans[-1][1] == now_s
            self._since_s = self._spans.pop()[0] if goes_on else now_s

    def end(self, now_s: float) -> None:
        if self._since_s is not None:
            self._spans.append((self._since_s, now_s))
            self._since_s = None

    def forget(self) -> None:
        """Forget the past waits.  No request waits any more, so they will not be needed."""
        self._spans.clear()

    def seconds(self, begin_s: float, end_s: float) -> float:
        """How much of this time the function was blocked."""
        open_span = [] if self._since_s is None else [(self._since_s, end_s)]
        return sum(max(0.0, min(end_s, b) - max(begin_s, a)) for a, b in (*self._spans, *open_span))


def until_submitted(arrival_s: float, chain: Sequence[Span], ready_s: float, blocked: Blocked, now_s: float) -> Waits:
    """The waits of a request that is submitted now, to workers that were ready at ``ready_s`` after ``chain``."""
    found: Waits = {}
    began_s = chain[0].begin_s if chain else ready_s
    for begin_s, end_s in ((arrival_s, began_s), (max(arrival_s, ready_s), now_s)):
        if begin_s < end_s:
            for_memory_s = blocked.seconds(begin_s, end_s)
            add(found, Cause.MEMORY, for_memory_s)
            add(found, Cause.SLOT, end_s - begin_s - for_memory_s)
    for span in chain:
        add(found, span.cause, span.end_s - max(span.begin_s, arrival_s))
    return found


def add(waits: Waits, cause: Cause, seconds: float) -> None:
    if seconds > 0:
        waits[cause] = waits.get(cause, 0.0) + seconds


def longest(waits: Waits) -> Cause:
    """The cause that took most of the time.  A request without any cause has failed."""
    return max(waits, key=lambda cause: waits[cause], default=Cause.FAILED)


def total(many: Iterable[Waits]) -> Waits:
    found: Waits = {}
    for waits in many:
        for cause, seconds in waits.items():
            add(found, cause, seconds)
    return found
