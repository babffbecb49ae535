"""What does an honest tenant notice of 10,000 idle and 2,000 slow connections at its gateway?

The tenant invokes a Python function over kept-alive connections, one request at a time on each: alone, and beside a
crowd that another process holds (bench/_crowd.py).  Both are measured in turn, on one gateway.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from bench import _common
from bench._common import PYTHON, figure, interleave, judge, median, percentile, python_env, start
from bench._platform import BenchPlatform
from thaw import descriptors
from thaw.cli.client import action_path
from thaw.cli.properties import read_properties

_HELLO = "def main(args):\n    return {'greeting': 'Hello ' + args.get('name', 'stranger') + '!'}\n"
_PATH = "/api/v1/namespaces/_/actions/hello?blocking=true&result=true"
_CONNECTIONS = 4


@dataclass(frozen=True, slots=True)
class Answers:
    n: int
    p50_ms: float
    p99_ms: float


class SlowClients:
    def __init__(self, work: Path, platform: BenchPlatform, n_idle: int, n_slow: int, seconds: float) -> None:
        self.work, self.n_idle, self.n_slow, self.seconds = work, n_idle, n_slow, seconds
        auth = read_properties(platform.layout.wskprops)["AUTH"]
        self.headers = {"Authorization": f"Basic {base64.b64encode(auth.encode()).decode()}"}
        self.port = int(platform.platform.apihost.rsplit(":", 1)[1])
        self.pids = [pid for pid, line in platform.pids().items() if "[thaw-gateway]" in line]
        self.rss_mib: dict[str, float] = {}

    def alone(self) -> Answers:
        return self._measure("alone")

    def beside_the_crowd(self) -> Answers:
        command = [PYTHON, "-m", "bench._crowd", str(self.port), str(self.n_idle), str(self.n_slow)]
        crowd = start(command, self.work / "crowd.log", "crowd_ready", env=python_env(), own_session=True)
        try:
            return self._measure("crowd")
        finally:
            crowd.stop()

    def _measure(self, name: str) -> Answers:
        found: list[float] = []
        end = time.monotonic() + self.seconds
        threads = [threading.Thread(target=self._ask, args=(end, found)) for _ in range(_CONNECTIONS)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        # memory that Python has given free stays with the process, so "alone" is before the first crowd
        if name != "alone" or name not in self.rss_mib:
            self.rss_mib[name] = self._rss_mib()
        return Answers(len(found), round(percentile(found, 50), 2), round(percentile(found, 99), 2))

    def _ask(self, end: float, found: list[float]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        while time.monotonic() < end:
            began = time.monotonic()
            connection.request("POST", _PATH, b'{"name": "you"}', {**self.headers, "Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            if response.status != 200:
                raise SystemExit(f"the function's answer was {response.status}")
            found.append((time.monotonic() - began) * 1e3)
        connection.close()

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
        code = {"exec": {"kind": "python:3.11", "code": _HELLO, "binary": False}, "limits": {"concurrency": 1}}
        platform.api.put(action_path("hello"), code, overwrite=True)
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
