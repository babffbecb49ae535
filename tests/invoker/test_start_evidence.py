"""The evidence that the ``container`` phase gives."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from invoker.containers.start_evidence import ContainerEvidence

COMPUTE = "import time\nwhile time.process_time() < 0.15: pass\nprint(flush=True)\ninput()"


def compute(cpu_s: float) -> None:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


@contextmanager
def process() -> Iterator[int]:
    """Yield the pid of a process that has computed for 0.15 s."""
    with subprocess.Popen([sys.executable, "-c", COMPUTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid


def number(attrs: dict[str, object], name: str) -> float:
    return float(str(attrs[name]))


def test_the_thread_that_makes_it_and_the_container_are_added() -> None:
    evidence = ContainerEvidence()
    compute(0.05)
    evidence.begun()
    compute(0.3)  # this runs at the same time as the container, so it would count twice
    with process() as pid:
        attrs = evidence.answered(pid)
    assert 0.2 <= number(attrs, "cpu_s") < 0.5
    assert "wait_s" not in attrs


def test_of_a_stem_cell_counts_what_it_did_since_it_was_asked() -> None:
    with process() as cell, process() as pid:
        evidence = ContainerEvidence()
        with evidence.waiting_for("the stem cell", cell):
            pass
        evidence.begun()
        assert number(evidence.answered(pid), "cpu_s") < 0.3  # the container's time, without the cell's earlier work


def test_sleeping_until_fetchd_answers_is_waiting_and_computing_is_not() -> None:
    evidence = ContainerEvidence()
    with evidence.waiting_for("fetchd"):
        compute(0.05)
        threading.Event().wait(0.02)  # this is the waiting time to count
    evidence.begun()
    attrs = evidence.answered(os.getpid())
    assert attrs["waits_for"] == "fetchd"
    assert number(attrs, "wait_s") >= 0.019


def test_a_stem_cell_that_does_not_answer_is_waited_for_and_its_own_work_is_not_waiting() -> None:
    with process() as cell:
        evidence = ContainerEvidence()
        with evidence.waiting_for("fetchd"):
            pass
        with evidence.waiting_for("the stem cell", cell):
            threading.Event().wait(0.05)  # the cell does nothing
        evidence.begun()
        attrs = evidence.answered(os.getpid())
    assert attrs["waits_for"] == "the stem cell"
    assert number(attrs, "wait_s") >= 0.03  # the wait, less the cell's own work at its beginning
