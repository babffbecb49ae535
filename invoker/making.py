"""What a container's time until it answered went into: the evidence of the ``container`` phase.

Three work one after another, so their seconds may be added: the start's thread, the stem cell that forks, and the
container's first thread.  The start's thread sleeps while the others work, and while fetchd opens a door.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from invoker import proc

Spent = tuple[float, float]
"""CPU seconds, and seconds ready to run in which another did."""


class Making:
    """Made and used by the start's thread; begins now."""

    def __init__(self) -> None:
        self._here = _here()
        self._cell_pid, self._cell = 0, (0.0, 0.0)
        self._made: Spent = (0.0, 0.0)
        self._wait_s = 0.0

    @contextmanager
    def waiting_for_fetchd(self) -> Iterator[None]:
        began, busy_s = time.monotonic(), sum(_here())
        try:
            yield
        finally:
            self._wait_s += max(0.0, time.monotonic() - began - (sum(_here()) - busy_s))

    def forked_by(self, pid: int) -> None:
        """The stem cell, before it is asked."""
        self._cell_pid, self._cell = pid, proc.spent(pid)

    def begun(self) -> None:
        """The container's process is there: whatever else is done now is done beside it, and would count twice."""
        cell = _since(self._cell, proc.spent(self._cell_pid)) if self._cell_pid else (0.0, 0.0)
        here = _since(self._here, _here())
        self._made = here[0] + cell[0], here[1] + cell[1]

    def answered(self, pid: int) -> dict[str, object]:
        """Attributes of the phase's end, once the container of this ``pid`` takes connections."""
        cpu_s, core_wait_s = (a + b for a, b in zip(self._made, proc.spent(pid), strict=True))
        attrs: dict[str, object] = {"cpu_s": round(cpu_s, 4), "core_wait_s": round(core_wait_s, 4)}
        if self._wait_s:
            attrs |= {"wait_s": round(self._wait_s, 4), "waits_for": "fetchd"}
        return attrs


def _here() -> Spent:
    return time.thread_time(), proc.spent("thread-self")[1]


def _since(before: Spent, now: Spent) -> Spent:
    """Not negative: a stem cell may have been replaced by another in between."""
    return max(0.0, now[0] - before[0]), max(0.0, now[1] - before[1])
