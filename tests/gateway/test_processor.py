"""Requests take turns to compute, by namespace, and one that waits has no turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gateway.processor import Processor, another_thread, computes_freely, waiting
from tests.conftest import Clock
from tests.gateway.shared_processor import NEVER_S, shared
from thaw.ids import Namespace

_S = 20.0
FLOOD, HONEST = Namespace("flood"), Namespace("honest")


class Requests:
    """Requests on threads of their own.  Each computes until it is told to end."""

    def __init__(self, processor: Processor) -> None:
        self.processor = processor
        self._ends: dict[str, threading.Event] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._changed = threading.Condition()
        self.began: list[str] = []

    def come(self, name: str, owner: Namespace, act: Callable[[], object] = lambda: None) -> None:
        """Return when the request has begun or is in line.  ``act`` is the first thing that it does."""
        n_before = self._n_come()
        self._ends[name] = threading.Event()
        self._threads[name] = threading.Thread(target=self._run, args=(name, owner, act), daemon=True)
        self._threads[name].start()
        self.until(lambda: self._n_come() > n_before)

    def end(self, name: str) -> None:
        self._ends[name].set()
        self._threads[name].join(_S)
        assert not self._threads[name].is_alive(), f"{name} has not ended; begun: {self.began}"

    def until(self, is_so: Callable[[], bool]) -> None:
        with self._changed:
            for _ in range(2000):
                if is_so():
                    return
                self._changed.wait(0.01)  # a request that joins the line tells nobody
        raise AssertionError(f"begun: {self.began}, in line: {self.processor.n_in_line}")

    def has_begun(self, name: str) -> None:
        self.until(lambda: name in self.began)

    def _n_come(self) -> int:
        return len(self.began) + self.processor.n_in_line

    def _run(self, name: str, owner: Namespace, act: Callable[[], object]) -> None:
        with self.processor.computing(owner):
            with self._changed:
                self.began.append(name)
                self._changed.notify_all()
            act()
            assert self._ends[name].wait(_S)


@contextmanager
def requests(
    n_turns: int = 1, longest_s: float = NEVER_S, now_s: Callable[[], float] = time.monotonic
) -> Iterator[Requests]:
    """At the end every turn must be free again."""
    made = Requests(shared(n_turns, longest_s, now_s))
    made.processor.start()
    yield made
    for name in list(made._threads):
        made._ends[name].set()
    for thread in made._threads.values():
        thread.join(_S)
    assert made.processor.n_in_line == 0
    assert made.processor.n_free == n_turns
    made.processor.stop()


def test_a_request_waits_for_one_turn_of_a_namespace_that_has_many_in_line() -> None:
    with requests() as those:
        for n in range(10):
            those.come(f"flood {n}", FLOOD)
        those.come("honest", HONEST)
        those.end("flood 0")
        those.until(lambda: len(those.began) == 2)
        those.end(those.began[1])
        those.until(lambda: len(those.began) == 3)
        assert "honest" in those.began


def test_no_more_requests_compute_at_once_than_there_are_turns() -> None:
    with requests(n_turns=2) as those:
        for n in range(5):
            those.come(str(n), FLOOD)
        assert those.began == ["0", "1"]
        assert those.processor.n_in_line == 3
        those.end("1")
        those.has_begun("2")
        assert len(those.began) == 3


def test_a_namespace_with_long_turns_has_fewer_of_them() -> None:
    """The flood has had a long turn while another one waited, so both requests of the other one come first."""
    clock = Clock()
    with requests(now_s=clock) as those:
        for owner in (FLOOD, HONEST):
            for n in range(2):
                those.come(f"{owner} {n}", owner)
        clock.now_s += 0.01
        those.end("flood 0")
        those.has_begun("honest 0")
        those.end("honest 0")
        those.has_begun("honest 1")
        assert "flood 1" not in those.began


def test_a_request_that_waits_has_no_turn_and_gets_one_again_when_it_goes_on() -> None:
    answered, went_on = threading.Event(), threading.Event()

    def wait_for_an_instance() -> None:
        with waiting(), waiting():  # a wait in a wait
            assert answered.wait(_S)
        went_on.set()

    with requests() as those:
        those.come("waits", FLOOD, wait_for_an_instance)
        those.come("other", FLOOD)
        those.has_begun("other")
        answered.set()
        those.until(lambda: those.processor.n_in_line == 1)
        assert not went_on.is_set()
        those.end("other")
        assert went_on.wait(_S)


def test_a_turn_that_takes_too_long_holds_nobody_up() -> None:
    """A request that waits without saying so, here for one that is in line for its turn."""
    with requests(longest_s=0.02) as those:
        answered = threading.Event()
        those.come("waits", FLOOD, lambda: answered.wait(_S))
        those.come("answers", HONEST, answered.set)
        assert answered.wait(_S)
        those.end("answers")
        those.end("waits")
        those.come("next", FLOOD)
        those.has_begun("next")


def test_a_request_that_fails_gives_its_turn_back() -> None:
    processor = shared()
    with pytest.raises(ZeroDivisionError), processor.computing(FLOOD):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), processor.computing(FLOOD), waiting():
        assert processor.n_free == 1
        raise ZeroDivisionError
    assert processor.n_free == 1


def test_a_stream_needs_no_turns() -> None:
    processor = shared()
    with processor.computing(FLOOD):
        computes_freely()
        free = [processor.n_free]
        with waiting():
            free.append(processor.n_free)
        free.append(processor.n_free)
    assert [*free, processor.n_free] == [1] * 4


def test_a_request_that_goes_on_on_another_thread_has_turns_there() -> None:
    processor = shared()
    had: list[int] = []
    with processor.computing(FLOOD):
        there = another_thread()

        def go_on() -> None:
            with there:
                had.append(processor.n_free)

        thread = threading.Thread(target=go_on)
        thread.start()
        with waiting():
            thread.join(_S)
        assert had == [0]
    assert processor.n_free == 1


def test_a_thread_that_serves_no_request_waits_as_it_is() -> None:
    assert another_thread() is None
    computes_freely()
    with waiting():
        assert another_thread() is None


def test_requests_of_one_namespace_alone_take_no_turns() -> None:
    processor = Processor(1)
    with processor.computing(FLOOD), processor.computing(FLOOD):
        assert processor.n_free == 1
        assert processor.n_in_line == 0


def test_turns_begin_with_another_namespace_and_end_when_it_comes_no_more() -> None:
    clock = Clock()
    processor = Processor(1, now_s=clock, shared_s=1.0)
    with processor.computing(FLOOD):
        pass
    with processor.computing(HONEST):
        assert processor.n_free == 0
    clock.now_s += 0.9
    with processor.computing(FLOOD):
        assert processor.n_free == 0
    clock.now_s += 1.1
    with processor.computing(FLOOD):
        assert processor.n_free == 1


def test_a_request_that_began_without_a_turn_takes_one_when_it_goes_on() -> None:
    processor = Processor(1, shared_s=NEVER_S)

    def compute() -> None:
        with processor.computing(HONEST):
            assert processor.n_free == 0

    with processor.computing(FLOOD):
        assert processor.n_free == 1
        with waiting():
            other = threading.Thread(target=compute)
            other.start()
            other.join(_S)
        assert processor.n_free == 0
    assert processor.n_free == 1


def test_while_hundreds_are_in_line_few_threads_wake() -> None:
    """The thread that watches the turns looks at them when one may be over, and no request in line wakes before its
    turn."""
    looks = [0]

    def now_s() -> float:
        looks[0] += 1
        return time.monotonic()

    with requests(longest_s=0.1, now_s=now_s) as those:
        for n in range(20):
            those.come(str(n), FLOOD)
        n_before, began_s = looks[0], time.monotonic()
        those.has_begun("5")
        n_turns = 1 + (time.monotonic() - began_s) / 0.1
        assert looks[0] - n_before <= 4 * n_turns
