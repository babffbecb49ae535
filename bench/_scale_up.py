"""A burst on a model that runs nowhere: a group that becomes several workers, one that becomes one, or as many single
workers from the start (``bench/consolidate.py --burst``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from bench._common import Goal, figure, judge, median
from bench._links import Link
from bench._platform import BenchPlatform, llm_config
from bench._sse import Streamed
from thaw.tracing.trace import TraceEvent

BATCH: Final = 8
_PROMPT: Final = "Tell a short story about a lighthouse keeper, number {}."
_SETTLE_S: Final = 3.0
_GROWN_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Burst:
    """The answers to requests that came together.  ``grown`` are the ends of the consolidations, by their traces."""

    answers: tuple[Streamed, ...]
    grown: tuple[TraceEvent, ...] = ()
    switched_s: float | None = None  # time from the burst to the switch of stage 0
    grown_s: float | None = None  # time from the burst to the last end

    @property
    def ttft_s(self) -> float:
        return fmean(a.ttft_s for a in self.answers)

    @property
    def tpot_s(self) -> float:
        return fmean((a.arrivals_s[-1] - a.ttft_s) / max(1, a.completion_tokens - 1) for a in self.answers)

    @property
    def total_s(self) -> float:
        return fmean(a.arrivals_s[-1] for a in self.answers)

    def paces_s(self, at_s: float) -> tuple[float, float]:
        """The mean time between two tokens that came before this time, and after it."""
        gaps = [(b, b - a) for answer in self.answers for a, b in pairwise(answer.arrivals_s)]
        before, after = [gap for at, gap in gaps if at <= at_s], [gap for at, gap in gaps if at > at_s]
        return fmean(before or [math.nan]), fmean(after or [math.nan])

    def __str__(self) -> str:
        said = f"first token {self.ttft_s:.2f} s, {1e3 * self.tpot_s:.0f} ms per token, {self.total_s:.1f} s in all"
        if self.grown_s is None or self.switched_s is None:
            return said
        before, after = (1e3 * pace_s for pace_s in self.paces_s(self.switched_s))
        paces = f"{before:.0f} ms before stage 0 switched after {self.switched_s:.1f} s, {after:.0f} ms after it"
        return f"{said}, {paces}, {len(self.grown)} workers after {self.grown_s:.1f} s"


class Bursts:
    def __init__(self, work: Path, model: Path, n_tokens: int, n_stages: int) -> None:
        self._work, self._model, self._n_tokens, self._n_stages = work, model, n_tokens, n_stages
        self._n = 0

    def run(self, platform: BenchPlatform, url: str, *, stages: int, keep: int) -> Burst:
        """Each group has ``stages`` stages, and ``keep`` of them become workers."""
        self._n += 1
        action = f"burst-{self._n}"
        address = self._work / "models" / action  # no host has seen this address
        address.symlink_to(self._model)
        several = {"keep": keep} if stages > 1 else {}
        scaling = {
            "stages": stages,
            "max_stages": stages,
            "max_instances": self._n_stages,
            "max_batch": BATCH,
            **several,
        }
        config = llm_config(f"{url}/models/{action}", **scaling)
        config["resources"]["gpu_memory_mb"] = 3072
        platform.deploy(action, config)
        try:
            time.sleep(_SETTLE_S)
            return self._measured(platform, action, keep if stages > 1 else 0)
        finally:
            platform.remove(action)
            address.unlink()

    def _measured(self, platform: BenchPlatform, action: str, n_grown: int) -> Burst:
        n = BATCH * self._n_stages

        def ask(i: int) -> Streamed:
            caller = platform.caller(action)
            try:
                return caller.chat(_PROMPT.format(i), self._n_tokens, ignore_eos=True)
            finally:
                caller.close()

        with ThreadPoolExecutor(n) as pool:
            answers = tuple(pool.map(ask, range(n)))
        if any(a.completion_tokens != self._n_tokens for a in answers):
            raise SystemExit(f"answers of {sorted({a.completion_tokens for a in answers})} tokens")
        if not n_grown:
            return Burst(answers)
        grown, begun_ns = _grown(platform, answers, n_grown)
        ends_s = [((e.mono_ns - begun_ns) / 1e9, e.stage) for e in grown]
        return Burst(answers, grown, min(at for at, stage in ends_s if not stage), max(ends_s)[0])


def _grown(platform: BenchPlatform, answers: Sequence[Streamed], n: int) -> tuple[tuple[TraceEvent, ...], int]:
    """The ends of ``n`` consolidations, and when the burst came.  The trace of a request that waited for the start has
    them; all processes are on one machine, so they share a clock."""
    until_s, ended = time.monotonic() + _GROWN_S, list[TraceEvent]()
    while time.monotonic() < until_s:
        for answer in answers:
            events, _ = platform.trace(answer.activation_id)
            ended = [e for e in events if e.name == "consolidate.end" and "error" not in e.attrs]
            if len(ended) >= n:
                return tuple(ended), min(e.mono_ns for e in events if e.name == "queued.begin")
    raise SystemExit(f"{len(ended)} of {n} workers within {_GROWN_S:g} s")


def goals(single: Sequence[Burst], one: Sequence[Burst], several: Sequence[Burst], link: Link) -> list[Goal]:
    """``single`` are workers that started alone.  In ``one``, one worker stays of a group; in ``several``, all stages
    stay."""
    ttft = [median([b.ttft_s for b in runs]) for runs in (single, several)]
    tpot = [median([b.tpot_s for b in runs]) for runs in (single, several)]
    total = [median([b.total_s for b in runs]) for runs in (one, several)]
    built = [float(str(e.attrs["build_s"])) for b in several for e in b.grown if "build_s" in e.attrs]
    return [
        judge(
            "scaleup_ttft_gain",
            ttft[0] / ttft[1],
            ">=",
            1.87,
            paced=link.paced,
            floor=f"{ttft[0]:.2f} s with single workers, {ttft[1]:.2f} s",
        ),
        judge(
            "scaleup_tpot",
            tpot[1] / tpot[0],
            "<=",
            1.19,
            paced=link.paced,
            floor=f"{1e3 * tpot[0]:.0f} ms with single workers, {1e3 * tpot[1]:.0f} ms",
        ),
        figure("scaleup_e2e_gain", total[0] / total[1], floor="over a group of which one worker stays"),
        figure("scaled_up_after_s", median([b.grown_s or 0.0 for b in several])),
        figure("worker_built_ms", 1e3 * median(built), floor=f"the longest {1e3 * max(built):.0f} ms"),
    ]


def competitors(n_stages: int) -> dict[str, dict[str, Any]]:
    return {
        "single workers": {"stages": 1, "keep": 1},
        "one stays": {"stages": n_stages, "keep": 1},
        "all stay": {"stages": n_stages, "keep": n_stages},
    }
