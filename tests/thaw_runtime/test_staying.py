"""A later stage that stays: it waits for events in any order, and reports the outcome to the caller that asked."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from thaw.errors import ErrorInfo
from thaw_runtime.engine.protocol import Consolidated, ConsolidationEnded
from thaw_runtime.pipeline import staying
from thaw_runtime.pipeline.staying import Staying

WAIT_S = 20.0
DONE = Consolidated(0, 0, 0, 0.5, 0.0, build_s=0.02)
LOST = ErrorInfo("WorkerLost", "its fetch has failed")


class Rest:
    """A load that the test ends."""

    def __init__(self) -> None:
        self.error: ErrorInfo | None = None
        self.has_ended = False
        self.n_begun = 0
        self._call: Callable[[], None] | None = None

    def begin(self, when_ended: Callable[[], None]) -> None:
        self.n_begun += 1
        self._call = when_ended
        if self.has_ended:
            when_ended()

    def end(self, error: ErrorInfo | None = None) -> None:
        self.has_ended, self.error = True, error
        if self._call is not None:
            self._call()


class Stage:
    def __init__(self, rest: Rest | None) -> None:
        self.changed, self.stopping = threading.Condition(), False
        self.staying = Staying(self.changed, rest)
        self.told: queue.SimpleQueue[ConsolidationEnded] = queue.SimpleQueue()
        self.waited: queue.SimpleQueue[float | None] = queue.SimpleQueue()

    def ask(self) -> None:
        self.staying.ask(self.told.put)

    def is_left(self) -> None:
        """Stage 0 has left: the engine thread waits."""
        threading.Thread(target=lambda: self.waited.put(self.staying.wait(lambda: self.stopping)), daemon=True).start()

    def stop(self) -> None:
        with self.changed:
            self.stopping = True
            self.changed.notify_all()


@pytest.mark.parametrize("order", list(itertools.permutations(["asked", "loaded", "left"])))
def test_the_engine_is_built_when_all_three_have_happened_in_whatever_order(order: tuple[str, ...]) -> None:
    rest = Rest()
    stage = Stage(rest)
    steps = {"asked": stage.ask, "loaded": rest.end, "left": stage.is_left}
    for what in order:
        assert stage.waited.empty()
        steps[what]()
    waited_s = stage.waited.get(timeout=WAIT_S)
    assert waited_s is not None
    assert waited_s >= 0
    assert stage.told.empty()
    stage.staying.end(DONE)
    assert stage.told.get(timeout=WAIT_S) == DONE
    stage.ask()
    refused: Any = stage.told.get(timeout=WAIT_S)
    assert refused.code == "Conflict"


def test_a_load_that_fails_is_told_at_once_and_the_stage_may_be_asked_again() -> None:
    rest = Rest()
    stage = Stage(rest)
    stage.ask()
    rest.end(LOST)
    assert stage.told.get(timeout=WAIT_S) == LOST
    stage.ask()
    assert (stage.told.get(timeout=WAIT_S), rest.n_begun) == (LOST, 2)


def test_a_load_that_fails_after_stage_0_has_left_ends_the_engine() -> None:
    rest = Rest()
    stage = Stage(rest)
    stage.ask()
    stage.is_left()
    rest.end(LOST)
    assert stage.waited.get(timeout=WAIT_S) is None
    assert stage.told.get(timeout=WAIT_S) == LOST


def test_the_end_of_the_engine_is_told_to_who_has_asked_and_to_nobody_else() -> None:
    stage = Stage(Rest())
    stage.staying.end(LOST)
    stage.ask()
    stage.ask()
    refused: Any = stage.told.get(timeout=WAIT_S)
    assert refused.code == "Conflict"
    stage.staying.end(LOST)
    assert stage.told.get(timeout=WAIT_S) == LOST
    assert stage.told.empty()


def test_a_low_stage_is_refused() -> None:
    stage = Stage(None)
    stage.ask()
    refused: Any = stage.told.get(timeout=WAIT_S)
    assert refused.code == "BadRequest"


def test_a_stage_that_is_stopped_or_that_nobody_asks_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(Rest())
    stage.ask()
    stage.is_left()
    stage.stop()
    assert stage.waited.get(timeout=WAIT_S) is None
    monkeypatch.setattr(staying, "UNASKED_S", 0.01)
    unasked = Stage(Rest())
    unasked.is_left()
    assert unasked.waited.get(timeout=WAIT_S) is None
