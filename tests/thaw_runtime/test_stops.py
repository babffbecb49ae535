"""A parent learns when its child is stopped and continued."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from thaw.tracing.trace import Phase, TraceEvent
from thaw_runtime.process.stops import StopWatch

WAIT_S = 30.0


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def heard(watch: StopWatch, name: Phase, n: int = 1) -> tuple[TraceEvent, ...]:
    """Wait until there are ``n`` events of this name, and return all events."""
    until = time.monotonic() + WAIT_S
    while sum(e.name == name for e in watch.since(0)) < n:
        assert time.monotonic() < until, watch.since(0)
        time.sleep(0.005)
    return watch.since(0)


def test_a_stop_is_as_long_as_it_was_and_says_by_which_signal(child: subprocess.Popen[bytes]) -> None:
    watch = StopWatch(child.pid, "engine")
    watch.begin()
    os.kill(child.pid, signal.SIGSTOP)
    heard(watch, Phase.STOPPED_BEGIN)
    threading.Event().wait(0.1)  # the child stays stopped for this long
    os.kill(child.pid, signal.SIGCONT)
    begin, end = heard(watch, Phase.STOPPED_END)
    assert begin.attrs == {"process": "engine", "signal": "SIGSTOP"}
    assert end.mono_ns - begin.mono_ns >= 0.1e9


def test_a_child_that_goes_on_is_seen_to_do_so_before_the_thread_hears_of_it(child: subprocess.Popen[bytes]) -> None:
    watch = StopWatch(child.pid, "engine")  # nothing is heard: its thread does not run
    for sent, state, names in (
        (signal.SIGSTOP, os.WSTOPPED, [Phase.STOPPED_BEGIN]),
        (signal.SIGCONT, os.WCONTINUED, [Phase.STOPPED_BEGIN, Phase.STOPPED_END]),
    ):
        os.kill(child.pid, sent)
        os.waitid(os.P_PID, child.pid, state | os.WNOWAIT)
        assert [e.name for e in watch.since(0)] == names


def test_a_stop_concerns_whoever_was_there_before_it_was_over(child: subprocess.Popen[bytes]) -> None:
    watch = StopWatch(child.pid, "engine")
    watch.begin()
    for n in (1, 2):
        os.kill(child.pid, signal.SIGSTOP)
        during = heard(watch, Phase.STOPPED_BEGIN, n)[-1].mono_ns
        assert [e.name for e in watch.since(during)] == [Phase.STOPPED_BEGIN]  # the stop has not ended yet
        os.kill(child.pid, signal.SIGCONT)
        heard(watch, Phase.STOPPED_END, n)
        assert [e.name for e in watch.since(during)] == [Phase.STOPPED_BEGIN, Phase.STOPPED_END]
        assert watch.since(time.monotonic_ns()) == ()


def test_the_death_of_the_child_is_left_for_others_to_see(child: subprocess.Popen[bytes]) -> None:
    watch = StopWatch(child.pid, "engine")
    watch.begin()
    os.kill(child.pid, signal.SIGSTOP)
    heard(watch, Phase.STOPPED_BEGIN)
    child.kill()
    assert child.wait(WAIT_S) == -signal.SIGKILL


def test_a_process_that_is_no_child_is_not_watched() -> None:
    watch = StopWatch(1, "engine")
    watch.begin()
    assert watch.since(0) == ()


def test_a_child_that_goes_on_and_was_not_seen_to_stop_is_noted_without_a_length(
    child: subprocess.Popen[bytes],
) -> None:
    """This happens when the whole container is stopped: its proxy learns of the stop only when it continues itself."""
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    watch = StopWatch(child.pid, "engine")
    watch.begin()
    os.kill(child.pid, signal.SIGCONT)
    begin, end = heard(watch, Phase.STOPPED_END)
    assert begin.attrs["signal"] == "SIGCONT"
    assert end.mono_ns - begin.mono_ns < 1e9
