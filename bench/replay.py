"""Does the simulator predict what the platform does?  Both get the same requests at the same moments.

A trace of a few functions (half of them with a tight objective, half with a loose one) is played to four hosts behind
200 Mbit/s links.  It is also simulated with the production policy on four simulated hosts.  Their constants are
measured on that same platform, from one cold start of a function that is not in the trace and from its warm requests.
Every round has a trace and a platform of its own.

Requests are compared in pairs: the error of a request is the difference between its simulated and its real TTFT,
divided by the real one.  The scheduler's own prediction is compared with the same real TTFT.  It is the scheduler's
prediction for the start that the request waited for, less the time that had passed when the request came.  A request
that came after the predicted first token has no prediction.

``--traces FILE`` takes a workload file instead of the generator: its first requests are used, its functions become
``chatbot`` (7.5 s) or ``summarization`` (15 s), and all its models become SmolLM2.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import _common, _model, _paths
from bench._common import Goal, figure, judge, percentile, say
from bench._explained import read_start
from bench._links import Link, shaped
from bench._origin import Origin
from bench._platform import BenchPlatform
from bench._sse import Caller
from bench.simulation import constants
from bench.simulation.constants import KEEP_ALIVE_S, KV_RESERVE, SLOTS, GpuKind, Model, ServerSpec
from bench.simulation.run import simulate
from bench.simulation.specs import SYSTEMS, Objectives
from bench.simulation.tracefile import read_workload
from bench.simulation.workload import Request, Workload
from thaw.cli.model_stores.demo_model import cache_dir
from thaw.dev.smollm2 import obtain
from thaw.plan import Plan
from thaw.tracing.hops import hops_of
from thaw.tracing.trace import Phase, TraceEvent

HOSTS, RATE_MBIT, PER_HOST = 4, 200, 2
PROMPT = "Count the apples, pears and plums in three baskets, step by step, and name the one that holds most. " * 3
N_INPUT, N_OUTPUT = 64, 16
_MEASURED = "measured"
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Measured:
    """The constants of this platform, from one cold start and warm requests, in seconds and bytes/s."""

    n_bytes: int
    link: float
    t_cu: float
    tail: float  # from the last byte to the first token, less the TTFT of a warm request
    warm_ttft: float
    t_d: float


@dataclass(frozen=True, slots=True)
class Row:
    """One request: predicted, simulated and real.

    ``predicted`` is None for a request that waited for no start.  ``real`` is NaN for a request that was answered with
    an error.
    """

    index: int  # in the trace
    at_s: float
    function: str
    stages: int
    predicted: float | None
    simulated: float
    real: float
    why: str = ""  # the scheduler's finding for each number of stages
    path: str = ""  # the path of messages between its stages; "" for one stage


def make_trace(n_requests: int, seconds: float, n_functions: int, seed: int) -> Workload:
    rng = random.Random(f"replay {seed}")
    at = sorted(rng.uniform(0, seconds) for _ in range(n_requests))
    return Workload("replay", tuple(_request(i, t, rng.randrange(n_functions)) for i, t in enumerate(at)))


def scaled(workload: Workload, n_requests: int, seconds: float, n_functions: int) -> Workload:
    """The first ``n_requests`` of a trace, with its functions mapped to ``n_functions`` and its time scaled to
    ``seconds``.
    """
    first = workload.requests[:n_requests]
    stretch = seconds / max(1e-9, first[-1].arrival_s - first[0].arrival_s)
    return Workload(
        workload.name,
        tuple(
            _request(i, (r.arrival_s - first[0].arrival_s) * stretch, r.function % n_functions)
            for i, r in enumerate(first)
        ),
    )


def _request(index: int, at_s: float, function: int) -> Request:
    app = "chatbot" if function % 2 == 0 else "summarization"
    return Request(index, at_s, function, app, _MEASURED, N_INPUT, N_OUTPUT)


@contextlib.contextmanager
def measured_world(m: Measured) -> Iterator[str]:
    """Yield the name of a testbed of four hosts with these constants.  It exists until the block ends."""
    need = m.n_bytes + KV_RESERVE
    kind = GpuKind(_MEASURED, PER_HOST * need, 20e9, 1.0, m.t_cu, 5.0, m.tail, 0.0, 0.0, 1e9, 0.0, 1e9)
    # prefill_s() is t_p · tokens/1024 plus a constant; here a warm request's TTFT stands for the whole sum
    t_p = max(0.0, m.warm_ttft - constants.PREFILL_BASE_S) * 1024 / N_INPUT
    tables: Sequence[tuple[dict[str, Any], Any]] = (
        (constants.GPUS, kind),
        (constants.MODELS, Model(_MEASURED, m.n_bytes, t_p, m.t_d, 1e4)),
        (constants.TESTBEDS, (ServerSpec(_MEASURED, 1, m.link, 4 * KV_RESERVE),) * HOSTS),
    )
    try:
        for table, entry in tables:
            table[_MEASURED] = entry
        yield _MEASURED
    finally:
        for table, _ in tables:
            table.pop(_MEASURED, None)


def simulated(workload: Workload, m: Measured, max_stages: int) -> dict[int, float]:
    """The TTFT of each request, by its number in the trace."""
    with measured_world(m) as testbed:
        spec = replace(SYSTEMS["thaw"], max_stages=max_stages)
        return {r.index: r.ttft for r in simulate(workload, spec, testbed, Objectives()).requests}


def errors(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """|predicted − real| / real for each request."""
    return [abs(foretold - real) / real for foretold, real in pairs]


# the real platform ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    ttft_s: float = float("nan")
    activation_id: str = ""
    error: str = ""


def config(uri: str, app: str, max_stages: int) -> dict[str, Any]:
    ttft, tpot = constants.APPS[app].ttft[0], constants.APPS[app].tpot[0]
    return {
        "kind": "llm:vllm",
        "model": {"uri": uri},
        "engine": {"dtype": "bfloat16", "max_model_len": 512},
        "resources": {"gpu_memory_mb": 1024, "host_memory_mb": 2048},
        "slo": {"ttft_ms": round(1000 * ttft), "tpot_ms": round(1000 * tpot)},
        "scaling": {"max_instances": 8, "max_stages": max_stages, "keep_alive_s": KEEP_ALIVE_S, "max_batch": SLOTS},
    }


def calibrate(platform: BenchPlatform, url: str, link: Link, n_bytes: int) -> Measured:
    platform.deploy("calibration", config(f"{url}/models/calibration", "summarization", 1))
    caller = platform.caller("calibration")
    cold = caller.chat(PROMPT, N_OUTPUT)
    warm = [caller.chat(PROMPT, N_OUTPUT) for _ in range(5)]
    caller.close()
    events, _ = platform.trace(cold.activation_id)
    start = read_start(events, link.bytes_per_s)
    context = next((i.seconds for i in start.timeline.intervals if i.phase == "context"), 0.0)
    ttft = statistics.median(w.ttft_s for w in warm)
    t_d = statistics.median((w.arrivals_s[-1] - w.ttft_s) / max(1, w.completion_tokens - 1) for w in warm)
    platform.remove("calibration")
    fetched = start.last_byte_s - start.first_byte_s
    return Measured(n_bytes, n_bytes / fetched, context, max(0.0, cold.ttft_s - start.last_byte_s - ttft), ttft, t_d)


def play(platform: BenchPlatform, workload: Workload) -> list[Answer]:
    """Send each request at its moment, from a thread of its own."""
    answers = [Answer() for _ in workload.requests]
    began = time.monotonic() + 1.0

    def ask(request: Request, answer: Answer) -> None:
        caller: Caller = platform.caller(f"f{request.function}")
        time.sleep(max(0.0, began + request.arrival_s - time.monotonic()))
        try:
            found = caller.chat(PROMPT, N_OUTPUT)
            answer.ttft_s, answer.activation_id = found.ttft_s, found.activation_id
        except SystemExit as e:  # Caller.chat raises this when the answer is an error
            answer.error = str(e)
        caller.close()

    threads = [threading.Thread(target=ask, args=(r, a)) for r, a in zip(workload.requests, answers, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def rows(platform: BenchPlatform, workload: Workload, answers: Sequence[Answer], sim: Mapping[int, float]) -> list[Row]:
    found = []
    for request, answer in zip(workload.requests, answers, strict=True):
        events, plan = platform.trace(answer.activation_id) if answer.activation_id else ([], None)
        predicted_s = foretold_s(events)
        planned = _planned(events) if predicted_s is not None else None
        stages = planned.attrs.get("stages") if planned else 0
        found.append(
            Row(
                request.index,
                request.arrival_s,
                f"f{request.function} {request.app}",
                stages if isinstance(stages, int) else 0,
                predicted_s,
                sim[request.index],
                answer.ttft_s,
                _why(planned) if planned else "",
                "" if answer.error else _path(events, plan),
            )
        )
    return found


def _path(events: Sequence[TraceEvent], plan: Plan | None) -> str:
    """The path of an answer.  It has to be the relay for several stages, because no other path is simulated."""
    n_stages = len(plan.stages) if plan else len(hops_of(events))
    return _paths.checked(events, n_stages, _paths.expected("auto", direct=False))


def foretold_s(events: Sequence[TraceEvent]) -> float | None:
    """The predicted TTFT of the start that this request waited for, counted from the request's arrival."""
    planned, received = _planned(events), next((e for e in events if e.name is Phase.RECEIVED), None)
    predicted = planned.attrs.get("predicted_ttft_s") if planned else None
    if planned is None or received is None or not isinstance(predicted, (int, float)):
        return None
    left_s = predicted + (planned.mono_ns - received.mono_ns) / 1e9  # both processes share this machine's clock
    return left_s if left_s > 0 else None


def _planned(events: Sequence[TraceEvent]) -> TraceEvent | None:
    return next((e for e in events if e.name is Phase.PLANNED_END), None)


def _why(planned: TraceEvent) -> str:
    sizes = planned.attrs.get("sizes")
    each = sizes if isinstance(sizes, (list, tuple)) else ()
    return ", ".join(f"{c['stages']}/{c['full']} {c['why']} {c.get('ttft_s', '')}".strip() for c in each)


def table(found: Sequence[Row]) -> str:
    lines = ["  request      at  function            stages  predicted  simulated  real    path"]
    for r in found:
        predicted = "        –" if r.predicted is None else f"{r.predicted:9.2f}"
        lines.append(
            f"  {r.index:7}  {r.at_s:6.1f}  {r.function:18}  {r.stages or '–':>6}  {predicted}  "
            f"{r.simulated:9.2f}  {r.real:6.2f}  {r.path}".rstrip()
        )
    return "\n".join(lines)


def judged(found: Sequence[Row], paced: bool, rounds: int) -> list[Goal]:
    """Percentiles of the requests' errors, over all rounds.  If a request failed, the goals are not measured."""
    n_failed = sum(r.real != r.real for r in found)
    off = errors([(r.simulated, r.real) for r in found])
    floor = f"{n_failed} of {len(found)} requests failed" if n_failed else f"of {len(found)} requests, paired"
    return [
        judge(
            f"p{p}_error", None if n_failed else percentile(off, p), "<=", 0.15, paced=paced, floor=floor, rounds=rounds
        )
        for p in (50, 90)
    ]


def prediction(found: Sequence[Row], rounds: int) -> list[Goal]:
    """The errors of the scheduler's own prediction, for the requests that waited for a start and were answered."""
    off = errors([(r.predicted, r.real) for r in found if r.predicted is not None and r.real == r.real])
    floor = f"of {len(off)} requests that waited for a start, paired"
    return [
        figure(f"predicted_p{p}_error", percentile(off, p) if off else None, floor=floor, rounds=rounds)
        for p in (50, 90)
    ]


def main() -> int:
    options = _common.options(
        __doc__ or "", traces=("", "a workload file"), max_stages=(4, "of a group"), seed=(0, "of the generator")
    )
    n, seconds, n_functions = (12, 30.0, 4) if options.quick else (24, 120.0, 8)
    n_rounds = options.n or (1 if options.quick else 5)
    work = Path(tempfile.mkdtemp(prefix="thaw-replay-"))
    try:
        checkpoint, models = obtain(cache_dir(), say), work / "models"
        shutil.copytree(checkpoint, models / "smollm2")
        index = _model.write_index(models / "smollm2")
        for name in ["calibration", *(f"f{i}" for i in range(n_functions))]:
            (models / name).symlink_to("smollm2")  # the platform takes each address for another model
        traces = [make_trace(n, seconds, n_functions, options.seed + i) for i in range(n_rounds)]
        if options.traces:
            traces = [scaled(read_workload(Path(options.traces)), n, seconds, n_functions)] * n_rounds
        with Origin(work, work) as loopback:
            link = shaped(work, loopback, RATE_MBIT)
            rounds = [_replay(work, link, trace, index.n_bytes, n_functions, options.max_stages) for trace in traces]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    found = [row for r in rounds for row in r.rows]
    return _common.report(
        "replay",
        [*judged(found, link.paced, n_rounds), *prediction(found, n_rounds)],
        rounds=n_rounds,
        requests=len(found),
        failed=[e for r in rounds for e in r.errors],
        measured=[_plain(r.measured) for r in rounds],
        link=link.describe(),
        path=_paths.together(row.path for row in found),
    )


@dataclass(frozen=True, slots=True)
class Round:
    measured: Measured
    rows: list[Row]
    errors: list[str]


def _replay(work: Path, link: Link, trace: Workload, n_bytes: int, n_functions: int, max_stages: int) -> Round:
    state = Path(tempfile.mkdtemp(prefix="state-", dir=work))
    with (
        BenchPlatform(state, hosts=HOSTS, link=link.option, memory_mb=PER_HOST * 1024 + 512, store=work) as platform,
        link.store(platform) as url,
    ):
        measured = calibrate(platform, url, link, n_bytes)
        say(f"measured: {measured}")
        for i in range(n_functions):
            app = "chatbot" if i % 2 == 0 else "summarization"
            platform.deploy(f"f{i}", config(f"{url}/models/f{i}", app, max_stages))
        answers = play(platform, trace)
        found = rows(platform, trace, answers, simulated(trace, measured, max_stages))
    failed = [a.error for a in answers if a.error]
    say(table(found))
    for function in sorted({r.function for r in found if r.why}):
        say(f"  {function}, stages/full: {next(r.why for r in found if r.function == function and r.why)}")
    for error in failed[:3]:
        say(f"failed: {error}")
    return Round(measured, found, failed)


def _plain(measured: Measured) -> Mapping[str, float]:
    return {name: float(f"{getattr(measured, name):.4g}") for name in Measured.__slots__}


if __name__ == "__main__":
    sys.exit(main())
