"""What does a client notice when the host of its answer is emptied?

Two hosts; the small real model answers on one of them.  Each round asks for a long answer and empties the host a second
later.  The answer moves to a worker that is started for it on the other host, from a stem cell; then the host is taken
back.  The model is computed in float32, and every answer must be the text of the answer that did not move.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from bench import _common, _model
from bench._common import Goal, figure, judge, median, say
from bench._platform import BenchPlatform, llm_config
from bench._sse import Streamed
from thaw.cli.model_stores.demo_model import cache_dir
from thaw.cli.platform_api.client import action_path
from thaw.dev.smollm2 import obtain

_ACTION: Final = "story"
_PROMPT: Final = "Write a long story about a traveller who carries a lantern through a valley at night. " * 8
_DRAIN_AFTER_S: Final = 1.0
_NEAR: Final = 30
"""The number of tokens before and after the switch that stand for the paces of the two workers."""


@dataclass(frozen=True, slots=True)
class Run:
    answer: Streamed
    moved: dict[str, Any]  # the attributes of the move in the trace

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in pairwise(self.answer.arrivals_s)]

    @property
    def switch(self) -> int:
        """The gap in which the run switched: the first one as long as the pause that the gateway measured."""
        pause_s = float(self.moved["pause_s"])
        return min(range(len(self.gaps_s)), key=lambda i: abs(self.gaps_s[i] - pause_s))

    def tokens_per_s(self, *, after: bool) -> float:
        at = self.switch
        near = self.gaps_s[at + 1 : at + 1 + _NEAR] if after else self.gaps_s[max(0, at - _NEAR) : at]
        return 1 / median(near) if near else 0.0

    def __str__(self) -> str:
        moved = self.moved
        return (
            f"pause {1000 * float(moved['pause_s']):.0f} ms, {moved['rounds']} rounds of {moved['tokens']} tokens, "
            f"{self.tokens_per_s(after=False):.0f} tokens/s before, {self.tokens_per_s(after=True):.0f} after"
        )


def serving_host(platform: BenchPlatform) -> str:
    instances = platform.api.get(action_path(_ACTION))["instances"]
    return str(instances[0]["host"])


def moved_run(platform: BenchPlatform, n_tokens: int) -> Run:
    source = serving_host(platform)
    drain = f"/api/v1/thaw/hosts/{source}/drain"
    caller = platform.caller(_ACTION)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(caller.chat, _PROMPT, n_tokens, ignore_eos=True)
        time.sleep(_DRAIN_AFTER_S)
        platform.api.put(drain, {})
        answer = asked.result()
    caller.close()
    while platform.api.get(drain, wait_s=1)["instances"]:
        time.sleep(0.05)
    platform.api.delete(drain)
    events, _ = platform.trace(answer.activation_id)
    ends = [dict(e.attrs) for e in events if e.name == "move.end"]
    if not ends or "pause_s" not in ends[-1]:
        raise SystemExit(f"the answer did not move within {n_tokens} tokens: {ends}; ask for more with --tokens")
    return Run(answer, ends[-1])


def goals(runs: Sequence[Run], unmoved: str) -> list[Goal]:
    texts = {r.answer.text for r in runs} | {unmoved}
    samples = ", ".join(f"{1000 * float(r.moved['pause_s']):.0f}" for r in runs)
    return [
        judge("tokens_identical", float(len(texts) == 1), "==", 1, floor=f"{len(texts)} different texts"),
        figure("pause_ms", 1000 * median([float(r.moved["pause_s"]) for r in runs]), floor=f"single runs {samples}"),
        figure("rounds", median([float(r.moved["rounds"]) for r in runs])),
        figure("tokens_recomputed", median([float(r.moved["tokens"]) for r in runs])),
        figure(
            "recomputed_per_s", median([float(r.moved["tokens"]) / max(1e-9, float(r.moved["rounds_s"])) for r in runs])
        ),
        figure("tokens_per_s_before", median([r.tokens_per_s(after=False) for r in runs])),
        figure("tokens_per_s_after", median([r.tokens_per_s(after=True) for r in runs])),
    ]


def main() -> int:
    options = _common.options(__doc__ or "", tokens=(0, "of an answer"), dtype=("float32", "of the model"))
    rounds = options.n or (1 if options.quick else 5)
    n_tokens = options.tokens or 768
    work = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        (work / "empty").mkdir()
        model = work / "model"
        shutil.copytree(obtain(cache_dir(), say), model)
        index = _model.write_index(model)
        pool_mb = 64 * (2 + index.n_bytes // (64 << 20))
        platform = stack.enter_context(
            BenchPlatform(work / "state", hosts=2, pool_mb=pool_mb, memory_mb=8192, store=work / "empty")
        )
        config = llm_config(f"file://{model}")
        config["engine"]["dtype"] = options.dtype
        config["resources"]["gpu_memory_mb"] = 3072
        platform.deploy(_ACTION, config)
        caller = platform.caller(_ACTION)
        unmoved = caller.chat(_PROMPT, n_tokens, ignore_eos=True).text
        caller.close()
        runs = []
        for n in range(rounds):
            runs.append(moved_run(platform, n_tokens))
            say(f"{n + 1}: {runs[-1]}")
        platform.remove(_ACTION)
    return _common.report(
        "migrate",
        goals(runs, unmoved),
        rounds=rounds,
        n_tokens=n_tokens,
        dtype=options.dtype,
        runs=list(map(str, runs)),
    )


if __name__ == "__main__":
    raise SystemExit(main())
