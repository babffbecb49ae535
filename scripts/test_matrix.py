#!/usr/bin/env python3
"""Run the suite several times, each time on another kind of machine: `make test-matrix`.

Ten rows are of {2 cores, 4 cores} × {clock as it is, just booted, up for a year} × {alone, beside four busy processes}.
Any two settings occur together in at least one row.  Three further rows have a ceiling for the processor: their
engines compute as on one without AVX-512, without bfloat16, and without AMX.  Each row runs `make test` in an order of
its own and with noise of its own on the engines' logits, appends its result to .cache/test-matrix/results.jsonl, and
keeps the whole output in the same folder.  `--write` puts the last result of each row into docs/test-report.md.

    scripts/test_matrix.py                                   all rows
    scripts/test_matrix.py --rows 3,9 --seed 123             two rows again, in the order of an earlier run
    scripts/test_matrix.py --rows 8 --tests tests/gateway    some tests only (not written into the report)

taskset gives a row its cores.  A time namespace gives it its clock, which needs root.  A processor cannot be given what
it lacks, so AMX is tested only where it is.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "test-matrix"
REPORT = ROOT / "docs" / "test-report.md"
BEGIN, END = "<!-- matrix: scripts/test_matrix.py --write -->", "<!-- end of the matrix -->"
UPTIME_S = {"just booted": 20, "up for a year": 365 * 86_400}
"""The value of the monotonic clock when the row begins.  ``as it is`` does not change the clock."""
N_BUSY = 4
N_SLOWEST = 3
N_NAMED = 4
"""The report names this many of a row's failed tests; the row's log has all of them."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Row:
    cores: int
    clock: str
    busy: bool
    ceiling: str = ""
    """THAW_CPU_CEILING."""


ROWS = (
    Row(2, "as it is", False),
    Row(4, "as it is", False),
    Row(2, "just booted", False),
    Row(4, "just booted", False),
    Row(2, "up for a year", False),
    Row(4, "up for a year", False),
    Row(2, "as it is", True),
    Row(4, "just booted", True),
    Row(2, "up for a year", True),
    Row(4, "as it is", True),
    Row(2, "as it is", False, "avx2"),
    Row(2, "as it is", False, "avx512"),
    Row(2, "as it is", False, "avx512_bf16"),
)


@dataclass(frozen=True, slots=True)
class Result:
    row: int  # numbered from 1
    commit: str
    seed: str
    duration_s: float
    closing: str  # pytest's last line, without the signs around it
    failed: tuple[str, ...]
    slowest: tuple[str, ...]
    tests: tuple[str, ...] = ()  # empty: the whole suite
    noise: str = ""  # the seed of the noise on logits


def main() -> int:
    options = arguments()
    ok = True
    for number in options.rows:
        result = run(number, options.tests, options.seed)
        print(f"row {number}: {result.closing}", flush=True)
        ok = ok and is_passed(result)
        FOLDER.mkdir(parents=True, exist_ok=True)
        with (FOLDER / "results.jsonl").open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
    if options.write:
        REPORT.write_text(put_table(REPORT.read_text(), table(last_results())))
    return 0 if ok else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=row_numbers, default=list(range(1, len(ROWS) + 1)), help="1,3-5; none: 0")
    parser.add_argument("--seed", default="", help="of the order; chosen anew for each row without it")
    parser.add_argument("--tests", nargs="+", default=(), metavar="PATH", help="these instead of the whole suite")
    parser.add_argument("--write", action="store_true", help="put the last results into docs/test-report.md")
    return parser.parse_args()


def row_numbers(text: str) -> list[int]:
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    if any(n > len(ROWS) for n in numbers):
        raise argparse.ArgumentTypeError(f"rows are numbered from 1 to {len(ROWS)}")
    return [n for n in numbers if n > 0]


def run(number: int, tests: Sequence[str], seed: str) -> Result:
    """Run one row.  Its output is written to a file of its own."""
    row = ROWS[number - 1]
    cores = sorted(os.sched_getaffinity(0))[: row.cores]
    if len(cores) < row.cores:
        sys.exit(f"row {number} needs {row.cores} cores, and this process may use {len(cores)}\nhint: --rows")
    FOLDER.mkdir(parents=True, exist_ok=True)
    log = FOLDER / f"row-{number}.log"
    command = [*machine(row, cores), *suite(tests, seed)]
    noise = str(secrets.randbelow(1 << 31))
    environ = os.environ | {"THAW_LOGITS_NOISE": noise, "THAW_CPU_CEILING": row.ceiling}
    given = subprocess.DEVNULL
    began = time.monotonic()
    with beside(N_BUSY if row.busy else 0, cores), log.open("w") as output:
        subprocess.run(command, cwd=ROOT, env=environ, stdin=given, stdout=output, stderr=output, check=False)
    return replace(read(number, log.read_text(), time.monotonic() - began, tests), noise=noise)


def machine(row: Row, cores: Sequence[int]) -> list[str]:
    """The prefix of a command that runs on such a machine."""
    words = ["taskset", "--cpu-list", ",".join(map(str, cores))]
    if row.clock not in UPTIME_S:
        return words
    words += ["unshare", "--time", "--fork", "--kill-child"]
    shifted_s = offsets_s()
    for name, clock in (("monotonic", time.CLOCK_MONOTONIC), ("boottime", time.CLOCK_BOOTTIME)):
        words.append(f"--{name}={round(UPTIME_S[row.clock] - time.clock_gettime(clock) + shifted_s[name])}")
    return words


def offsets_s() -> dict[str, int]:
    """How far this process's clocks are ahead of the machine's.  A new namespace counts from the machine's clocks."""
    lines = Path("/proc/self/timens_offsets").read_text().splitlines()
    return {name: int(seconds) for name, seconds, _ in (line.split() for line in lines)}


def suite(tests: Sequence[str], seed: str) -> list[str]:
    return ["make", "test", f"SEED={seed}", f"TESTS={' '.join(tests)}"]


@contextlib.contextmanager
def beside(count: int, cores: Sequence[int]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run ``count`` processes that compute on the same cores all the time.

    They end with this process, even when it is killed.
    """
    command = ["taskset", "--cpu-list", ",".join(map(str, cores)), sys.executable, "-c", "while True: pass"]
    prctl = ctypes.CDLL(None).prctl
    end_with_us = partial(prctl, _PR_SET_PDEATHSIG, signal.SIGKILL)
    processes = [subprocess.Popen(command, preexec_fn=end_with_us) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def read(number: int, output: str, duration_s: float, tests: Sequence[str]) -> Result:
    seed = re.search(r"--randomly-seed=(\d+)", output)
    closing = re.findall(r"^=+ (.*\b(?:passed|failed|errors?|deselected)\b.* in [\d.]+s.*?) =+$", output, re.M)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    slowest = re.findall(r"^([\d.]+)s (?:call|setup|teardown) +(\S+)", output, re.M)
    return Result(
        number,
        commit(),
        seed.group(1) if seed else "",
        round(duration_s, 1),
        closing[-1] if closing else "pytest did not come to its end",
        tuple(failed),
        tuple(f"{name.rpartition('/')[2]} {seconds} s" for seconds, name in slowest[:N_SLOWEST]),
        tuple(tests),
    )


def commit() -> str:
    described = ["git", "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=7"]
    return subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def is_passed(result: Result) -> bool:
    return " passed" in result.closing and not re.search(r"failed|error", result.closing)


def last_results() -> list[Result]:
    """The last result of the whole suite in each row."""
    last: dict[int, Result] = {}
    path = FOLDER / "results.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        plain = json.loads(line)
        result = Result(**{k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()})
        if not result.tests:
            last[result.row] = result
    return [last[number] for number in sorted(last)]


def table(results: Sequence[Result]) -> str:
    lines = [
        "| row | commit | cores | clock | beside it | ceiling | seed | noise | duration | result | slowest |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        row = ROWS[r.row - 1]
        minutes, seconds = divmod(round(r.duration_s), 60)
        named = [*(f"`{name}`" for name in r.failed[:N_NAMED]), f"and {len(r.failed) - N_NAMED} more"]
        came = "<br>".join([re.sub(r" in [\d.]+s.*", "", r.closing), *named[: len(r.failed)]])
        load = f"{N_BUSY} busy processes" if row.busy else "nothing"
        slowest = "<br>".join(f"`{name}`" for name in r.slowest)
        took, ceiling = f"{minutes} min {seconds} s", row.ceiling or "none"
        cells = (r.row, r.commit, row.cores, row.clock, load, ceiling, r.seed, r.noise, took, came, slowest)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def put_table(page: str, made: str) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{REPORT} lacks the line {BEGIN!r} or {END!r}")
    return f"{before}{begin}\n{made}\n{end}{after}"


if __name__ == "__main__":
    sys.exit(main())
