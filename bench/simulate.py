"""How often would each system answer in time on the paper's cluster?  The production policy runs on simulated time.

``--quick`` simulates the centre point, ``--all`` every rate; without either, the nine published points are simulated.
``--traces DIR`` adds workload files.  Runs are kept under --out and resumed; the report is written to --docs.
docs/simulation.md says what is modelled.  ``--changed`` simulates nothing: it says whether policy code has changed
since docs/simulation.md was made.  ``--page`` simulates nothing either: it writes the page, its tables and its charts
from the recorded results again.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

from platformdirs import user_cache_path
from rich.console import Console
from rich.progress import Progress, track

from bench import _common
from bench.simulation import experiments, provenance, report, stress
from bench.simulation.bands import Band, EndToEnd, cold_start_bands, scenario_bands
from bench.simulation.constants import HASH
from bench.simulation.matrix import Checkpoints, Run, ablations, generated, sweep
from bench.simulation.metrics import Summary
from bench.simulation.provenance import Provenance
from bench.simulation.record import Record
from bench.simulation.run import simulate
from bench.simulation.specs import SYSTEMS
from bench.simulation.tracefile import BadWorkload, read_traces
from bench.simulation.workload import generate


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="the centre point only")
    size.add_argument("--all", action="store_true", help="every CV and rate")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--traces", type=Path, help="a directory of workload files, simulated too")
    parser.add_argument(
        "--stress",
        type=int,
        nargs="?",
        const=stress.REQUESTS,
        default=0,
        metavar="N",
        help="only this: so many requests (a million) on 1,000 hosts",
    )
    parser.add_argument(
        "--out", type=Path, default=user_cache_path("thaw") / "simulation", help="checkpoints and results"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that simulate side by side")
    parser.add_argument("--changed", action="store_true", help="only say whether the report in docs/ is out of date")
    parser.add_argument("--page", action="store_true", help="only write the report in docs/ again, from its results")
    parser.add_argument("--docs", type=Path, help="write simulation.md and simulation/ there")
    return parser.parse_args()


def _runs(options: argparse.Namespace) -> tuple[list[Run], list[Run]]:
    """Return the runs of all systems, and the runs of Thaw with one thing changed."""
    size = "quick" if options.quick else "all" if options.all else "paper"
    sources = {"generated": generated(range(options.seed, options.seed + options.seeds), size)}
    if options.traces is not None:
        sources["files"] = read_traces(options.traces)
    runs, changed = list[Run](), list[Run]()
    for source, workloads in sources.items():
        runs += sweep(source, workloads, scales=source == "files" or not options.quick)
        changed += [] if options.quick else ablations(source, workloads)
    return runs, changed


def _make(runs: Sequence[Run], checkpoints: Checkpoints, n_processes: int, console: Console) -> list[Summary]:
    """Make the runs, in order, with ``n_processes`` child processes, or in this process if that is one."""
    with contextlib.ExitStack() as stack:
        in_turn: Iterable[tuple[Summary, bool]] = map(checkpoints.get_or_make, runs)
        if n_processes > 1:
            pool = ProcessPoolExecutor(n_processes, get_context("spawn"), initializer=_common.die_with_parent)
            in_turn = stack.enter_context(pool).map(checkpoints.get_or_make, runs)
        made = list(track(in_turn, "runs", total=len(runs), console=console, transient=True))
    console.print(f"{len(runs)} runs, {sum(was_kept for _, was_kept in made)} of them resumed")
    return [summary for summary, _ in made]


def _speed(seed: int, rounds: int) -> list[float]:
    """Events per CPU second.  A shared machine's wall clock would also measure other processes."""
    workload = generate(8, 1.0, seed)
    found = [simulate(workload, SYSTEMS["paraserve"]) for _ in range(rounds)]
    return [o.n_events / o.cpu_s for o in found]


def _deterministic(seed: int) -> tuple[bool, dict[str, str]]:
    """Generate and simulate each system twice.  Return whether the logs of events are equal, and their hashes."""
    rounds = []
    for _ in range(2):
        workload = generate(8, 0.2, seed)
        rounds.append({name: simulate(workload, spec).log_hash for name, spec in SYSTEMS.items()})
    return rounds[0] == rounds[1], rounds[0]


def main() -> int:
    options = _arguments()
    _common.begun()
    console = Console(stderr=True)
    if options.stress:
        return _stress(options.stress, options.seed, console)
    if options.changed:
        _common.say(provenance.news())
        return 0
    if options.page:
        report.write(options.docs or _common.ROOT / "docs")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        runs, changed = _runs(options)
    except BadWorkload as e:
        console.print(f"error: {e}", style="red", markup=False)
        return 2
    made_with = provenance.present()
    checkpoints = Checkpoints(options.out / "runs", made_with.digest)
    summaries = _make(runs, checkpoints, options.jobs, console)
    without_a_part = _make(changed, checkpoints, options.jobs, console)
    cold = experiments.cold_starts()
    bands = [*cold_start_bands(cold), *scenario_bands(experiments.scenarios())]
    for source in dict.fromkeys(r.source for r in summaries):
        bands += EndToEnd(source, summaries).bands()
    speeds = _speed(options.seed, 3 if options.quick else 7)
    same, hashes = _deterministic(options.seed)
    _print(summaries, bands)
    _write(options, made_with, (summaries, without_a_part), bands, cold)
    goals = [
        _common.judge(
            "events_per_s",
            statistics.median(speeds),
            ">=",
            50_000,
            floor="per CPU second",
            samples={"per_cpu_s": [round(s) for s in speeds]},
        ),
        _common.judge("deterministic", float(same), "==", 1.0, floor="" if same else "two runs of one seed differ"),
    ]
    n_met = sum(b.met is True for b in bands)
    return _common.report(
        "simulate",
        goals,
        rounds=len(speeds),
        constants=HASH,
        code=made_with.digest,
        log_hashes=hashes,
        runs=len(summaries),
        bands_met=n_met,
        bands=len(bands),
    )


def _stress(n_requests: int, seed: int, console: Console) -> int:
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("requests", total=n_requests)
        found = stress.run(n_requests, seed, progress=lambda n_ended: bar.update(task, completed=n_ended))
    goals = [
        _common.judge("stress_wall_s", found.wall_s, "<=", 900.0, floor="of a million requests on 1,000 hosts"),
        _common.judge("stress_peak_bytes", float(found.peak_bytes), "<=", 2e9),
    ]
    whole = [
        g if n_requests >= stress.REQUESTS else replace(g, ok=False, floor=f"{n_requests} requests only") for g in goals
    ]
    return _common.report("simulate-stress", whole, rounds=1, **asdict(found))


def _print(summaries: Sequence[Summary], bands: Sequence[Band]) -> None:
    for s in summaries:
        _common.say(
            f"  {s.source} {s.workload:24} ×{s.scale:<4g} {SYSTEMS[s.system].label:26} "
            f"{s.ttft_pct:5.1f} % in time, TTFT {s.ttft_mean_s:6.2f} s, TPOT {s.tpot_pct:5.1f} %, "
            f"{s.cost_gb_h:6.0f} GB·h"
        )
    for b in bands:
        mark = "not run" if b.met is None else "met" if b.met else "MISSED"
        _common.say(f"  {mark:7} [{b.source}] {b.name}: {b.value} (published {b.published}; band {b.band})")


def _write(
    options: argparse.Namespace,
    made_with: Provenance,
    runs: tuple[Sequence[Summary], Sequence[Summary]],
    bands: Sequence[Band],
    cold: Sequence[experiments.ColdStart],
) -> None:
    size = "quick" if options.quick else "all" if options.all else "the nine published points"
    found = Record(
        HASH,
        f"{size}; {options.seeds} seed(s) from {options.seed}; testbed (ii): 24 devices on 6 servers",
        made_with.commit,
        made_with.digest,
        made_with.digests,
        tuple(runs[0]),
        tuple(runs[1]),
        tuple(cold),
        tuple(bands),
    )
    found.write(options.out)
    docs: Path = options.docs or options.out
    (docs / "simulation").mkdir(parents=True, exist_ok=True)
    found.write(docs / "simulation")
    report.write(docs)


if __name__ == "__main__":
    sys.exit(main())
