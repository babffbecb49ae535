"""Parse Linux's times of a thread: texts from /proc in, seconds out.

This module is pure.  A kernel that does not count a value gives zeros, which explain nothing.
"""

from __future__ import annotations

import os
from typing import Final

_DISK_WAIT_FIELD: Final = 42  # "delayacct_blkio_ticks" in /proc/PID/stat; fields are numbered from 1 (man 5 proc)
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def parse_schedstat(text: bytes) -> tuple[float, float]:
    """CPU seconds of the thread, and seconds in which the thread was ready but another thread ran."""
    fields = text.split()
    return (int(fields[0]) / 1e9, int(fields[1]) / 1e9) if len(fields) == 3 else (0.0, 0.0)


def parse_disk_wait(stat: str) -> float:
    """Seconds in which the thread waited for a disk, from the text of its ``stat``.

    Linux counts them only for threads that began while ``kernel.task_delayacct`` was 1.
    """
    fields = stat[stat.rindex(")") + 2 :].split()  # the name in "(…)" may hold any text; the list begins at field 3
    index = _DISK_WAIT_FIELD - 3
    return int(fields[index]) / _TICKS_PER_S if len(fields) > index else 0.0
