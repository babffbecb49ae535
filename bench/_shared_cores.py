"""Containers that each get a part of a core by a cgroup quota, independent of the platform's own shares."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench._common import cpu_seconds, say
from bench._platform import BenchPlatform
from invoker.drivers.cpu_shares import CgroupShares, find_shares
from thaw import wire
from thaw.action import KIND_LLM
from thaw.instance import InstanceRecord

_SETTLED_S = 60.0


@dataclass(frozen=True, slots=True)
class Container:
    """A model's container, as its invoker records it on disk."""

    name: str
    stage: int
    pids: tuple[int, ...]

    def cpu_s(self) -> dict[int, float]:
        return {pid: cpu_seconds(pid) for pid in self.pids}


class Capped:
    def __init__(self, shares: CgroupShares, running: list[Container], cores: float) -> None:
        self._shares, self._running = shares, running
        for container in running:
            for pid in container.pids:
                shares.apply(container.name, pid, cores)
        self._began = {c.name: (c.cpu_s(), *self._periods(c)) for c in running}

    def usage(self) -> list[str]:
        """The use of each stage since the quota was set: the CPU seconds of its processes, and the number of periods in
        which the quota throttled it.
        """
        found = []
        for c in sorted(self._running, key=lambda c: c.stage):
            cpu, periods, throttled = self._began[c.name]
            now, (all_periods, all_throttled) = c.cpu_s(), self._periods(c)
            used = " + ".join(f"{now[pid] - cpu[pid]:.2f}" for pid in c.pids if now[pid] - cpu[pid] > 0.01)
            found.append(
                f"stage {c.stage}: {used} CPU-s, held back in {all_throttled - throttled} of "
                f"{all_periods - periods} periods"
            )
        return found

    def _periods(self, container: Container) -> tuple[int, int]:
        plain = (self._shares.path(container.name) / "cpu.stat").read_text().split()
        stat = dict(zip(plain[::2], map(int, plain[1::2]), strict=True))
        return stat["nr_periods"], stat["nr_throttled"]


@contextlib.contextmanager
def capped(platform: BenchPlatform, cores: float) -> Iterator[Capped | None]:
    """Limit every model's container that runs now.  Yields None where no quota can be set.

    The control groups remain after the block, because their processes still run: :func:`sweep` removes them.
    """
    shares = find_shares(_name())
    if not isinstance(shares, CgroupShares):
        say("no quota can be set: the control group cpu cannot be written")
        yield None
        return
    yield Capped(shares, containers(platform), cores)


def sweep() -> None:
    shares = find_shares(_name())
    if isinstance(shares, CgroupShares):
        shares.close()


def wait_fetched(platform: BenchPlatform) -> None:
    """Wait until no host fetches: the background fetch of a full worker would disturb the measurement."""
    end = time.monotonic() + _SETTLED_S
    while any(h["fetches"] for h in platform.api.get("/api/v1/thaw/hosts")["hosts"]):
        if time.monotonic() > end:
            raise SystemExit(f"a host still fetches after {_SETTLED_S:.0f} s")
        time.sleep(0.2)


def containers(platform: BenchPlatform) -> list[Container]:
    owners = {
        owner.parent.name: json.loads(owner.read_text())
        for owner in Path(platform.platform.run_dir).glob("host-*/c/*/owner.json")
    }
    running = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]
    return [
        Container(name, _stage(owner), tuple(pid for pid in running if _session(pid) == int(owner["pid"])))
        for name, owner in owners.items()
        if owner["kind"] == KIND_LLM and owner["pid"]
    ]


def _stage(owner: dict[str, dict[str, str]]) -> int:
    record = owner["labels"].get("record")
    return wire.loads(InstanceRecord, record).stage if record else -1  # a stem cell has none


def _name() -> str:
    return f"bench-{os.getpid()}"


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0
