"""What the kernel counts of threads, read where they wait: the evidence that phases carry.

Per thread the kernel counts nanoseconds on a core, nanoseconds ready to run while another ran (``schedstat``), and,
where ``kernel.task_delayacct`` is 1, the time in which it waited for a disk.  It counts no time asleep and no time
stopped, and so that time is evidence only around a call that is known to wait for one thing.
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
from thaw.kernel_counts import parse_disk_wait

_STAT: Final = Path("/proc/thread-self/stat")
_SECTOR_BYTES: Final = 512  # the unit of ru_inblock
_WORTH_A_LOOK_S: Final = 0.0005
"""A thread that slept less waited for nobody: looking at the others would take longer than what it finds out."""


@dataclass(frozen=True, slots=True)
class Look:
    """Busy seconds so far: of the thread that looked, and of the others by thread id."""

    own_s: float
    others_s: Mapping[int, float]


class OtherThreads:
    """The threads of this process in which no Python runs: those of kernels (OpenMP).

    Belongs to the thread that makes it and calls the kernels.  ``seconds`` is for how long it has slept in ``counted``
    blocks: calls of milliseconds that can sleep for those threads alone.  No more of a sleep counts than they were on a
    core, or ready to be on one, all together: of a process that is stopped in a call they were not.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._own = ThreadAccount()
        self._accounts: dict[int, ThreadAccount] = {}
        self._last = self.look(scan=True)

    def look(self, *, scan: bool = False) -> Look:
        """``scan``: look for threads that were not there before; costs some 50 µs."""
        if scan:
            self._scan()
        return Look(self._own.busy_s(), {tid: a.busy_s() for tid, a in self._accounts.items()})

    def waited_s(self, before: Look, now: Look) -> float:
        """For how long the thread has waited for the others between two looks, at least: for so much longer than itself
        the busiest of them was busy.  Less than the truth where they take turns at being last."""
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
        """The same around many calls, for whose sum the limit would be too high: :meth:`waited_s`."""
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
    """What has kept this thread from going on, beside the cores, since it began.

    ``programs_s`` are CPU seconds of programs that this process has run and that have ended.  ``major_faults`` and
    ``disk_bytes`` say that there was something to wait for, and not how long."""

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
        """Attributes of a phase's end; those that are zero are left out."""
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
