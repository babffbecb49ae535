"""The places for adapters in an instance: an adapter in use stays, and the least recently used one makes room."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from invoker.containers.adapter_slots import AdapterSlots, Held, Wait
from thaw.errors import InstanceGone, TimeLimitExceeded


def later() -> Wait:
    return Wait(time.monotonic() + 20)


def load(slots: AdapterSlots, uri: str) -> str | None:
    """Use an adapter for a moment. Return the adapter that made room for it, or None when it was already loaded."""
    held, replaced = slots.pin(uri, later())
    if replaced is not None:
        slots.loaded(held, f"{uri}#1")
    slots.unpin(held)
    return replaced


def test_the_adapter_used_longest_ago_makes_room() -> None:
    slots = AdapterSlots(2)
    assert [load(slots, uri) for uri in ("a", "b", "a", "c", "a", "b")] == ["", "", None, "b#1", None, "c#1"]


def test_what_a_container_has_already_is_not_loaded() -> None:
    slots = AdapterSlots(2, ["a#7"])
    held, replaced = slots.pin("a", later())
    assert (held.name, replaced) == ("a#7", None)


def test_an_adapter_in_use_stays_and_the_next_one_waits_for_a_place() -> None:
    slots = AdapterSlots(1)
    held, _ = slots.pin("a", later())
    slots.loaded(held, "a#1")
    with pytest.raises(TimeLimitExceeded):
        slots.pin("b", Wait(time.monotonic()))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(slots.pin, "b", later())
        slots.unpin(held)
        assert waiting.result()[1] == "a#1"


def test_two_runs_that_want_an_adapter_load_it_once() -> None:
    slots = AdapterSlots(2)
    held, replaced = slots.pin("a", later())
    assert replaced == ""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(slots.pin, "a", later())
        slots.loaded(held, "a#1")
        assert waiting.result()[1] is None


def test_what_did_not_make_room_after_all_is_known_again_and_the_first_to_go() -> None:
    slots = AdapterSlots(2)
    for uri in ("a", "b"):
        load(slots, uri)
    held, replaced = slots.pin("c", later())
    assert replaced == "a#1"
    slots.forget(held)
    slots.unpin(held)
    slots.take_over(["a#1", "b#1"], slots.names())
    assert [load(slots, uri) for uri in ("b", "c", "b")] == [None, "a#1", None]


def test_a_load_that_failed_is_tried_by_the_next_one() -> None:
    slots = AdapterSlots(1)
    held, _ = slots.pin("a", later())
    slots.forget(held)
    slots.unpin(held)
    assert slots.pin("a", later())[1] == ""


def test_what_the_container_has_lost_is_absent_unless_a_run_uses_it_or_it_came_meanwhile() -> None:
    slots = AdapterSlots(3)
    for uri in ("lost", "used"):
        load(slots, uri)
    slots.pin("used", later())
    known = slots.names()
    load(slots, "new")
    slots.take_over([], known)
    assert slots.names() == ["used#1", "new#1"]


def test_an_older_version_makes_room_first() -> None:
    """The load of x#1 was given up here and ended there, and then x was pushed again."""
    slots = AdapterSlots(3, ["y#1"])
    held, _ = slots.pin("x", later())
    slots.forget(held)
    slots.take_over(["y#1", "x#1"], slots.names())
    held, replaced = slots.pin("y", later())
    slots.forget(slots.pin("x", later())[0])  # the run that wanted x#1 has found that it is not there
    held, replaced = slots.pin("x", later())
    assert replaced == ""
    slots.loaded(held, "x#2")
    slots.take_over(["y#1", "x#1", "x#2"], slots.names())
    assert slots.pin("z", later())[1] == "x#1"


def test_after_a_restart_the_version_loaded_last_counts() -> None:
    slots = AdapterSlots(3, ["x#1", "y#1", "x#2"])
    held, replaced = slots.pin("x", later())
    assert (held.name, replaced) == ("x#2", None)
    assert load(slots, "z") == "x#1"


class NoticedWait(Wait):
    """A wait that says when it has begun: whoever takes the lock then finds a sleeper."""

    def __init__(self) -> None:
        super().__init__(time.monotonic() + 20)
        self.begun = threading.Event()

    def left_s(self) -> float:
        self.begun.set()
        return super().left_s()


def full() -> tuple[AdapterSlots, Held]:
    """A place, which an adapter in use has."""
    slots = AdapterSlots(1)
    held, _ = slots.pin("a", later())
    slots.loaded(held, "a#1")
    return slots, held


def loading() -> tuple[AdapterSlots, Held]:
    slots = AdapterSlots(1)
    return slots, slots.pin("a", later())[0]


def slept(slots: AdapterSlots, wait_for: str, event: Callable[[Wait], object]) -> Any:
    """What a caller that sleeps gets after ``event``, within a moment: nothing but the event wakes it."""
    wait = NoticedWait()
    with ThreadPoolExecutor(1) as pool:
        sleeper = pool.submit(slots.pin, wait_for, wait)
        assert wait.begun.wait(10)
        event(wait)
        return sleeper.result(5)


def test_every_event_for_which_somebody_waits_wakes_the_sleeper() -> None:
    slots, held = loading()
    assert slept(slots, "a", lambda _: slots.loaded(held, "a#1")) == (held, None)
    slots, held = loading()
    assert slept(slots, "a", lambda _: slots.failed(held, InstanceGone("no bytes")))[1] == ""
    slots, held = full()
    assert slept(slots, "b", lambda _: slots.unpin(held))[1] == "a#1"
    slots, held = full()
    assert slept(slots, "b", lambda _: slots.forget(held))[1] == ""


def test_a_container_that_was_asked_again_wakes_whoever_waits_for_what_it_has() -> None:
    slots, held = full()
    slots.unpin(held)
    slots.lose(held)
    assert slept(slots, "a", lambda _: slots.take_over(["a#2"], slots.names()))[0].name == "a#2"


def test_a_wait_for_a_place_ends_when_the_client_hangs_up_and_when_the_container_ends() -> None:
    slots, _ = full()
    with pytest.raises(ConnectionAbortedError):
        slept(slots, "b", slots.hang_up)
    with pytest.raises(InstanceGone):
        slept(slots, "b", lambda _: slots.close())


def test_who_waits_for_a_load_learns_why_it_failed() -> None:
    slots, held = loading()
    wait = NoticedWait()
    with ThreadPoolExecutor(1) as pool:
        sleeper = pool.submit(slots.wait_loaded, held, wait)
        assert wait.begun.wait(10)
        slots.failed(held, InstanceGone("no bytes"))
        with pytest.raises(InstanceGone, match="no bytes"):
            sleeper.result(5)


def test_a_loaded_adapter_is_in_its_place_once() -> None:
    """The container had it already, as an older load of the same version."""
    slots = AdapterSlots(3, ["x#1", "x#2"])
    held, replaced = slots.pin("y", later())
    slots.loaded(held, "x#1")
    assert (replaced, sorted(slots.names())) == ("", ["x#1", "x#2"])


def test_the_loss_of_an_adapter_that_has_left_already_is_no_news() -> None:
    slots, held = full()
    slots.forget(held)
    assert not slots.lose(held)


def test_an_adapter_that_loads_makes_no_room() -> None:
    slots, held = loading()
    slots.unpin(held)
    with pytest.raises(TimeLimitExceeded):
        slots.pin("b", Wait(time.monotonic()))
