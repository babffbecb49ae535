"""Finds out whether the kernel killed a process of this container for exceeding the container's memory limit."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_CGROUP: Final = Path("/sys/fs/cgroup")
_NAMES: Final = (("memory.events", "memory.max"), ("memory/memory.oom_control", "memory/memory.limit_in_bytes"))
"""The files of control groups of version 2 and of version 1, as a container sees its own."""


class MemoryLimit:
    """Must be made before the function runs.  Without the files of a control group, it never reports a limit as
    exceeded."""

    def __init__(self, cgroup: Path = _CGROUP) -> None:
        self._cgroup = cgroup
        self._before = self._kills()

    def exceeded_mib(self) -> int:
        """Return the limit in MiB if the kernel has killed a process for it since this object was made, else 0."""
        if self._kills() <= self._before:
            return 0
        for _, limit in _NAMES:
            text = self._read(limit).strip()
            if text.isdigit():
                return int(text) >> 20
        return 0

    def _kills(self) -> int:
        for events, _ in _NAMES:
            for line in self._read(events).splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
        return 0

    def _read(self, name: str) -> str:
        try:
            return (self._cgroup / name).read_text()
        except OSError:
            return ""
