"""How a container's time until it answered was spent: the evidence of the ``container`` phase.

Three threads work one after another, so their seconds may be added: the start's thread, the stem cell that forks, and
the container's first thread.  The start's thread sleeps while the others work, and while fetchd opens a
descriptor socket.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from invoker.drivers import process_ids

Spent = tuple[float, float]
"""CPU seconds, and seconds in which the thread was ready to run but another thread ran."""


class ContainerEvidence:
    """The account of making one container.  The start's thread creates and uses it; the account begins then."""

    def __init__(self) -> None:
        self._here = _here()
        self._helped: Spent = (0.0, 0.0)
        self._made: Spent = (0.0, 0.0)
        self._waits: dict[str, float] = {}

    @contextmanager
    def waiting_for(self, whom: str, pid: int = 0) -> Iterator[None]:
        """The block sleeps only until ``whom`` has answered.  The time that the process ``pid`` spends on its answer
        counts as CPU time or core wait, and not as waiting for it."""
        began, busy_s, before = time.monotonic(), sum(_here()), _of(pid)
        try:
            yield
        finally:
            worked = _since(before, _of(pid))
            self._helped = self._helped[0] + worked[0], self._helped[1] + worked[1]
            slept_s = time.monotonic() - began - (sum(_here()) - busy_s)
            self._waits[whom] = self._waits.get(whom, 0.0) + max(0.0, slept_s - sum(worked))

    def begun(self) -> None:
        """The container's process exists.  Later work of this thread is done beside it, and would count twice."""
        here = _since(self._here, _here())
        self._made = here[0] + self._helped[0], here[1] + self._helped[1]

    def answered(self, pid: int) -> dict[str, object]:
        """Attributes of the phase's end, once the container of this ``pid`` takes connections.  ``waits_for`` names the
        longest of the waits."""
        cpu_s, core_wait_s = (a + b for a, b in zip(self._made, process_ids.spent(pid), strict=True))
        attrs: dict[str, object] = {"cpu_s": round(cpu_s, 4), "core_wait_s": round(core_wait_s, 4)}
        if disk_wait_s := process_ids.disk_wait_s(pid):
            attrs["disk_wait_s"] = round(disk_wait_s, 4)
        if self._waits:
            longest = max(self._waits, key=lambda whom: self._waits[whom])
            attrs |= {"wait_s": round(sum(self._waits.values()), 4), "waits_for": longest}
        return attrs


def _here() -> Spent:
    return time.thread_time(), process_ids.spent("thread-self")[1]


def _of(pid: int) -> Spent:
    return process_ids.spent(pid) if pid else (0.0, 0.0)


def _since(before: Spent, now: Spent) -> Spent:
    """The difference, not negative: a stem cell may have been replaced by another in between."""
    return max(0.0, now[0] - before[0]), max(0.0, now[1] - before[1])
