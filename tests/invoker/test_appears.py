"""Waiting for a socket to appear takes a descriptor, and only until the wait ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from invoker.drivers.socket_wait import wait_listens
from thaw.errors import PlatformError


def watches() -> int:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return links.count("anon_inode:inotify")


def test_a_directory_that_is_not_there_costs_no_descriptor(run_dir: Path) -> None:
    before = watches()
    for _ in range(3):
        with pytest.raises(PlatformError, match="cannot watch .*: No such file or directory"):
            wait_listens(str(run_dir / "none" / "f"))
    assert watches() == before
