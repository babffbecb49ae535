"""How much sooner do four hosts start one model than one host does?

There are four hosts, each behind a link of the same rate, and the number of stages is forced: 1, 2 or 4.  All stages
fetch their parts at the same time and answer as a pipeline.  There are two models: the small real one, whose embedding
is at both ends of a pipeline, and a checkpoint of a gigabyte that divides evenly.  All starts are from stem cells.  The
model of each run has an address of its own, so no byte of it is on any host.  The stages communicate through the relay,
and the trace of every run must say so; with ``--direct 1`` they may connect to one another by TCP instead.

Then the benchmark compares the throughput of the same cores as a pipeline and as whole workers, and measures the gain
of each step of a worker over serverless vLLM.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench import _checkpoint, _common, _model, _paths, _shared_cores
from bench._calibrate import Constants, calibrate
from bench._common import Goal, figure, interleave, judge, median, say
from bench._explained import Start, read_start
from bench._far_store import far_store
from bench._links import Link, shaped
from bench._origin import Origin
from bench._overlap import PlainVllm, VllmStart, describe
from bench._platform import BenchPlatform, llm_config
from bench._sse import Streamed
from bench.cold_start import PROMPT
from thaw.checkpoints import checkpoint
from thaw.cli.model_stores.demo_model import cache_dir
from thaw.dev.smollm2 import obtain
from thaw.model import ModelIndex, ModelParts

_HOSTS: Final = 4
_SIZES: Final = (1, 2, 4)
_RATES_MBIT: Final = (100, 200, 400)
_GOAL_MBIT: Final = 200
_GOAL_MODEL: Final = "gigabyte"
"""The figures of this model have no suffix.  The small model's figures have names of their own, so a quick run replaces
no published figure.
"""

_WARM: Final = 5
_SETTLE_S: Final = 3.0
"""After this time the scheduler has seen the platform's hosts and knows what the model consists of."""

_CORES: Final = 0.4
_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is served as ``models/<name>``, and as ``models/<name>-<n>`` for each run."""

    name: str
    directory: Path
    index: ModelIndex
    parts: ModelParts
    device_mb: int

    def ideal_s(self, n_stages: int, bytes_per_s: float) -> float:
        return _checkpoint.size_of_largest(self.parts, n_stages) / bytes_per_s


@dataclass(frozen=True, slots=True)
class ParallelRun:
    n_stages: int
    ttft_s: float
    start: Start
    warm_ttft_s: float
    path: str = ""  # the path of messages between its stages; "" for one stage

    @property
    def tail_s(self) -> float:
        return self.start.ttft_s - self.start.last_byte_s

    def __str__(self) -> str:
        return (
            f"ttft {self.ttft_s:.2f} s, last byte {self.start.last_byte_s:.2f} s, warm {self.warm_ttft_s:.2f} s, "
            f"unexplained {self.start.unexplained_s * 1e3:.0f} ms" + (f", path {self.path}" if self.path else "")
        )


Key = tuple[str, str, int]  # model, link, stages
Runs = dict[Key, list[ParallelRun]]


class ParallelStart:
    def __init__(
        self, work: Path, models: Sequence[Model], *, quick: bool, pool_mb: int = 0, direct: bool = False
    ) -> None:
        """``pool_mb`` is the size of each host's pool; 0 means the size of the largest model plus two slabs."""
        self.work, self.models, self.direct = work, models, direct
        self.path = _paths.expected("auto", direct=direct)
        self.pool_mb = pool_mb or 64 * (2 + max(m.index.n_bytes for m in models) // (64 << 20))
        self._settle_s, self._n_tokens = (1.0, 24) if quick else (_SETTLE_S, _TOKENS)
        self._n = 0

    def starts(self, platform: BenchPlatform, url: str, link: Link, sizes: Sequence[int], rounds: int) -> Runs:
        """Make all starts on one platform.  Only what the scheduler has learnt is left from one run to the next."""
        keys = [(model.name, link.name, s) for model in self.models for s in sizes]
        models = {model.name: model for model in self.models}
        runs = {_title(key): partial(self.start, platform, url, link, models[key[0]], key[2]) for key in keys}
        found = interleave(runs, rounds)
        return {key: found[_title(key)] for key in keys}

    def start(self, platform: BenchPlatform, url: str, link: Link, model: Model, n_stages: int) -> ParallelRun:
        with self.deployed(platform, url, model, n_stages) as action:
            time.sleep(self._settle_s)
            caller = platform.caller(action)
            cold = caller.chat(PROMPT, 8)
            warm = [caller.chat(PROMPT, 2) for _ in range(_WARM)]
            caller.close()
            path = _paths.of_answer(platform, warm[-1].activation_id, n_stages, self.path)
            events, plan = platform.trace(cold.activation_id)
            if plan is None or len(plan.stages) != n_stages:
                raise SystemExit(f"{n_stages} stages were asked for, the plan is {plan}")
            if not self.direct:  # with TCP the first answer may begin before the stages have connected
                _paths.checked(events, n_stages, self.path)
            start, warm_ttft_s = read_start(events, link.bytes_per_s), median([w.ttft_s for w in warm])
            return ParallelRun(n_stages, cold.ttft_s, start, warm_ttft_s, path)

    def from_nothing(self, link: Link, model: Model, n_stages: int) -> ParallelRun:
        with self.platform(link, stem_cells=False) as (platform, url):
            return self.start(platform, url, link, model, n_stages)

    def throughput(self, platform: BenchPlatform, url: str, model: Model, n_stages: int) -> float | None:
        """Tokens per second of ``n_stages`` containers with 0.4 cores each, with 8 requests per stage."""
        with self.deployed(platform, url, model, n_stages) as action:
            platform.caller(action).chat(PROMPT, 2)
            _shared_cores.wait_fetched(platform)
            with _shared_cores.capped(platform, _CORES) as capped, ThreadPoolExecutor(8 * n_stages) as pool:
                if capped is None:
                    return None
                began = time.monotonic()
                answers = list(pool.map(partial(self._ask, platform, action), range(8 * n_stages)))
                rate = sum(a.completion_tokens for a in answers) / (time.monotonic() - began)
                _paths.of_answer(platform, answers[-1].activation_id, n_stages, self.path)
                for line in capped.usage():
                    say(f"    {line}")
                return rate

    def _ask(self, platform: BenchPlatform, action: str, number: int) -> Streamed:
        caller = platform.caller(action)
        try:
            return caller.chat(f"Count from {number} upwards.", self._n_tokens, ignore_eos=True)
        finally:
            caller.close()

    @contextlib.contextmanager
    def platform(self, link: Link, *, stem_cells: bool) -> Iterator[tuple[BenchPlatform, str]]:
        with (
            BenchPlatform(
                self.work / f"state-{link.name}",
                hosts=_HOSTS,
                stem_cells=stem_cells,
                link=link.option,
                pool_mb=self.pool_mb,
                memory_mb=8192,
                store=self.work / "empty",
                direct=self.direct,
            ) as platform,
            link.store(platform) as url,
        ):
            yield platform, url

    @contextlib.contextmanager
    def deployed(self, platform: BenchPlatform, url: str, model: Model, n_stages: int) -> Iterator[str]:
        """Deploy an action whose model has an address that no host has seen."""
        self._n += 1
        action = f"{model.name}-{self._n}"
        address = self.work / "models" / action
        address.symlink_to(model.directory)
        config = llm_config(f"{url}/models/{action}", stages=n_stages, max_stages=_HOSTS)
        config["resources"]["gpu_memory_mb"] = model.device_mb
        platform.deploy(action, config)
        try:
            yield action
        finally:
            platform.remove(action)
            address.unlink()


# ── the measurements ──────────────────────────────────────────────────────────────────────────────────────────────


def main() -> int:
    options = _common.options(
        __doc__ or "",
        only=("", "starts, throughput or overlap"),
        rates=("", "Mbit/s, comma-separated"),
        pool_mb=(0, "MiB of a host's pool"),
        direct=(0, "1: the stages may reach one another by TCP"),
    )
    rounds = options.n or (1 if options.quick else 5)
    wanted = [options.only] if options.only else ["starts", "throughput", *([] if options.quick else ["overlap"])]
    work = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    (work / "empty").mkdir()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        models = _models(work, small_only=options.quick)
        bench = ParallelStart(work, models, quick=options.quick, pool_mb=options.pool_mb, direct=bool(options.direct))
        say("constants of the bound")
        constants = calibrate(work)
        say(f"  {constants}")
        loopback = stack.enter_context(Origin(work, work))
        links = [shaped(work, loopback, rate) for rate in _rates(options.rates, options.quick)]
        found: Runs = {}
        facts: dict[str, Any] = {}
        goals: list[Goal] = []
        for link in links if wanted != ["overlap"] else []:
            with bench.platform(link, stem_cells=True) as (platform, url):
                if "starts" in wanted:
                    found |= bench.starts(platform, url, link, (1, 4) if options.quick else _SIZES, rounds)
                if "throughput" in wanted and link is links[-1]:
                    goals += _throughput_goals(bench, platform, url, rounds, facts)
        if found:
            _print_starts(found, models, links, constants)
            goals = [*_found_goals(found, models, links, constants, options.pool_mb), *goals]
        if "overlap" in wanted:
            facts["overlap"] = _overlap(bench, loopback, _judged(links), found, rounds)
            goals += [
                figure(f"overlap_{step.strip('+').replace(' ', '_')}_s", value)
                for step, value in facts["overlap"]["ttft_s"].items()
                if value is not None
            ]
    return _common.report(
        "parallel_start",
        goals,
        rounds=rounds,
        path=bench.path,
        links=[link.describe() for link in links],
        partition_bounds={m.name: round(_checkpoint.bound(m.parts, 4), 3) for m in models},
        n_bytes={m.name: m.index.n_bytes for m in models},
        runs={" ".join(map(str, k)): list(map(str, v)) for k, v in found.items()},
        **facts,
    )


def _rates(asked: str, quick: bool) -> tuple[int, ...]:
    if asked:
        return tuple(map(int, asked.split(",")))
    return (_GOAL_MBIT,) if quick else _RATES_MBIT


def _judged(links: Sequence[Link]) -> Link:
    """The link of 200 Mbit/s if it was requested, else the first link."""
    return next((link for link in links if link.name == f"{_GOAL_MBIT}m"), links[0])


def _suffix(model: Model) -> str:
    """The suffix of the names of this model's figures."""
    return "" if model.name == _GOAL_MODEL else f"_{model.name}"


def _title(key: Key) -> str:
    return f"{key[0]} {key[1]} s={key[2]}"


def _models(work: Path, *, small_only: bool) -> list[Model]:
    """The small real model first, the model with the goals last."""
    small = obtain(cache_dir(), say)
    found = [_served(work, "smollm2", small, 2048)]
    if not small_only:
        found.append(_served(work, _GOAL_MODEL, _checkpoint.obtain(cache_dir(), small, say), 4096))
    return found


def _served(work: Path, name: str, source: Path, device_mb: int) -> Model:
    directory = work / "models" / name
    shutil.copytree(source, directory)
    index = _model.write_index(directory)
    n_layers = len({t.name.split(".")[2] for t in index.tensors if ".layers." in t.name})
    return Model(name, directory, index, checkpoint.parts_of(index.tensors, n_layers), device_mb)


def _print_starts(found: Runs, models: Sequence[Model], links: Sequence[Link], constants: Constants) -> None:
    say("\n  model      Mbit/s  s   TTFT s  last byte s  ideal s  bound s  warm TTFT s")
    by_name = {m.name: m for m in models}
    by_link = {link.name: link for link in links}
    for (name, link_name, s), runs in found.items():
        link, model = by_link[link_name], by_name[name]
        say(
            f"  {name:10} {link_name:>6} {s:2} {_ttft(runs):8.2f} {_last(runs):12.2f} "
            f"{model.ideal_s(s, link.bytes_per_s):8.2f} {_bound(runs, model, link, constants):8.2f} "
            f"{_warm(runs):12.3f}"
        )


def _found_goals(
    found: Runs, models: Sequence[Model], links: Sequence[Link], constants: Constants, pool_mb: int
) -> Iterator[Goal]:
    """The model of a gigabyte has goals; the small model has the same figures without goals.

    A run with small pools only judges its latest start.
    """
    for model in [] if pool_mb else models:
        for goal in _start_goals(found, model, _judged(links), constants):
            yield goal if model.name == _GOAL_MODEL else figure(goal.name, goal.value, floor=goal.floor)
    yield _worst_start(found, models, links, _suffix(models[-1]) + (f"_pool_{pool_mb}" if pool_mb else ""))


def _start_goals(found: Runs, model: Model, link: Link, constants: Constants) -> list[Goal]:
    one, four = found[model.name, link.name, 1], found[model.name, link.name, 4]
    ideal = model.ideal_s(4, link.bytes_per_s)
    bounds = [_bound(runs, model, link, constants) for runs in (one, four)]
    ratio = (_ttft(four) / _ttft(one)) / (bounds[1] / bounds[0])
    tail = median([r.tail_s / r.warm_ttft_s for r in four])
    speedup = _last(one) / _last(four)
    on = _suffix(model) + ("" if link.name == f"{_GOAL_MBIT}m" else f"_{link.name}")
    return [
        judge(
            f"last_byte_vs_ideal_s4{on}",
            _last(four) / ideal,
            "<=",
            1.05,
            paced=link.paced,
            floor=f"{_last(four):.2f} s, ideal {ideal:.2f} s",
        ),
        judge(
            f"last_byte_speedup_s4{on}",
            speedup,
            ">=",
            3.6,
            paced=link.paced,
            floor=f"the partition's own bound is {_checkpoint.bound(model.parts, 4):.2f}",
        ),
        judge(
            f"ttft_s4_vs_s1{on}",
            ratio,
            "<=",
            1.15,
            paced=link.paced,
            floor=f"{_ttft(four):.2f} against {_ttft(one):.2f} s, bounds {bounds[1]:.2f} and {bounds[0]:.2f} s",
        ),
        judge(
            f"tail_ratio_s4{on}",
            tail,
            "<=",
            3,
            paced=link.paced,
            floor=f"{median([r.tail_s for r in four]) * 1e3:.0f} ms, warm {_warm(four) * 1e3:.0f} ms",
        ),
    ]


def _worst_start(found: Runs, models: Sequence[Model], links: Sequence[Link], suffix: str) -> Goal:
    """Judge the latest of all single starts, relative to the ideal time of its size."""
    ideal_s = {(m.name, link.name, s): m.ideal_s(s, link.bytes_per_s) for m in models for link in links for s in _SIZES}
    late = [(r.ttft_s / ideal_s[key], r.ttft_s, key) for key, runs in found.items() for r in runs]
    worst, ttft_s, key = max(late)
    paced = any(link.paced for link in links)
    return judge(
        f"worst_ttft_vs_ideal{suffix}",
        worst,
        "<=",
        1.3,
        paced=paced,
        floor=f"{ttft_s:.2f} s of {len(late)} starts, {_title(key)}, ideal {ideal_s[key]:.2f} s",
    )


def _throughput_goals(
    bench: ParallelStart, platform: BenchPlatform, url: str, rounds: int, facts: dict[str, Any]
) -> Iterator[Goal]:
    """The throughput goal of each model.

    The small model is the harder case for a pipeline: its steps are short, and its end stages are mostly embedding.
    """
    runs = {f"{m.name} s={s}": partial(bench.throughput, platform, url, m, s) for m in bench.models for s in (4, 1)}
    try:
        found = interleave(runs, rounds)
    finally:
        _shared_cores.sweep()
    rates = {name: [v for v in values if v is not None] for name, values in found.items()}
    facts["tokens_per_s"] = {name: [round(v, 2) for v in values] for name, values in rates.items()}
    for model in bench.models:
        name = f"pipeline_throughput_s4_{model.name}"
        four, one = rates[f"{model.name} s=4"], rates[f"{model.name} s=1"]
        if four and one:
            floor = f"{median(four):.1f} against 4 x {median(one):.1f} tokens/s"
            yield judge(name, median(four) / (4 * median(one)), ">=", 0.8, floor=floor)
        else:
            yield judge(name, None, ">=", 0.8, floor="no cgroup quota can be set here")


def _overlap(bench: ParallelStart, loopback: Origin, link: Link, found: Runs, rounds: int) -> dict[str, Any]:
    """Measure the steps of the paper's Figure 9, in turn.  All start from nothing but the last one, whose imports are
    done before."""
    model, rate = bench.models[0], int(link.name.removesuffix("m"))
    with far_store(bench.work, loopback, rate) as store:
        names = [f.name for f in model.index.files]
        vllm = PlainVllm(bench.work, store, model.name, names, PROMPT, len(os.sched_getaffinity(0)))
        steps: dict[str, Callable[[], VllmStart | ParallelRun]] = {
            "vanilla": vllm.serverless,
            "+prefetch": vllm.prefetched,
            "+stream": partial(bench.from_nothing, link, model, 1),
            "+parallel": partial(bench.from_nothing, link, model, 4),
        }
        runs = interleave(steps, rounds)
    stem = found.get((model.name, link.name, 4), [])
    if not stem:
        with bench.platform(link, stem_cells=True) as (platform, url):
            stem = [bench.start(platform, url, link, model, 4) for _ in range(rounds)]
    rows: dict[str, float | None] = {step: median([run.ttft_s for run in runs[step]]) for step in list(steps)[:3]}
    rows |= {"+overlap": None, "+parallel": median([r.ttft_s for r in runs["+parallel"]]), "+stem cell": _ttft(stem)}
    say(f"\n  overlap, {model.name} at {rate} Mbit/s, from nothing (+stem cell: imported before)")
    for line in describe(rows):
        say(f"  {line}")
    return {"ttft_s": rows, "vllm_command": vllm.command, "runs": {step: list(map(str, runs[step])) for step in steps}}


def _ttft(runs: Sequence[ParallelRun]) -> float:
    return median([r.ttft_s for r in runs])


def _last(runs: Sequence[ParallelRun]) -> float:
    return median([r.start.last_byte_s for r in runs])


def _warm(runs: Sequence[ParallelRun]) -> float:
    return median([r.warm_ttft_s for r in runs])


def _bound(runs: Sequence[ParallelRun], model: Model, link: Link, constants: Constants) -> float:
    """Eq. 5 for stem cells, with the largest stage's bytes and the shortest warm prefill through all stages."""
    n_bytes = _checkpoint.size_of_largest(model.parts, runs[0].n_stages)
    return constants.bound_s(n_bytes, link.bytes_per_s, min(r.warm_ttft_s for r in runs))


if __name__ == "__main__":
    sys.exit(main())
