"""What does a well-behaved tenant notice of each flood of another one: how much longer does it wait for its answers?

The tenant invokes a Python function over kept-alive connections, one request at a time on each: alone, and beside a
tenant of another namespace that asks for as much as it can, from another process (bench/_flood.py, bench/_crowd.py).
All are measured in turn, on one gateway and one host that all share, as the generators share its cores.  Its lists of
its records wait beside the other tenant's invocations, too, whose records are written meanwhile.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench import _common
from bench._common import PYTHON, figure, interleave, judge, median, python_env, say, start
from bench._flood import LONG_BYTES, code, was_flooded
from bench._honest import Answers, Honest
from bench._platform import BenchPlatform
from thaw.cli.client import Client, action_path
from thaw.cli.properties import Target
from thaw.process import descriptors

_KINDS = ("requests", "accepted", "slow_readers", "bodies", "deploys")
_NAMESPACE = "flood"
_IDLE, _SLOW = 10_000, 2_000
_DRAINED_S = 120.0


class Floods:
    def __init__(self, work: Path, platform: BenchPlatform, seconds: float) -> None:
        self.work, self.platform, self.seconds = work, platform, seconds
        self.tenant = Honest(platform)
        self.key = platform.api.post("/api/v1/thaw/keys", {"namespace": _NAMESPACE})["key"]
        other = Client(Target(platform.platform.apihost, self.key, "the benchmark"))
        for name, n_bytes in (("flooded", 0), ("long", LONG_BYTES)):
            other.put(action_path(name), code(n_bytes), overwrite=True)

    def alone(self, *, lists: bool = False) -> Answers:
        return self.tenant.ask(self.seconds, lists=lists)

    def beside(self, kind: str, *, lists: bool = False) -> Answers:
        command = [PYTHON, "-m", "bench._flood", str(self.tenant.port), kind]
        return self._beside(kind, command, "flood_ready", lists=lists)

    def beside_connections(self) -> Answers:
        command = [PYTHON, "-m", "bench._crowd", str(self.tenant.port), str(_IDLE), str(_SLOW)]
        return self._beside("connections", command, "crowd_ready")

    def _beside(self, kind: str, command: list[str], ready: str, *, lists: bool = False) -> Answers:
        log = self.work / f"{kind}.log"
        flood = start(command, log, ready, env=python_env(FLOOD_KEY=self.key), own_session=True, deadline_s=120.0)
        try:
            return self.tenant.ask(self.seconds, lists=lists)
        finally:
            flood.stop()
            told = log.read_text().strip().splitlines()[-1]
            say(f"{kind}: {told}")
            self._drain()
            if kind in _KINDS and not was_flooded(kind, told):
                raise SystemExit(f"{kind}: this was no flood: {told}")

    def _drain(self) -> None:
        """Wait until the flood's 202s have ended: what is measured next is not beside them."""
        end = time.monotonic() + _DRAINED_S
        while self.platform.api.get(f"/api/v1/thaw/namespaces/{_NAMESPACE}/quotas")["used"]["accepted"]:
            if time.monotonic() > end:
                raise SystemExit("the flood's 202s did not end")
            time.sleep(0.2)


def main() -> int:
    options = _common.options(__doc__ or "", only=("", "this flood only"))
    rounds = options.n or (1 if options.quick else 5)
    descriptors.raise_limit()
    work = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        platform = stack.enter_context(BenchPlatform(work / "state"))
        bench = Floods(work, platform, 5.0 if options.quick else 15.0)
        runs: dict[str, Callable[[], Answers]] = {kind: partial(bench.beside, kind) for kind in _KINDS}
        runs["connections"] = bench.beside_connections
        if options.only:
            runs = {options.only: runs[options.only]}
        bench.alone()  # this starts the containers
        lists: dict[str, Callable[[], Answers]] = {
            "lists_alone": partial(bench.alone, lists=True),
            "lists_beside_requests": partial(bench.beside, "requests", lists=True),
        }
        found = interleave({"alone": bench.alone, **runs, **({} if options.only else lists)}, rounds)
    p99 = {name: median([v.p99_ms for v in values]) for name, values in found.items()}
    p50 = {name: median([v.p50_ms for v in values]) for name, values in found.items()}
    goals = [
        judge(
            f"p99_beside_{kind}",
            p99[kind] / p99["alone"],
            "<=",
            2,
            floor=f"{p99[kind]:.1f} against {p99['alone']:.1f} ms; p50 {p50[kind]:.1f} against {p50['alone']:.1f} ms",
        )
        for kind in runs
    ]
    if "lists_alone" in p99:
        beside, alone = p99["lists_beside_requests"], p99["lists_alone"]
        goals.append(figure("list_p99_beside_requests", beside / alone, floor=f"{beside:.1f} against {alone:.1f} ms"))
    return _common.report("floods", goals, rounds=rounds, p50_ms=p50, p99_ms=p99)


if __name__ == "__main__":
    sys.exit(main())
