"""Time.  Durations use the monotonic clock; wall time is for people and records only, because a wall clock may jump."""

from __future__ import annotations

import time
from pathlib import Path


def boot_id() -> str:
    """The kernel's boot id: monotonic times can be compared only within one boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def wall_ms() -> int:
    return time.time_ns() // 1_000_000
