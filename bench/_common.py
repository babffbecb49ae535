"""The code that all benchmarks share: goals, samples, interleaving, processes, and the last line.

A benchmark asks one question.  It runs the competitors in turn in one process tree, compares medians, and prints as
its last line one JSON object: the command, the rounds, the figures with their goals, and the machine with its commit
and its load.  ``python -m bench._publish`` writes docs/benchmarks.md from such lines.  A missed goal is printed as
missed, together with the reason why it is not reached.  A value measured on a paced link (where no network namespace
could be made) satisfies no goal.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import json
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from thaw.dev.watch import wait_for_line

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Goal:
    """``floor`` says what the value consists of, which matters most where a goal is missed.  ``samples`` are the single
    measurements from which the value was computed.
    """

    name: str
    value: float | None  # None: it could not be measured here, and floor says why
    op: str  # "<=", ">=" or "=="; empty for a figure without a goal
    goal: float | None
    ok: bool | None
    paced: bool = False
    floor: str = ""
    samples: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rounds: int | None = None  # None: as many rounds as the whole program made


def judge(
    name: str,
    value: float | None,
    op: str,
    goal: float,
    *,
    paced: bool = False,
    floor: str = "",
    samples: Mapping[str, Any] | None = None,
    rounds: int | None = None,
) -> Goal:
    """Only a value that was measured on a real link can meet a goal."""
    met = value is not None and {"<=": value <= goal, ">=": value >= goal, "==": value == goal}[op]
    return Goal(name, _rounded(value), op, goal, met and not paced, paced, floor, samples or {}, rounds)


def figure(name: str, value: float | None, *, floor: str = "", rounds: int | None = None) -> Goal:
    """A value that is worth publishing but has no goal."""
    return Goal(name, _rounded(value), "", None, None, floor=floor, rounds=rounds)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def report(bench: str, goals: Sequence[Goal], *, rounds: int, **facts: Any) -> int:
    """Print the goals, then the JSON line.  Always return 0: a missed goal is a result, a crash is not."""
    print()
    for g in goals:
        value = "not measured" if g.value is None else f"{g.value:g}"
        mark = "" if g.ok is None else "ok" if g.ok else "PACED" if g.paced else "MISSED"
        wanted = "" if g.goal is None else f"goal {g.op} {g.goal:g}"
        print(f"  {mark:6}  {g.name:34} {value:>12}   {wanted}   {g.floor}")
    plain = [_plain(g, rounds) for g in goals]
    print(
        json.dumps(
            {"bench": bench, "command": command_line(), "rounds": rounds, "goals": plain, **facts, "machine": machine()}
        )
    )
    return 0


def _plain(goal: Goal, rounds: int) -> dict[str, Any]:
    always = ("value", "ok") if goal.op else ("value",)
    fields = dataclasses.asdict(goal) | {"rounds": goal.rounds or rounds}
    return {name: value for name, value in fields.items() if value or name in always}


@dataclass(frozen=True, slots=True)
class Begun:
    """The commit, and the load of the machine, at the moment in which a program begins."""

    commit: str
    dirty: bool  # a tracked file, other than the results and their page, differs from the commit
    load_1m: float


@functools.cache
def begun() -> Begun:
    """Return the commit and the load at the beginning of this process.

    Every program calls this first, so that a commit made during the run is not mistaken for the one that ran.
    """
    changed = ("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results", ":!docs/benchmarks.md")
    return Begun(_git("rev-parse", "--short", "HEAD"), bool(_git(*changed)), round(os.getloadavg()[0], 2))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout.strip()


def command_line() -> str:
    """The command that runs this program again, typed in the checkout."""
    program = Path(sys.argv[0]).resolve()
    name = str(program.relative_to(ROOT)) if program.is_relative_to(ROOT) else program.name
    priority = os.sched_getparam(0).sched_priority
    real_time = ["chrt", "-r", str(priority)] if os.sched_getscheduler(0) == os.SCHED_RR else []
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    cores = sorted(os.sched_getaffinity(0))
    some_cores = ["taskset", "-c", ",".join(map(str, cores))] if len(cores) < (os.cpu_count() or 1) else []
    niceness = ["nice", "-n", str(nice)] if nice else []
    return shlex.join([*some_cores, *real_time, *niceness, name, *sys.argv[1:]])


def machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.+)", cpuinfo)
    return {
        "cores": os.cpu_count(),
        "cpu": model.group(1).strip() if model else platform.machine(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "load_1m": [begun().load_1m, round(os.getloadavg()[0], 2)],  # at the beginning and at the end, its own included
        "commit": begun().commit,
        "dirty": begun().dirty,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def options(question: str, **further: Any) -> argparse.Namespace:
    """Parse ``--quick``, ``-n`` and the ``further`` options, which are given as ``name=(default, help)``."""
    begun()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout` must not leave namespaces and servers behind
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--quick", action="store_true", help="a smaller run of the same thing, under two minutes")
    parser.add_argument("-n", type=int, default=None, help="rounds")
    for name, (default, help_text) in further.items():
        parser.add_argument("--" + name.replace("_", "-"), default=default, type=type(default), help=help_text)
    return parser.parse_args()


def interleave(competitors: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run every competitor once per round.

    Each round begins with another competitor, so a slow minute of the machine affects all of them alike.
    """
    results: dict[str, list[T]] = {name: [] for name in competitors}
    names = list(competitors)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            results[name].append(competitors[name]())
            say(f"round {i + 1}/{rounds} {name}: {results[name][-1]}")
    return results


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], p: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(p / 100 * (len(ordered) - 1)))]


def say(text: str) -> None:
    print(text, flush=True)


def cpu_seconds(pid: int) -> float:
    """The CPU time that a whole process has used so far, to the nanosecond (/proc counts in ticks of 10 ms)."""
    return time.clock_gettime(~pid << 3 | 2)  # CPUCLOCK_SCHED of linux/posix-timers.h


@dataclass
class Program:
    """A child process that the kernel kills when this process ends.  Its output is in a file."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self, sig: signal.Signals = signal.SIGTERM, grace_s: float = 20.0) -> None:
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start(
    command: Sequence[str],
    log: Path,
    ready: str,
    *,
    env: Mapping[str, str] | None = None,
    deadline_s: float = 60.0,
    cwd: Path | None = None,
    own_session: bool = False,
) -> Program:
    """Start a program and wait until its log holds ``ready``.

    ``own_session`` starts it in a session of its own, like a service: the kernel gives each session its own share of
    the CPU (sched_autogroup).  Every process of a Thaw platform has a session of its own.
    """
    log.unlink(missing_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=cwd or ROOT,
            env=None if env is None else dict(env),
            preexec_fn=die_with_parent,
            start_new_session=own_session,
        )
    program = Program(process, log)
    if ready and not wait_for_line(log, ready, deadline_s):
        program.stop(signal.SIGKILL)
        raise SystemExit(f"{command[0]} did not become ready:\n{log.read_text()[-2000:]}")
    return program


def python_env(**extra: str) -> dict[str, str]:
    """The environment of a Python child: it can import the checkout whether or not Thaw is installed."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime-python'}", "PYTHONUNBUFFERED": "1", **extra}


def die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
