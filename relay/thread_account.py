"""The kernel's times of one thread, read by its process: time on a core, time ready for one, and so time asleep."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from thaw.process.kernel_counts import parse_schedstat

TASKS: Final = "/proc/self/task"


class ThreadAccount:
    """The kernel's times of one thread of this process.  The file stays open: opening costs more than reading."""

    def __init__(self, tid: int | None = None) -> None:
        """``tid``: the thread to read; without it, the thread that creates this object."""
        self._is_own = tid is None
        try:
            self._fd = os.open(f"{TASKS}/{tid or threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def spent(self) -> tuple[float, float]:
        """Return the CPU seconds, and the seconds in which the thread was ready but another one ran; zeros if it has
        ended."""
        cpu_s, core_wait_s = 0.0, 0.0
        if self._fd >= 0:
            with suppress(OSError):
                cpu_s, core_wait_s = parse_schedstat(os.pread(self._fd, 80, 0))
        return (time.thread_time() if self._is_own else cpu_s), core_wait_s  # to the moment; the file lags by a tick

    def busy_s(self) -> float:
        """The time the thread was on a core or ready for one."""
        return sum(self.spent())

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class BlockedTime:
    """Seconds in which a thread was blocked: it neither computed nor was ready to, in calls that wait for one thing.

    The CPU seconds of the thread and its waits for a core are not in it, so the three may be added.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._account = ThreadAccount()

    @contextmanager
    def counted(self) -> Iterator[None]:
        began, busy_s = time.monotonic(), self._account.busy_s()
        try:
            yield
        finally:
            busy_s = self._account.busy_s() - busy_s
            self.seconds += max(0.0, time.monotonic() - began - busy_s)
