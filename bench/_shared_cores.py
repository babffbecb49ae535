"""Containers that get a part of a core each, whatever the platform gave them: one cgroup quota a container."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from bench._common import say
from bench._platform import BenchPlatform
from invoker.shares import CgroupShares, find_shares
from thaw.action import KIND_LLM


@contextlib.contextmanager
def capped(platform: BenchPlatform, cores: float) -> Iterator[bool]:
    """Every model's container that runs now.  Yields False where no quota can be set.

    The groups outlive the block until their processes have ended: :func:`sweep`.
    """
    shares = find_shares(_name())
    if not isinstance(shares, CgroupShares):
        say("no quota can be set: the control group cpu cannot be written")
        yield False
        return
    for container, pids in containers(platform).items():
        for pid in pids:
            shares.apply(container, pid, cores)
    yield True


def sweep() -> None:
    shares = find_shares(_name())
    if isinstance(shares, CgroupShares):
        shares.close()


def containers(platform: BenchPlatform) -> dict[str, list[int]]:
    """The processes of each model's container, as the invokers keep them on disk."""
    owners = {owner.parent.name: json.loads(owner.read_text())
              for owner in Path(platform.platform.run_dir).glob("host-*/c/*/owner.json")}  # fmt: skip
    leaders = {name: int(owner["pid"]) for name, owner in owners.items() if owner["kind"] == KIND_LLM}
    running = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]
    return {name: [pid for pid in running if _session(pid) == leader] for name, leader in leaders.items() if leader}


def _name() -> str:
    return f"bench-{os.getpid()}"


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0
