"""This machine's monotonic clock compared with the state server's, by round trips that have another purpose anyway.

A heartbeat, a lease or a reading of the hosts also asks for ``TIME``.  The result is kept as an interval that every
round trip narrows (thaw/tracing/clocks.py), and is written into the trace of each start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from thaw.tracing.clocks import Reading, narrowed, round_trip


class StateClock:
    """The clock of one process and one state server.  Thread-safe."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._reading: Reading | None = None

    @property
    def reading(self) -> Reading | None:
        """None before the first round trip."""
        return self._reading

    def execute(self, pipe: Any) -> list[Any]:
        """``pipe.execute()`` with a ``TIME`` added; returns the results without it."""
        pipe.time()
        before_ns = self._now_ns()
        results: list[Any] = pipe.execute()
        after_ns = self._now_ns()
        seconds, microseconds = results.pop()
        server_ns = (int(seconds) * 1_000_000 + int(microseconds)) * 1000
        with self._lock:
            self._reading = narrowed(self._reading, round_trip(before_ns, server_ns, after_ns))
        return results
