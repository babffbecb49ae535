"""One inspection of a model at a time, and answers that are not older than the question."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest

from fetchd.inspections import Inspections
from fetchd.places import Places
from tests.fetchd.harness import wait_until
from thaw.errors import StoreUnavailable, Throttled
from thaw.model import ModelFacts

URI = "http://store/m"


class Looks:
    """Inspections that end when the test says so, each with the number of its beginning."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.inspections = Inspections(Places(1, 1, "inspections"))
        self._pool = pool
        self.go = threading.Semaphore(0)
        self.began = 0
        self.error: Exception | None = None

    def ask(self) -> Future[ModelFacts]:
        return self._pool.submit(self.inspections.run, URI, ("a",), self._inspect)

    def waiting(self, n: int) -> bool:
        running = self.inspections._running.get(URI)
        return running is not None and running.n_waiting == n

    def _inspect(self) -> ModelFacts:
        self.began += 1
        number = self.began
        assert self.go.acquire(timeout=20)
        if self.error is not None:
            raise self.error
        return ModelFacts(URI, 1, 1, 1, (1,), 0, f"version {number}", "", True, {})


def test_who_asks_meanwhile_gets_an_answer_that_began_after_the_question() -> None:
    with ThreadPoolExecutor(4) as pool:
        looks = Looks(pool)
        first = looks.ask()
        wait_until(partial(looks.waiting, 0))
        others = [looks.ask() for _ in range(3)]
        wait_until(partial(looks.waiting, 3))
        looks.go.release()
        assert first.result(20).version == "version 1"
        wait_until(partial(looks.waiting, 2))
        assert looks.began == 2
        looks.go.release()
        assert [other.result(20).version for other in others] == ["version 2"] * 3


def test_who_asks_meanwhile_gets_the_error_without_an_attempt_of_its_own() -> None:
    with ThreadPoolExecutor(2) as pool:
        looks = Looks(pool)
        looks.error = StoreUnavailable("silent")
        first = looks.ask()
        wait_until(partial(looks.waiting, 0))
        other = looks.ask()
        wait_until(partial(looks.waiting, 1))
        with pytest.raises(Throttled):
            looks.inspections.run("http://store/other", ("a",), looks._inspect)
        looks.go.release()
        for asked in (first, other):
            with pytest.raises(StoreUnavailable, match="silent"):
                asked.result(20)
        assert looks.began == 1
