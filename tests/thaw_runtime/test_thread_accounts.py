"""The kernel's counts of threads become evidence, and nothing else does."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relay.thread_account import BlockedTime, ThreadAccount
from thaw.process.kernel_counts import parse_disk_wait, parse_schedstat
from thaw_runtime.engine.vllm.work import OTHER_STAGES, Work
from thaw_runtime.process.thread_accounts import Delays, OtherThreads

STAT = "77 (a) b (c) S " + " ".join(str(n) for n in range(4, 53))  # the fields as man 5 proc numbers them


def compute(cpu_s: float) -> None:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


class Worker:
    """Computes once it is told to, reports this, and lives until it is released.

    It runs in a thread that a library has started and that Python does not know, as those of compute kernels are, or in
    one of Python's own threads.
    """

    def __init__(self, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self._begin, self._done, self._let_go = threading.Event(), threading.Event(), threading.Event()

    def run(self, _: int | None = None) -> None:
        assert self._begin.wait(30)
        compute(self._cpu_s)
        self._done.set()
        self._let_go.wait(30)

    def work(self) -> None:
        """Let it compute, and sleep until it has done so."""
        self._begin.set()
        assert self._done.wait(30)

    def let_go(self) -> None:
        self._let_go.set()


@contextmanager
def foreign(worker: Worker) -> Iterator[None]:
    libc = ctypes.CDLL(None)
    run, thread = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(worker.run), ctypes.c_ulong()
    assert libc.pthread_create(ctypes.byref(thread), None, run, None) == 0
    try:
        yield
    finally:
        worker.let_go()
        assert libc.pthread_join(thread, None) == 0


@contextmanager
def pythons(worker: Worker) -> Iterator[None]:
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        worker.let_go()
        thread.join()


def test_a_thread_that_sleeps_while_another_of_its_kernel_works_waits_for_it() -> None:
    kernels, worker = OtherThreads(), Worker(0.5)
    with foreign(worker):
        with kernels.counted():
            worker.work()
        assert kernels.seconds >= 0.15


def test_a_sleep_in_which_no_other_thread_works_is_no_wait_for_other_threads() -> None:
    kernels = OtherThreads()
    with kernels.counted():
        threading.Event().wait(0.1)
    assert kernels.seconds < 0.05


def test_over_many_calls_only_what_the_busiest_was_busier_counts() -> None:
    kernels, worker = OtherThreads(), Worker(0.5)
    with foreign(worker):
        with kernels.counted_over_many():
            worker.work()
        assert kernels.seconds >= 0.15
    kernels, worker = OtherThreads(), Worker(0.02)
    with foreign(worker):
        with kernels.counted_over_many():
            worker.work()
            compute(1.0)  # the other threads finished their part long before
        assert kernels.seconds == 0.0


def test_pythons_own_threads_are_not_those_of_a_kernel() -> None:
    kernels, worker = OtherThreads(), Worker(0.5)
    with pythons(worker), kernels.counted():
        worker.work()
    assert kernels.seconds < 0.05


def test_a_request_that_stood_still_explains_nothing_by_its_own_sleep() -> None:
    """All waiting used to be reported as waiting for other threads, even if it had another cause."""
    work = Work(None)
    mark = work.mark(n_tokens=1000)
    compute(0.02)
    threading.Event().wait(0.15)
    said = work.since(mark)
    assert float(str(said["cpu_s"])) >= 0.02
    assert float(str(said.get("threads_wait_s", 0))) < 0.05
    assert "wait_s" not in said


def test_a_request_of_a_pipeline_has_waited_for_the_other_stages_where_it_did() -> None:
    stages = BlockedTime()
    work = Work(stages)
    mark = work.mark(n_tokens=3)
    with stages.counted():
        threading.Event().wait(0.05)
    threading.Event().wait(0.05)  # this is a wait for something else
    said = work.since(mark)
    assert said["waits_for"] == OTHER_STAGES
    assert 0.049 <= float(str(said["wait_s"])) == pytest.approx(stages.seconds, abs=0.001)


def test_a_thread_that_has_ended_counts_nothing() -> None:
    thread = threading.Thread(target=compute, args=(0.01,))
    thread.start()
    account = ThreadAccount(thread.native_id)
    thread.join()
    assert ThreadAccount(2**22 + 1).spent() == (0.0, 0.0)
    assert account.spent()[0] >= 0.0


def test_programs_that_a_phase_ran_are_counted_with_their_cpu_time() -> None:
    before = Delays.now()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.1: pass"], check=True)
    assert float(Delays.now().since(before)["programs_s"]) >= 0.09


def test_the_disk_wait_is_the_42nd_field_whatever_the_name_holds() -> None:
    assert parse_disk_wait(STAT) == 42 / os.sysconf("SC_CLK_TCK")
    assert parse_disk_wait("77 (old) S 4 5") == 0.0
    assert parse_disk_wait(Path("/proc/thread-self/stat").read_text()) >= 0.0


@pytest.mark.parametrize("text", [b"", b"0 0", b"1 2 3 4\n"])
def test_a_kernel_that_does_not_count_gives_zeros(text: bytes) -> None:
    assert parse_schedstat(text) == (0.0, 0.0)


def test_schedstat_is_cpu_time_then_the_wait_for_a_core() -> None:
    assert parse_schedstat(b"1500000000 250000000 7\n") == (1.5, 0.25)
