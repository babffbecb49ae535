"""What does an honest tenant notice of 10,000 idle and 2,000 slow connections at its gateway?

The tenant invokes a Python function over kept-alive connections, one request at a time on each: alone, and beside a
crowd that another process holds (bench/_crowd.py).  Both are measured in turn, on one gateway.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

from bench import _common
from bench._common import PYTHON, figure, interleave, judge, median, python_env, start
from bench._honest import Answers, Honest
from bench._platform import BenchPlatform
from thaw.process import descriptors


class SlowClients:
    def __init__(self, work: Path, platform: BenchPlatform, n_idle: int, n_slow: int, seconds: float) -> None:
        self.work, self.n_idle, self.n_slow, self.seconds = work, n_idle, n_slow, seconds
        self.tenant = Honest(platform)
        self.pids = [pid for pid, line in platform.pids().items() if "[thaw-gateway]" in line]
        self.rss_mib: dict[str, float] = {}

    def alone(self) -> Answers:
        return self._measure("alone")

    def beside_the_crowd(self) -> Answers:
        command = [PYTHON, "-m", "bench._crowd", str(self.tenant.port), str(self.n_idle), str(self.n_slow)]
        crowd = start(command, self.work / "crowd.log", "crowd_ready", env=python_env(), own_session=True)
        try:
            return self._measure("crowd")
        finally:
            crowd.stop()

    def _measure(self, name: str) -> Answers:
        found = self.tenant.ask(self.seconds)
        # memory that Python has given free stays with the process, so "alone" is before the first crowd
        if name != "alone" or name not in self.rss_mib:
            self.rss_mib[name] = self._rss_mib()
        return found

    def _rss_mib(self) -> float:
        lines = [line for p in self.pids for line in Path(f"/proc/{p}/status").read_text().splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def main() -> int:
    options = _common.options(__doc__ or "", idle=(10_000, "idle connections"), slow=(2_000, "slow connections"))
    rounds = options.n or (1 if options.quick else 5)
    descriptors.raise_limit()
    work = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        platform = stack.enter_context(BenchPlatform(work / "state"))
        bench = SlowClients(work, platform, options.idle, options.slow, 5.0 if options.quick else 15.0)
        bench.alone()  # this starts the containers
        found = interleave({"alone": bench.alone, "crowd": bench.beside_the_crowd}, rounds)
    p99 = {name: median([v.p99_ms for v in values]) for name, values in found.items()}
    p50 = {name: median([v.p50_ms for v in values]) for name, values in found.items()}
    floor = f"{p99['crowd']:.1f} against {p99['alone']:.1f} ms; p50 {p50['crowd']:.1f} against {p50['alone']:.1f} ms"
    goals = [
        judge("honest_p99_vs_alone", p99["crowd"] / p99["alone"], "<=", 2, floor=floor),
        figure("crowd_mib", bench.rss_mib["crowd"] - bench.rss_mib["alone"]),
    ]
    facts = {"p50_ms": p50, "p99_ms": p99, "idle": options.idle, "slow": options.slow}
    return _common.report("slow_clients", goals, rounds=rounds, **facts)


if __name__ == "__main__":
    sys.exit(main())
