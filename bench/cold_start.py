"""How long does a start from nothing or from a stem cell take to the first token, compared with vLLM and the bound?

*From nothing*: a platform is up that has imported neither torch nor vLLM and holds no byte of the model.  *From a stem
cell*: the platform has one idle process that has done the imports, and no byte of the model.  *Serverless vLLM*: the
model is copied from the same store over the same link, then vLLM's own API server starts, and no Thaw process runs.
Runs alternate.  Each Thaw run has a platform of its own, so nothing of the model is resident.  The same client asks all
systems for a streamed answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import _common, _model
from bench._calibrate import Constants, calibrate
from bench._common import Goal, interleave, judge, median, say
from bench._explained import Start, read_start
from bench._links import Link, shaped, unlimited
from bench._origin import Origin
from bench._platform import BenchPlatform, llm_config
from bench._prewarmed_vllm import copy
from bench._sse import Caller
from bench._vllm import VllmServer, importing_vllm
from thaw.cli.model_stores.demo_model import cache_dir
from thaw.dev.smollm2 import obtain

PROMPT = (
    "A cook has three baskets. The first holds twelve apples, the second holds twice as many pears, and the "
    "third holds as many plums as the other two hold together. Explain step by step how many fruits there are, "
    "then name the basket that holds most."
)
"""About 60 tokens.  This is less than one KV block of vLLM on a CPU (128), so no run finds a cached prefix."""

_WARM = 5
_SETTLE_S = 3.0
"""After this time the scheduler has seen the platform's hosts and knows what the model consists of."""
_FORKED_VLLM = "prewarmed_vllm_unlimited"


@dataclass(frozen=True, slots=True)
class ColdRun:
    """One cold start of Thaw: the client's measurement, the trace, and the same prompt on the warm instance."""

    ttft_s: float
    start: Start
    warm_ttft_s: float
    stem_cell: dict[str, float]

    def __str__(self) -> str:
        s = self.start
        return (
            f"ttft {self.ttft_s:.2f} s, first byte {s.first_byte_s * 1e3:.0f} ms, last byte {s.last_byte_s:.2f} s, "
            f"warm {self.warm_ttft_s * 1e3:.0f} ms, unexplained {s.unexplained_s * 1e3:.0f} ms"
        )


@dataclass(frozen=True, slots=True)
class VllmRun:
    ttft_s: float
    copy_s: float

    def __str__(self) -> str:
        return f"ttft {self.ttft_s:.2f} s, of which copying {self.copy_s:.2f} s"


class ColdStart:
    def __init__(self, work: Path, delay_s: float) -> None:
        self.work, self.delay_s = work, delay_s
        self.threads = len(os.sched_getaffinity(0))
        model = work / "models" / "smollm2"
        shutil.copytree(obtain(cache_dir(), say), model)
        self.index = _model.write_index(model)
        self.names = [f.name for f in self.index.files]
        self.vllm_command = ""
        self._copies = 0

    def thaw(self, link: Link, *, stem_cells: bool) -> ColdRun:
        with (
            BenchPlatform(
                self.work / f"state-{link.name}", stem_cells=stem_cells, link=link.option, store=self.work / "empty"
            ) as platform,
            link.store(platform) as url,
        ):
            platform.deploy("chat", llm_config(f"{url}/models/smollm2"))
            time.sleep(_SETTLE_S)
            cell = platform.stem_cell() if stem_cells else {}
            caller = platform.caller("chat")
            with self._delay(platform):
                cold = caller.chat(PROMPT, 8)
            warm = [caller.chat(PROMPT, 2).ttft_s for _ in range(_WARM)]
            caller.close()
            events, _ = platform.trace(cold.activation_id)
            return ColdRun(cold.ttft_s, read_start(events, link.bytes_per_s), median(warm), cell)

    def vllm(self, link: Link) -> VllmRun:
        with self._target() as target:
            began = time.monotonic()
            copied = copy(f"{link.loopback.url}/models/smollm2", self.names, target)
            with VllmServer(target, self.work, threads=self.threads) as server:
                self.vllm_command = server.command
                asked = time.monotonic()
                answer = Caller(server.url, "chat").chat(PROMPT, 8)
                return VllmRun(asked - began + answer.ttft_s, copied)

    def prewarmed_vllm(self, process: subprocess.Popen[str], link: Link) -> VllmRun:
        assert process.stdin is not None
        assert process.stdout is not None
        with self._target() as target:
            order = {
                "origin": f"{link.loopback.url}/models/smollm2",
                "names": self.names,
                "target": str(target),
                "max_model_len": 2048,
                "prompt": PROMPT,
            }
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line.startswith("{"):
                raise SystemExit(f"forked vLLM failed: {(self.work / 'prewarmed-vllm.log').read_text()[-1500:]}")
            plain = json.loads(line)
            process.stdout.readline()
            return VllmRun(plain["ttft_s"], plain["copy_s"])

    @contextlib.contextmanager
    def _target(self) -> Iterator[Path]:
        """Yield a local directory in shared memory, so that no disk slows vLLM down."""
        self._copies += 1
        target = self.work / f"copy-{self._copies}"
        try:
            yield target
        finally:
            shutil.rmtree(target, ignore_errors=True)

    @contextlib.contextmanager
    def _delay(self, platform: BenchPlatform) -> Iterator[None]:
        """Stop the invoker for ``delay_s``, so that nothing fetches.  This tests the benchmark: its goals must fail."""
        if not self.delay_s:
            yield
            return
        pid = platform.hold_up("invoker.main")
        timer = threading.Timer(self.delay_s, os.kill, (pid, signal.SIGCONT))
        timer.start()
        try:
            yield
        finally:
            timer.join()


def main() -> int:
    options = _common.options(
        __doc__ or "",
        delay_s=(0.0, "hold the host up for so long before it may fetch"),
        only=("", "names of runs, comma-separated"),
    )
    rounds = options.n or (1 if options.quick else 5)
    work = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    (work / "empty").mkdir()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        bench = ColdStart(work, options.delay_s)
        say("constants of the bound")
        constants = calibrate(work)
        say(f"  {constants}")
        loopback = stack.enter_context(Origin(work, work))
        free, slow = unlimited(work, loopback), shaped(work, loopback, 200)
        runs: dict[str, Callable[[], ColdRun | VllmRun]] = {
            "stem_unlimited": partial(bench.thaw, free, stem_cells=True),
            "stem_200m": partial(bench.thaw, slow, stem_cells=True),
            "scratch_unlimited": partial(bench.thaw, free, stem_cells=False),
            "vllm_unlimited": partial(bench.vllm, free),
        }
        wanted = options.only.split(",") if options.only else [*runs, *([] if options.quick else [_FORKED_VLLM])]
        if _FORKED_VLLM in wanted:  # do this only when it is wanted, because its imports take as long as a start
            runs[_FORKED_VLLM] = partial(bench.prewarmed_vllm, stack.enter_context(_imported_vllm(work)), free)
        found = interleave({name: runs[name] for name in wanted}, rounds)
        goals = judge_all(found, constants, bench.index.n_bytes, free, slow)
    return _common.report(
        "cold_start",
        goals,
        rounds=rounds,
        delay_s=options.delay_s,
        vllm_command=bench.vllm_command,
        links=[link.describe() for link in (free, slow)],
        constants=_plain(constants),
        runs=_rows(found),
    )


def judge_all(
    found: dict[str, list[ColdRun | VllmRun]], constants: Constants, n_bytes: int, free: Link, slow: Link
) -> list[Goal]:
    """Every goal whose runs were made."""
    thaw = {name: [r for r in runs if isinstance(r, ColdRun)] for name, runs in found.items()}
    ttft = {name: median([r.ttft_s for r in runs]) for name, runs in found.items()}
    goals: list[Goal] = []
    if runs := thaw.get("stem_200m"):
        tails = [(r.start.ttft_s - r.start.last_byte_s) / r.warm_ttft_s for r in runs]
        goals.append(judge("tail_ratio", median(tails), "<=", 2.5, paced=slow.paced, floor=_tail_floor(runs)))
    stems = thaw.get("stem_200m", []) + thaw.get("stem_unlimited", [])
    if stems:
        first = median([r.start.first_byte_s for r in stems])
        goals.append(judge("first_byte_ms", first * 1e3, "<=", 100, floor=_longest(stems)))
    for name, link, goal in (("200m", slow, 1.10), ("unlimited", free, 1.5)):
        if runs := thaw.get(f"stem_{name}"):
            bound = constants.bound_s(n_bytes, link.bytes_per_s, min(r.warm_ttft_s for r in runs))
            value = ttft[f"stem_{name}"] / bound
            floor = f"bound {bound:.2f} s, reached {ttft[f'stem_{name}']:.2f} s; {_longest(runs)}"
            goals.append(judge(f"ttft_vs_bound_{name}", value, "<=", goal, paced=link.paced, floor=floor))
    if every := [r for runs in thaw.values() for r in runs]:
        worst = max(every, key=lambda r: r.start.unexplained_s)
        goals.append(judge("unexplained_ms", worst.start.unexplained_s * 1e3, "<=", 50, floor=_unexplained(worst)))
    for name, ours, theirs, goal in _RATIOS:
        if ours in ttft and theirs in ttft:
            floor = f"{ttft[ours]:.2f} against {ttft[theirs]:.2f} s"
            goals.append(judge(name, ttft[ours] / ttft[theirs], "<=", goal, floor=floor))
    return goals


_RATIOS = (
    ("ttft_prewarmed_vs_vllm", "stem_unlimited", "vllm_unlimited", 0.10),
    ("ttft_scratch_vs_vllm", "scratch_unlimited", "vllm_unlimited", 0.35),
    ("ttft_prewarmed_vs_prewarmed_vllm", "stem_unlimited", _FORKED_VLLM, 0.6),
)


def _tail_floor(runs: list[ColdRun]) -> str:
    tail = median([r.start.ttft_s - r.start.last_byte_s for r in runs])
    return f"{tail * 1e3:.0f} ms behind the last byte, warm {median([r.warm_ttft_s for r in runs]) * 1e3:.0f} ms"


def _longest(runs: list[ColdRun]) -> str:
    """The longest leaves and gaps of the slowest run."""
    t = max(runs, key=lambda r: r.ttft_s).start.timeline
    leaves = sorted((i for i in t.intervals if i.is_leaf), key=lambda i: -i.seconds)[:4]
    gaps = sorted(t.gaps, key=lambda g: -g.seconds)[:2]
    shown = [f"{i.phase} {i.seconds * 1e3:.0f}" for i in leaves]
    return ", ".join(shown + [f"gap {g.after}→{g.before} {g.seconds * 1e3:.0f}" for g in gaps]) + " ms"


def _unexplained(run: ColdRun) -> str:
    """The phases, and the gaps between phases, that have the most unexplained time."""
    start = run.start
    parts = [(a.phase.phase, a.unexplained_s) for a in start.explanation.accounts]
    parts += [(f"{g.after}→{g.before}", g.seconds) for g in start.timeline.gaps]
    shown = [f"{name} {seconds * 1e3:.0f}" for name, seconds in sorted(parts, key=lambda p: -p[1])[:6]]
    return ", ".join(shown) + " ms"


@contextlib.contextmanager
def _imported_vllm(work: Path) -> Iterator[subprocess.Popen[str]]:
    with importing_vllm(work / "prewarmed-vllm.log") as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


def _rows(found: dict[str, list[ColdRun | VllmRun]]) -> dict[str, list[str]]:
    return {name: [str(r) for r in runs] for name, runs in found.items()} | {
        "stem_cell": [
            json.dumps(r.stem_cell) for runs in found.values() for r in runs if isinstance(r, ColdRun) and r.stem_cell
        ][:1]
    }


def _plain(constants: Constants) -> dict[str, float]:
    return {name: round(getattr(constants, name), 4) for name in constants.__slots__}


if __name__ == "__main__":
    sys.exit(main())
