"""A container's share of the cores, as a cgroup CPU quota: controller ``cpu`` of v1, or v2.

An unprivileged installation can write neither.  Its share is reported as ``none``, and predictions assume that each
container has the whole host.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Protocol

PERIOD_US: Final = 100_000  # the kernel's default


class Shares(Protocol):
    name: str

    def apply(self, container_id: str, pid: int, cores: float) -> None: ...

    def remove(self, container_id: str) -> None: ...

    def sweep(self, kept: frozenset[str]) -> None:
        """Remove the groups that earlier invokers left for containers that are not in ``kept``."""

    def close(self) -> None: ...


class NoShares:
    name = "none"

    def apply(self, container_id: str, pid: int, cores: float) -> None:
        """Nothing enforces a share here."""

    def remove(self, container_id: str) -> None:
        """There is nothing to remove."""

    def sweep(self, kept: frozenset[str]) -> None:
        """There is nothing."""

    def close(self) -> None:
        """There is nothing."""


class CgroupShares:
    """One directory per container under ``root``/thaw-<name>.  A process is moved there before it starts threads that
    compute."""

    name = "enforced"

    def __init__(self, root: Path, name: str, version: int) -> None:
        self._parent = root / f"thaw-{name}"
        self._version = version
        self._parent.mkdir(exist_ok=True)
        if version == 2:
            (self._parent / "cgroup.subtree_control").write_text("+cpu")

    def path(self, container_id: str) -> Path:
        return self._parent / container_id

    def apply(self, container_id: str, pid: int, cores: float) -> None:
        """Bound ``pid`` and the processes that it starts to ``cores`` cores.  It is no error if it has ended."""
        directory = self.path(container_id)
        quota_us = max(1000, int(cores * PERIOD_US))  # the kernel takes no less than 1 ms
        directory.mkdir(exist_ok=True)
        if self._version == 1:
            (directory / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (directory / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (directory / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        try:
            (directory / "cgroup.procs").write_text(str(pid))
        except ProcessLookupError:
            return

    def remove(self, container_id: str) -> None:
        """A group that still holds a dying process stays until the next clean-up."""
        try:
            self.path(container_id).rmdir()
        except OSError:
            return

    def sweep(self, kept: frozenset[str]) -> None:
        try:
            left = list(self._parent.iterdir())
        except FileNotFoundError:
            return  # the groups of this host are gone already, with the invoker that ran before
        for directory in left:
            if directory.is_dir() and directory.name not in kept:
                self.remove(directory.name)

    def close(self) -> None:
        """Remove every group; the parent stays when one still holds a process."""
        self.sweep(frozenset())
        try:
            self._parent.rmdir()
        except OSError:
            return


def find_shares(name: str, *, enabled: bool = True, base: Path = Path("/sys/fs/cgroup")) -> Shares:
    """Return the shares that this machine can enforce.  This tries to make the group ``name``, which nobody else may
    use: closing the shares removes it."""
    if enabled:
        for root, version in ((base / "cpu", 1), (base, 2)):
            if _has_cpu(root, version) and os.access(root, os.W_OK):
                try:
                    return CgroupShares(root, name, version)
                except OSError:
                    continue
    return NoShares()


def _has_cpu(root: Path, version: int) -> bool:
    if version == 1:
        return (root / "cpu.cfs_quota_us").exists()
    try:
        return "cpu" in (root / "cgroup.controllers").read_text().split()
    except OSError:
        return False
