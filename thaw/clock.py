"""Time.  Durations are monotonic; wall time is for people and records only (architecture: a clock may jump)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """The one thing of the outside world that tests fake besides the GPU driver."""

    def monotonic_s(self) -> float: ...

    def wall_ns(self) -> int: ...


class SystemClock:
    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_ns(self) -> int:
        return time.time_ns()


def boot_id() -> str:
    """The kernel's boot id: monotonic times compare only within one boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def wall_ms() -> int:
    return time.time_ns() // 1_000_000
