"""The places for adapters in an instance: what is used stays, and the one used longest ago makes room."""

from __future__ import annotations

import threading
import time

import pytest

from invoker.containers.adapter_slots import AdapterSlots
from thaw.errors import TimeLimitExceeded


def later() -> float:
    return time.monotonic() + 20


def load(slots: AdapterSlots, uri: str) -> str | None:
    """Use an adapter for a moment; return what made room, or None when it was there."""
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
        slots.pin("b", time.monotonic())
    found: list[str | None] = []
    waiting = threading.Thread(target=lambda: found.append(slots.pin("b", later())[1]))
    waiting.start()
    slots.unpin(held)
    waiting.join()
    assert found == ["a#1"]


def test_two_runs_that_want_an_adapter_load_it_once() -> None:
    slots = AdapterSlots(2)
    held, replaced = slots.pin("a", later())
    assert replaced == ""
    found: list[str | None] = []
    waiting = threading.Thread(target=lambda: found.append(slots.pin("a", later())[1]))
    waiting.start()
    slots.loaded(held, "a#1")
    waiting.join()
    assert found == [None]


def test_what_did_not_make_room_after_all_is_known_again_and_the_first_to_go() -> None:
    slots = AdapterSlots(2)
    for uri in ("a", "b"):
        load(slots, uri)
    held, replaced = slots.pin("c", later())
    assert replaced == "a#1"
    slots.forget(held)
    slots.unpin(held)
    slots.take_over(["a#1", "b#1"])
    assert [load(slots, uri) for uri in ("b", "c", "b")] == [None, "a#1", None]


def test_a_load_that_failed_is_tried_by_the_next_one() -> None:
    slots = AdapterSlots(1)
    held, _ = slots.pin("a", later())
    slots.forget(held)
    slots.unpin(held)
    assert slots.pin("a", later())[1] == ""
