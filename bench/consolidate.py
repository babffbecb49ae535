"""What does a long answer gain when its pipeline becomes one worker, and what does the switch cost?

Four hosts, each behind a link of 200 Mbit/s, start the small real model in four stages from stem cells.  Stage 0 has a
whole core, and each of the others a quarter of one, as their shares of the memory say.  One request asks for a long
answer.  In half of the runs the group becomes one worker while it answers (``scaling.keep`` is 1), in the other half it
stays a pipeline; the runs take turns.  The model is computed in float32, and both answers must be the same text.  All
messages between the stages go through the relay, and the trace of every run must say so.

``--burst 1`` measures scaling up instead: 32 requests at once on four single workers, on a group of four stages of
which one becomes a worker, and on one of which all do (bfloat16; bench/_scale_up.py).
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from bench import _common, _model, _paths, _scale_up
from bench._common import Goal, figure, interleave, judge, median, say
from bench._links import Link, shaped
from bench._origin import Origin
from bench._platform import BenchPlatform, llm_config
from bench._sse import Streamed
from thaw.cli.model_stores.demo_model import cache_dir
from thaw.dev.smollm2 import obtain
from thaw.tracing.trace import TraceEvent

_STAGES: Final = 4
_MBIT: Final = 200
_PROMPT: Final = "Write a long story about a traveller who carries a lantern through a valley at night."
_SETTLE_S: Final = 3.0
_STEADY: Final = 20
"""Tokens at the end of an answer that stand for the pace after the switch."""


@dataclass(frozen=True, slots=True)
class Run:
    """One answer.  ``switched_s`` is None for a group that stayed a pipeline."""

    answer: Streamed
    switched_s: float | None  # seconds since the request came
    switch: dict[str, Any]  # the attributes of the switch in the trace
    held_bytes: int  # device memory at the end of the answer

    @property
    def gaps_s(self) -> list[tuple[float, float]]:
        """For each token, its arrival and the time since the previous one."""
        return [(b, b - a) for a, b in pairwise(self.answer.arrivals_s)]

    @property
    def total_s(self) -> float:
        return self.answer.arrivals_s[-1]

    def pace_s(self, begin_s: float, end_s: float) -> float:
        """The median time between tokens that came in this interval."""
        return median([gap for at, gap in self.gaps_s if begin_s < at <= end_s])

    def __str__(self) -> str:
        said = f"{self.total_s:.1f} s, first token {self.answer.ttft_s:.2f} s, {self.answer.completion_tokens} tokens"
        if self.switched_s is None:
            return said
        stall_ms, rounds = 1000 * float(self.switch.get("stall_s", 0)), self.switch.get("rounds")
        return f"{said}, switched after {self.switched_s:.1f} s in {rounds} rounds, stall {stall_ms:.0f} ms"


class Consolidate:
    def __init__(self, work: Path, model: Path, n_tokens: int, dtype: str) -> None:
        self.work, self._model, self._n_tokens, self._dtype = work, model, n_tokens, dtype
        self._n = 0

    def run(self, platform: BenchPlatform, url: str, *, keep: bool) -> Run:
        """``keep``: the group stays a pipeline."""
        self._n += 1
        action = f"story-{self._n}"
        address = self.work / "models" / action  # no host has seen this address
        address.symlink_to(self._model)
        config = llm_config(f"{url}/models/{action}", stages=_STAGES, max_stages=_STAGES)
        config["engine"]["dtype"] = self._dtype
        config["resources"]["gpu_memory_mb"] = 3072
        config["scaling"] |= {} if keep else {"keep": 1}
        platform.deploy(action, config)
        try:
            time.sleep(_SETTLE_S)
            return self._measured(platform, action, keep=keep)
        finally:
            platform.remove(action)
            address.unlink()

    def _measured(self, platform: BenchPlatform, action: str, *, keep: bool) -> Run:
        caller, free_bytes = platform.caller(action), _free_bytes(platform)
        answer = caller.chat(_PROMPT, self._n_tokens, ignore_eos=True)
        held_bytes = free_bytes - _free_bytes(platform)
        caller.close()
        events, plan = platform.trace(answer.activation_id)
        if answer.completion_tokens != self._n_tokens or plan is None:
            raise SystemExit(f"an answer of {answer.completion_tokens} tokens by {plan}")
        _paths.checked(events, _STAGES, _paths.expected("auto", direct=False))
        ended = [e for e in events if e.name == "consolidate.end"]
        if keep:
            return Run(answer, None, {}, held_bytes)
        if not ended or "error" in ended[0].attrs:
            raise SystemExit(f"the group did not become one worker within {self._n_tokens} tokens: {ended}")
        return Run(answer, _since_request(events, ended[0]), dict(ended[0].attrs), held_bytes)


def _free_bytes(platform: BenchPlatform) -> int:
    hosts = platform.api.get("/api/v1/thaw/hosts")["hosts"]
    return sum(device["free_bytes"] for host in hosts for device in host["devices"])


def _since_request(events: Sequence[TraceEvent], event: TraceEvent) -> float:
    """All processes are on one machine, so they share a clock."""
    return (event.mono_ns - min(e.mono_ns for e in events if e.name == "queued.begin")) / 1e9


# ── what follows from the runs ────────────────────────────────────────────────────────────────────────────────────


def goals(one: Sequence[Run], several: Sequence[Run], link: Link) -> list[Goal]:
    """``one`` are the runs whose group became one worker, and ``several`` the others."""
    texts = {r.answer.text for r in (*one, *several)}
    totals = [median([r.total_s for r in runs]) for runs in (several, one)]
    steps = [_stall_steps(r) for r in one]
    during = [_during(a, b) for a, b in zip(one, several, strict=True)]
    paced = link.paced
    return [
        judge("tokens_identical", float(len(texts) == 1), "==", 1, floor=f"{len(texts)} different texts"),
        judge(
            "e2e_speedup",
            totals[0] / totals[1],
            ">=",
            1.6,
            paced=paced,
            floor=f"{totals[0]:.1f} s as a pipeline, {totals[1]:.1f} s",
        ),
        judge(
            "stall_decode_steps",
            median(steps),
            "<=",
            2,
            paced=paced,
            floor=f"of {1e3 * median([_after_s(r) for r in one]):.0f} ms each; single runs {_listed(steps)}",
        ),
        judge("tpot_during", median(during), "<=", 1.1, paced=paced, floor=f"single runs {_listed(during)}"),
        figure("switched_after_s", median([r.switched_s or 0.0 for r in one])),
        figure("stall_ms", median([1000 * float(r.switch["stall_s"]) for r in one]), floor="as stage 0 measured it"),
        figure("memory_vs_pipeline", median([r.held_bytes for r in one]) / median([r.held_bytes for r in several])),
    ]


def _stall_steps(run: Run) -> float:
    """The longest gap between two tokens within a second of the switch, the copy of the tail included, in decode steps
    of the one worker."""
    at_s = run.switched_s or 0.0
    longest_s = max(gap for at, gap in run.gaps_s if at_s - 1.0 <= at <= at_s + 1.0)
    return longest_s / _after_s(run)


def _after_s(run: Run) -> float:
    return median([gap for _, gap in run.gaps_s[-_STEADY:]])


def _during(one: Run, several: Run) -> float:
    """The pace from the first token to the switch, over that of the pipeline that stayed one in the same time."""
    end_s = (one.switched_s or 0.0) - one.answer.ttft_s
    first, other = one.answer.ttft_s, several.answer.ttft_s
    return one.pace_s(first, first + end_s) / several.pace_s(other, other + end_s)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{v:.2f}" for v in values)


def main() -> int:
    options = _common.options(
        __doc__ or "",
        tokens=(0, "of an answer"),
        dtype=("float32", "of the model"),
        burst=(0, "1: measure a burst that a group grows with"),
    )
    rounds = options.n or (1 if options.quick else 5)
    n_tokens = options.tokens or (64 if options.burst else 384 if options.quick else 512)
    work = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        (work / "empty").mkdir()
        model = work / "models" / "smollm2"
        shutil.copytree(obtain(cache_dir(), say), model)
        index = _model.write_index(model)
        bench = Consolidate(work, model, n_tokens, options.dtype)
        link = shaped(work, stack.enter_context(Origin(work, work)), _MBIT)
        platform = stack.enter_context(
            BenchPlatform(
                work / "state",
                hosts=_STAGES,
                link=link.option,
                pool_mb=64 * (2 + index.n_bytes // (64 << 20)),
                memory_mb=8192,
                store=work / "empty",
            )
        )
        url = stack.enter_context(link.store(platform))
        if options.burst:
            return _burst(_scale_up.Bursts(work, model, n_tokens, _STAGES), platform, url, link, rounds)
        found = interleave(
            {
                "pipeline": partial(bench.run, platform, url, keep=True),
                "one worker": partial(bench.run, platform, url, keep=False),
            },
            rounds,
        )
    several, one = found["pipeline"], found["one worker"]
    return _common.report(
        "consolidate",
        goals(one, several, link),
        rounds=rounds,
        path=_paths.expected("auto", direct=False),
        links=[link.describe()],
        n_tokens=n_tokens,
        dtype=options.dtype,
        runs={name: list(map(str, runs)) for name, runs in found.items()},
    )


def _burst(bursts: _scale_up.Bursts, platform: BenchPlatform, url: str, link: Link, rounds: int) -> int:
    legs = _scale_up.competitors(_STAGES)
    found = interleave({name: partial(bursts.run, platform, url, **leg) for name, leg in legs.items()}, rounds)
    single, one, several = (found[name] for name in legs)
    return _common.report(
        "consolidate",
        _scale_up.goals(single, one, several, link),
        rounds=rounds,
        links=[link.describe()],
        runs={name: list(map(str, runs)) for name, runs in found.items()},
    )


if __name__ == "__main__":
    raise SystemExit(main())
