"""Time.  Durations are monotonic; wall time is for people and records only (architecture: a clock may jump)."""

from __future__ import annotations

import time
from pathlib import Path


def boot_id() -> str:
    """The kernel's boot id: monotonic times compare only within one boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def wall_ms() -> int:
    return time.time_ns() // 1_000_000
