"""Simulated time: a heap of calls, and a log of everything that happened, of which only the hash is kept.

An *event* is a state change that policy has to handle: an arrival, a phase of a start that ended, a fetch that ended,
a first token, a completion, an expiry.  Heartbeats, repeated inspections, and calls that are out of date when they come
due are not events.  Calls of equal time run in the order in which they were scheduled, so a run depends on its inputs
only.
"""

from __future__ import annotations

import enum
import hashlib
import heapq
import struct
from collections.abc import Callable
from typing import Any

_FLUSH = 1 << 16
_ENTRY = struct.Struct("<dBqq")


class Kind(enum.IntEnum):
    ARRIVAL = 1
    PHASE_END = 2
    FETCH_END = 3
    FIRST_TOKEN = 4
    COMPLETION = 5
    EXPIRY = 6
    FAILED = 7
    PLACED = 8  # a decision: (worker, server)


class Engine:
    def __init__(self) -> None:
        self.now = 0.0
        self.n_events = 0
        self._calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._log = bytearray()
        self._digest = hashlib.blake2b(digest_size=16)

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call at ``when``, or now if rounding errors put ``when`` into the past."""
        self._order += 1
        heapq.heappush(self._calls, (max(when, self.now), self._order, call, arguments))

    def after(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + delay, call, *arguments)

    def note(self, kind: Kind, subject: int, detail: int = 0) -> None:
        """Add one line to the event log."""
        if kind is not Kind.PLACED:
            self.n_events += 1
        self._log += _ENTRY.pack(self.now, kind, subject, detail)
        if len(self._log) >= _FLUSH:
            self._digest.update(self._log)
            self._log.clear()

    def run(self, until: float = float("inf"), *, alive: Callable[[], bool] = lambda: True) -> None:
        """Run until no call is left, the next call is later than ``until``, or ``alive`` returns False."""
        calls = self._calls
        while calls and calls[0][0] <= until and alive():
            self.now, _, call, arguments = heapq.heappop(calls)
            call(*arguments)

    def log_hash(self) -> str:
        self._digest.update(self._log)
        self._log.clear()
        return self._digest.hexdigest()
