"""Times in which this process did not run at all: stopped, frozen, or on a machine that stood still.

A timer that is there anyway (the heartbeat) goes off late.  Threads that compute or wait for a core make it late too,
and the kernel counts both; what they do not account for is time in which nothing of the process could run::

    beat          due                                   late
    |── 0.2 s ────|···· no thread busy, none waiting ···|          at least so long
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import Final

from thaw.kernel_counts import parse_schedstat
from thaw.trace import Phase, TraceEvent, event

_WORTH_SAYING_S: Final = 0.1
"""Other programs' delays that the kernel counts as nobody's (a page that is swapped in) are shorter."""
_KEPT: Final = 64

Stop = tuple[TraceEvent, TraceEvent]
"""Begin and end, which belong to no fetch yet."""


class Standstill:
    """Not thread-safe: its owner locks."""

    def __init__(self) -> None:
        self._due_ns = 0  # 0: no timer is set
        self._busy_s = 0.0
        self._found: deque[Stop] = deque(maxlen=_KEPT)

    def expect(self, seconds: float) -> None:
        """A timer is set now and goes off in so many seconds."""
        self._due_ns, self._busy_s = time.monotonic_ns() + int(seconds * 1e9), _busy_s()

    def expect_nothing(self) -> None:
        self._due_ns = 0

    def look(self) -> None:
        """Is a timer overdue?  May be called at any time, by any thread."""
        late_s = (time.monotonic_ns() - self._due_ns) / 1e9
        if not self._due_ns or late_s < _WORTH_SAYING_S:
            return
        self._due_ns = 0
        stood_s = late_s - (_busy_s() - self._busy_s)
        if stood_s >= _WORTH_SAYING_S:
            self._found.append(_ended_now(stood_s))

    def since(self, mono_ns: int) -> tuple[Stop, ...]:
        """Those that were not over then, on the monotonic clock."""
        return tuple(stop for stop in self._found if stop[1].mono_ns >= mono_ns)


def _ended_now(seconds: float) -> Stop:
    end = event(Phase.STOPPED_END)
    begin = event(Phase.STOPPED_BEGIN, attrs={"process": "fetchd"})
    return _earlier(begin, int(seconds * 1e9)), end


def _earlier(e: TraceEvent, by_ns: int) -> TraceEvent:
    return TraceEvent(e.name, boot_id=e.boot_id, mono_ns=e.mono_ns - by_ns, wall_ns=e.wall_ns - by_ns, attrs=e.attrs)


def _busy_s() -> float:
    """Of all threads together: on a core, or ready to be on one."""
    total = 0.0
    for tid in os.listdir("/proc/self/task"):
        try:
            total += sum(parse_schedstat(Path(f"/proc/self/task/{tid}/schedstat").read_bytes()))
        except OSError:
            continue  # it has ended
    return total
