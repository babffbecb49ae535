"""What Linux counts of a thread, in its own words: texts of /proc in, seconds out.

Pure.  A kernel that does not count something gives zeros, which explain nothing.
"""

from __future__ import annotations

import os
from typing import Final

_DISK_WAIT_FIELD: Final = 42  # of /proc/PID/stat, "delayacct_blkio_ticks"; numbered from 1 (man 5 proc)
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def parse_schedstat(text: bytes) -> tuple[float, float]:
    """CPU seconds, and seconds in which the thread was ready to run and another ran."""
    fields = text.split()
    return (int(fields[0]) / 1e9, int(fields[1]) / 1e9) if len(fields) == 3 else (0.0, 0.0)


def parse_disk_wait(stat: str) -> float:
    """Seconds in which the thread waited for a disk, of the text of its ``stat``.

    Counted for threads that began while ``kernel.task_delayacct`` was 1.
    """
    fields = stat[stat.rindex(")") + 2 :].split()  # the name before it may hold anything; the third field comes first
    index = _DISK_WAIT_FIELD - 3
    return int(fields[index]) / _TICKS_PER_S if len(fields) > index else 0.0
