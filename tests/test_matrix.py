"""The matrix of machines on which the suite runs: its rows, its machines, and the results that it reads from a run."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from itertools import combinations, product

import pytest

from scripts import test_matrix as matrix
from scripts.test_matrix import ROWS, Result, Row
from thaw_runtime.engine.vllm.settings import CEILINGS

OUTPUT = """\
Using --randomly-seed=42
================ slowest 30 durations ================
31.20s call     tests/e2e/test_soak.py::test_a_platform[1]
7.01s setup    tests/cli/test_chat.py::test_a
=========================== short test summary info ============================
FAILED tests/cli/test_chat.py::test_a - AssertionError: 1 failed, 2 passed in 3.00s
ERROR tests/cli/test_chat.py::test_b
========= 1 failed, 2770 passed, 1 error, 111 deselected in 900.12s (0:15:00) ==========
make: *** [Makefile:30: test] Error 1
"""


def test_any_two_settings_meet_in_a_row() -> None:
    values = [(2, 4), ("as it is", *matrix.UPTIME_S), (False, True)]
    settings = [(row.cores, row.clock, row.busy) for row in ROWS if not row.ceiling]
    for a, b in combinations(range(3), 2):
        assert {(s[a], s[b]) for s in settings} == set(product(values[a], values[b]))
    assert len(set(settings)) == len(settings) == 10


def test_every_ceiling_has_a_row() -> None:
    assert {row.ceiling for row in ROWS} == {"", *CEILINGS}


@pytest.mark.parametrize(("clock", "least_s", "most_s"), [("just booted", 19, 60), ("up for a year", 3.1e7, 3.2e7)])
def test_a_machine_has_its_cores_and_its_clock(clock: str, least_s: float, most_s: float) -> None:
    core = min(os.sched_getaffinity(0))
    look = "import json, os, time; print(json.dumps([time.monotonic(), sorted(os.sched_getaffinity(0))]))"
    command = [*matrix.machine(Row(2, clock, False), [core]), sys.executable, "-c", look]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    uptime_s, cores = json.loads(done.stdout)
    assert least_s < uptime_s < most_s
    assert cores == [core]


def test_busy_processes_end_with_the_row() -> None:
    with matrix.beside(2, [min(os.sched_getaffinity(0))]) as processes:
        assert [p.poll() for p in processes] == [None, None]
    assert all(p.poll() is not None for p in processes)


def test_busy_processes_end_with_a_script_that_is_killed() -> None:
    core = min(os.sched_getaffinity(0))
    code = (
        "import signal; from scripts import test_matrix as matrix\n"
        f"with matrix.beside(1, [{core}]) as processes: print(processes[0].pid, flush=True); signal.pause()"
    )
    script = subprocess.Popen([sys.executable, "-c", code], cwd=matrix.ROOT, stdout=subprocess.PIPE, text=True)
    with script:
        assert script.stdout is not None
        busy = os.pidfd_open(int(script.stdout.readline()))
        try:
            script.kill()
            assert select.select([busy], [], [], 20)[0]
        finally:
            os.close(busy)


def test_a_run_is_read_from_its_output() -> None:
    result = matrix.read(2, OUTPUT, 912.34, ())
    assert result.closing == "1 failed, 2770 passed, 1 error, 111 deselected in 900.12s (0:15:00)"
    assert result.failed == ("tests/cli/test_chat.py::test_a", "tests/cli/test_chat.py::test_b")
    assert result.slowest == ("test_soak.py::test_a_platform[1] 31.20 s", "test_chat.py::test_a 7.01 s")
    assert (result.seed, result.duration_s) == ("42", 912.3)
    assert not matrix.is_passed(result)
    assert matrix.is_passed(matrix.read(2, "= 3000 passed, 111 deselected in 1.00s =", 1, ()))
    assert not matrix.is_passed(matrix.read(2, "collecting ...", 1, ()))


def test_the_table_replaces_what_stands_between_its_marks() -> None:
    result = Result(
        9, "abc1234", "42", 912.3, "3 failed, 7 passed in 912.00s", ("tests/x.py::test_y",), ("x.py::z 9.1",), (), "7"
    )
    page = matrix.put_table(f"a\n{matrix.BEGIN}\nold\n{matrix.END}\nb\n", matrix.table([result]))
    assert page.startswith(f"a\n{matrix.BEGIN}\n| row |")
    assert page.endswith(f"{matrix.END}\nb\n")
    assert "old" not in page
    assert (
        "| 9 | abc1234 | 2 | up for a year | 4 busy processes | none | 42 | 7 | 15 min 12 s | "
        "3 failed, 7 passed<br>`tests/x.py::test_y` | `x.py::z 9.1` |"
    ) in page


def test_the_report_has_a_place_for_the_table() -> None:
    page = matrix.REPORT.read_text()
    assert page.index(matrix.BEGIN) < page.index(matrix.END)
