"""What does a well-behaved tenant notice of each flood of another one: how much longer does it wait for its answers?

The tenant invokes a Python function over kept-alive connections, one request at a time on each: alone, and beside a
tenant of another namespace that asks for as much as it can, from another process (bench/_flood.py, bench/_crowd.py).
All are measured in turn, on one gateway and one host that all share, as the generators share its cores.  Its lists of
its records wait beside the other tenant's invocations, too, whose records are written meanwhile.

The floor of each is what the tenant waits when the gateway does nothing for the flood: the same generator asks a server
that reads and answers as often a second as the platform did, and no more (bench/_bare.py).  A twin shows what an equal
share is: another tenant that asks no more than this one, whose four connections alone keep the gateway busy.
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
from bench._flood import LONG_BYTES, code, n_answered, status_of, was_flooded
from bench._honest import Answers, Honest
from bench._platform import BenchPlatform
from thaw.cli.platform_api.client import Client, action_path
from thaw.cli.platform_api.property_file import Target
from thaw.process import descriptors

_KINDS = ("requests", "accepted", "slow_readers", "bodies", "deploys", "connections")
_TWIN = "twin"
_NAMESPACE = "flood"
_IDLE, _SLOW = 10_000, 2_000
_DRAINED_S = 120.0


class Floods:
    def __init__(self, work: Path, platform: BenchPlatform, seconds: float) -> None:
        self.work, self.platform, self.seconds = work, platform, seconds
        self.tenant = Honest(platform)
        self._rates: dict[str, float] = {}  # the platform's answers to each flood, per second
        self.key = platform.api.post("/api/v1/thaw/keys", {"namespace": _NAMESPACE})["key"]
        other = Client(Target(platform.platform.apihost, self.key, "the benchmark"))
        for name, n_bytes in (("flooded", 0), ("long", LONG_BYTES)):
            other.put(action_path(name), code(n_bytes), overwrite=True)

    def alone(self, *, lists: bool = False) -> Answers:
        return self.tenant.ask(self.seconds, lists=lists)

    def beside(self, kind: str, *, lists: bool = False) -> Answers:
        answers, told = self._beside(kind, self.tenant.port, lists=lists)
        self._drain()
        if kind != "connections":
            if not was_flooded(kind, told):
                raise SystemExit(f"{kind}: this was no flood: {told}")
            self._rates[kind] = n_answered(kind, told) / self.seconds
        return answers

    def beside_a_bare_server(self, kind: str) -> Answers:
        """Measure beside a bare server, which answers the flood at the same rate as the platform did before."""
        n_bytes = LONG_BYTES if kind == "slow_readers" else 2
        status = 200 if kind == "connections" else status_of(kind)
        command = [PYTHON, "-m", "bench._bare", str(self._rates.get(kind, 0)), str(status), str(n_bytes)]
        log = self.work / "bare.log"
        bare = start(command, log, "bare_ready", env=python_env(), own_session=True)
        try:
            return self._beside(kind, int(log.read_text().split()[1]))[0]
        finally:
            bare.stop()

    def _beside(self, kind: str, port: int, *, lists: bool = False) -> tuple[Answers, str]:
        """Return the tenant's answers and the flood's last line."""
        log = self.work / f"{kind}.log"
        if kind == "connections":
            command, ready = [PYTHON, "-m", "bench._crowd", str(port), str(_IDLE), str(_SLOW)], "crowd_ready"
        else:
            command, ready = [PYTHON, "-m", "bench._flood", str(port), kind], "flood_ready"
        flood = start(command, log, ready, env=python_env(FLOOD_KEY=self.key), own_session=True, deadline_s=120.0)
        try:
            answers = self.tenant.ask(self.seconds, lists=lists)
        finally:
            flood.stop()
            told = log.read_text().strip().splitlines()[-1]
            say(f"{kind} at port {port}: {told}")
        return answers, told

    def _drain(self) -> None:
        """Wait until the flood's 202s have ended, so that they do not disturb the next measurement."""
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
        kinds = [options.only] if options.only else _KINDS
        runs: dict[str, Callable[[], Answers]] = {}
        for kind in kinds:
            runs[kind] = partial(bench.beside, kind)
            runs[_bare(kind)] = partial(bench.beside_a_bare_server, kind)
        if not options.only:
            runs[_TWIN] = partial(bench.beside, _TWIN)
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
            floor=f"{p99[_bare(kind)] / p99['alone']:.2f}, beside a server that does nothing for the same load; "
            f"{p99[kind]:.1f} against {p99['alone']:.1f} ms; p50 {p50[kind]:.1f} against {p50['alone']:.1f} ms, "
            f"floor {p50[_bare(kind)]:.1f} ms",
        )
        for kind in kinds
    ]
    if _TWIN in p99:
        equal, alone = p99[_TWIN], p99["alone"]
        said = f"{equal:.1f} against {alone:.1f} ms; p50 {p50[_TWIN]:.1f} against {p50['alone']:.1f} ms"
        goals.append(figure("p99_beside_twin", equal / alone, floor=said))
    if "lists_alone" in p99:
        beside, alone = p99["lists_beside_requests"], p99["lists_alone"]
        goals.append(figure("list_p99_beside_requests", beside / alone, floor=f"{beside:.1f} against {alone:.1f} ms"))
    return _common.report("floods", goals, rounds=rounds, p50_ms=p50, p99_ms=p99)


def _bare(kind: str) -> str:
    return f"{kind}_at_a_bare_server"


if __name__ == "__main__":
    sys.exit(main())
