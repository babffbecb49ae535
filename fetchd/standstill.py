"""Times in which this process did not run at all: stopped, frozen, or on a machine that stood still.

After such a time the heartbeat's timer goes off late.  Threads that compute or wait for a core make it late too, and
the kernel counts both; the delay that they do not explain is time in which nothing of the process could run::

    beat          due                                   late
    |── 0.2 s ────|···· no thread busy, none waiting ···|          at least so long
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import Final

from thaw.process.kernel_counts import parse_schedstat
from thaw.tracing.trace import Phase, TraceEvent, event

_WORTH_SAYING_S: Final = 0.1
"""Other delays that the kernel counts for no thread (a page that is swapped in) are shorter."""
_KEPT: Final = 64

Stop = tuple[TraceEvent, TraceEvent]
"""Begin and end, which belong to no fetch yet."""


class Standstill:
    """Not thread-safe: the owner holds a lock around every call."""

    def __init__(self) -> None:
        self._due_ns = 0  # 0: no timer is set
        self._busy_s: dict[str, float] = {}
        self._found: deque[Stop] = deque(maxlen=_KEPT)

    def expect(self, seconds: float) -> None:
        """Note that a timer is set now and goes off after ``seconds``."""
        self._due_ns, self._busy_s = time.monotonic_ns() + int(seconds * 1e9), _busy_s()

    def expect_nothing(self) -> None:
        self._due_ns = 0

    def look(self) -> None:
        """Record a stop if the timer is overdue.  May be called at any time, by any thread."""
        late_s = (time.monotonic_ns() - self._due_ns) / 1e9
        if not self._due_ns or late_s < _WORTH_SAYING_S:
            return
        self._due_ns = 0
        # the time of a thread that has ended since is lost, and must not make up for that of the others
        stood_s = late_s - sum(seconds - self._busy_s.get(tid, 0.0) for tid, seconds in _busy_s().items())
        if stood_s >= _WORTH_SAYING_S:
            self._found.append(_ended_now(stood_s))

    def since(self, mono_ns: int) -> tuple[Stop, ...]:
        """The stops that ended after ``mono_ns`` on the monotonic clock."""
        return tuple(stop for stop in self._found if stop[1].mono_ns >= mono_ns)


def _ended_now(seconds: float) -> Stop:
    end = event(Phase.STOPPED_END)
    begin = event(Phase.STOPPED_BEGIN, attrs={"process": "fetchd"})
    return _earlier(begin, int(seconds * 1e9)), end


def _earlier(e: TraceEvent, by_ns: int) -> TraceEvent:
    return TraceEvent(e.name, boot_id=e.boot_id, mono_ns=e.mono_ns - by_ns, wall_ns=e.wall_ns - by_ns, attrs=e.attrs)


def _busy_s() -> dict[str, float]:
    """By thread, the seconds on a core or ready for one."""
    found: dict[str, float] = {}
    for tid in os.listdir("/proc/self/task"):
        try:
            found[tid] = sum(parse_schedstat(Path(f"/proc/self/task/{tid}/schedstat").read_bytes()))
        except OSError:
            continue  # the thread has ended
    return found
