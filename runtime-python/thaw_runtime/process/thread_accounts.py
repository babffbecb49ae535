"""The kernel's counters for threads, read where the threads wait: this is the evidence in the events of phases.

Per thread, the kernel counts the nanoseconds on a core, the nanoseconds in which the thread was ready but another
thread ran (``schedstat``), and, if ``kernel.task_delayacct`` is 1, the time in which it waited for a disk.  The kernel
does not count the time in which a thread was asleep or stopped.  So such time is evidence only around a call that is
known to wait for one thing.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from relay.thread_account import TASKS, ThreadAccount
from thaw.process.kernel_counts import parse_disk_wait

_STAT: Final = Path("/proc/thread-self/stat")
_SECTOR_BYTES: Final = 512  # the unit of ru_inblock
_WORTH_A_LOOK_S: Final = 0.0005
"""After a shorter sleep the other threads are not read: reading them would take longer than the wait to be found."""


@dataclass(frozen=True, slots=True)
class Look:
    """Busy seconds so far: those of the reading thread, and those of the other threads by thread id."""

    own_s: float
    others_s: Mapping[int, float]


class OtherThreads:
    """The threads of this process that run no Python: the threads of compute kernels (OpenMP).

    This object belongs to the thread that makes it and calls the kernels.  ``seconds`` says for how long this thread
    has slept in ``counted`` blocks: calls of milliseconds that can sleep only because of those other threads.  A sleep
    counts at most for the time in which all those threads together were on a core or ready to be on one.  In a process
    that is stopped during a call, they were neither.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._own = ThreadAccount()
        self._accounts: dict[int, ThreadAccount] = {}
        self._last = self.look(scan=True)

    def look(self, *, scan: bool = False) -> Look:
        """Read the busy seconds of all known threads.  ``scan`` also finds new threads, which costs about 50 µs."""
        if scan:
            self._scan()
        return Look(self._own.busy_s(), {tid: a.busy_s() for tid, a in self._accounts.items()})

    def waited_s(self, before: Look, now: Look) -> float:
        """The least time for which the thread has waited for the others between two looks.

        This is by how much longer the busiest of them was busy than the thread itself.  It is less than the true wait
        if different threads are the last ones in turn.
        """
        most_s = max((s - before.others_s.get(tid, 0.0) for tid, s in now.others_s.items()), default=0.0)
        return max(0.0, most_s - (now.own_s - before.own_s))

    @contextmanager
    def counted(self) -> Iterator[None]:
        began, own_s = time.monotonic(), self._own.busy_s()
        try:
            yield
        finally:
            slept_s = time.monotonic() - began - (self._own.busy_s() - own_s)
            if slept_s > _WORTH_A_LOOK_S:
                now = self.look(scan=True)
                busy_s = sum(max(0.0, s - self._last.others_s.get(tid, 0.0)) for tid, s in now.others_s.items())
                self.seconds += min(slept_s, busy_s)
                self._last = now

    @contextmanager
    def counted_over_many(self) -> Iterator[None]:
        """Like ``counted``, but around many calls.  For their sum the limit of ``counted`` would be too high, so
        :meth:`waited_s` is used.
        """
        before = self.look()
        try:
            yield
        finally:
            self._last = self.look(scan=True)
            self.seconds += self.waited_s(before, self._last)

    def _scan(self) -> None:
        pythons = {t.native_id for t in threading.enumerate()}
        there = {int(name) for name in os.listdir(TASKS)} - pythons
        kept = {tid: account for tid, account in self._accounts.items() if tid in there}
        self._accounts = kept | {tid: ThreadAccount(tid) for tid in there - kept.keys()}


@dataclass(frozen=True, slots=True)
class Delays:
    """The delays of this thread since it began, apart from waits for a core.

    ``programs_s`` counts CPU seconds of programs that this process has run and that have ended.  ``major_faults`` and
    ``disk_bytes`` say that there was something to wait for, but not for how long.
    """

    disk_wait_s: float
    programs_s: float
    major_faults: int
    disk_bytes: int

    @staticmethod
    def now() -> Delays:
        own, programs = resource.getrusage(resource.RUSAGE_THREAD), resource.getrusage(resource.RUSAGE_CHILDREN)
        programs_s = programs.ru_utime + programs.ru_stime
        return Delays(_disk_wait_s(), programs_s, own.ru_majflt, own.ru_inblock * _SECTOR_BYTES)

    def since(self, before: Delays) -> dict[str, float | int]:
        """The differences as attributes of a phase's end event; attributes that are zero are left out."""
        found = {
            "disk_wait_s": round(self.disk_wait_s - before.disk_wait_s, 4),
            "programs_s": round(self.programs_s - before.programs_s, 4),
            "major_faults": self.major_faults - before.major_faults,
            "disk_bytes": self.disk_bytes - before.disk_bytes,
        }
        return {name: value for name, value in found.items() if value > 0}


def _disk_wait_s() -> float:
    try:
        return parse_disk_wait(_STAT.read_text())
    except OSError:
        return 0.0
