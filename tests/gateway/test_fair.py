"""Turns between owners, and the threads that one of them may have."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fair import FairQueue, VirtualTime, may_have_more

OWNERS = "abcde"
steps = st.lists(st.none() | st.sampled_from(OWNERS), max_size=80)
"""The steps of a history: None takes an item, and the name of an owner puts one."""


def played(steps: list[str | None], weight: dict[str, float]) -> FairQueue[str, tuple[str, int]]:
    queue = FairQueue[str, tuple[str, int]](lambda owner: weight.get(owner, 1.0))
    for n, owner in enumerate(steps):
        if owner is None:
            queue.take()
        else:
            queue.put(owner, (owner, n))
    return queue


@given(steps=steps, weights=st.lists(st.sampled_from([0.5, 1.0, 3.0, 100.0]), min_size=5, max_size=5))
def test_who_has_one_item_waits_for_at_most_one_of_each_other(steps: list[str | None], weights: list[float]) -> None:
    """This holds for any items that the others have or had before."""
    queue = played(steps, dict(zip(OWNERS, weights, strict=True)))
    others = sum(queue.n_of(owner) > 0 for owner in OWNERS)
    queue.put("honest", ("honest", 0))
    for n_before in range(others + 1):
        if queue.take() == ("honest", 0):
            break
        for owner in OWNERS[:2]:  # they go on putting
            queue.put(owner, (owner, 10_000 + n_before))
    else:
        raise AssertionError("it waited for more than one round")


@given(steps=steps)
def test_nothing_is_lost_and_each_owners_items_keep_their_order(steps: list[str | None]) -> None:
    queue = FairQueue[str, tuple[str, int]]()
    model: dict[str, deque[int]] = {owner: deque() for owner in OWNERS}
    for n, owner in enumerate([*steps, *([None] * 81)]):
        if owner is not None:
            queue.put(owner, (owner, n))
            model[owner].append(n)
        elif (item := queue.take()) is not None:
            assert model[item[0]].popleft() == item[1]
        else:
            assert not any(model.values())
        assert len(queue) == sum(map(len, model.values()))
        assert all(queue.n_of(owner) == len(items) for owner, items in model.items())


def test_owners_that_always_wait_share_by_their_weights() -> None:
    queue = FairQueue[str, tuple[str, int]](lambda owner: {"a": 1.0, "b": 3.0, "c": 0.5}[owner])
    for owner in "abc":
        for n in range(900):
            queue.put(owner, (owner, n))
    taken = [item[0] for _ in range(900) if (item := queue.take()) is not None]
    assert [taken.count(owner) for owner in "abc"] == [200, 600, 100]


def test_an_owner_that_may_have_no_turn_holds_up_nobody() -> None:
    queue = FairQueue[str, str]()
    for item in ("a1", "b1", "a2"):
        queue.put(item[0], item)
    assert queue.take(lambda owner: owner == "b") == "b1"
    assert queue.take(lambda owner: owner == "b") is None
    assert (queue.take(), queue.take(), queue.take()) == ("a1", "a2", None)


@given(steps=steps, removed=st.sampled_from(OWNERS))
def test_what_is_taken_out_leaves_the_turns_of_the_others(steps: list[str | None], removed: str) -> None:
    queue, without = played(steps, {}), played(steps, {})
    while queue.n_of(removed):
        item = next(iter(queue._items[removed]))
        assert queue.remove(removed, item)
        assert not queue.remove(removed, item)
    order, left = ([q.take() for _ in range(80)] for q in (without, queue))
    assert [i for i in left if i is not None] == [i for i in order if i is not None and i[0] != removed]
    assert len(queue) == 0


def test_who_had_more_than_others_has_not_forgotten_it_when_it_comes_back_at_once() -> None:
    queue = FairQueue[str, str]()
    queue.put("a", "a")
    queue.put("b", "b1")
    queue.put("b", "b2")
    order = []
    for _ in range(4):  # a never has more than one item, and puts it again after each of its turns
        order.append(item := queue.take())
        if item == "a":
            queue.put("a", "a")
    assert order == ["a", "b1", "a", "b2"]


def test_the_time_begins_anew_when_nobody_waits() -> None:
    time = VirtualTime[str]()
    time.join("a")
    for _ in range(5):
        time.had_turn("a")
    assert time.begins("a") == 5.0
    time.leave("a")
    time.join("a")
    assert time.begins("a") == 0.0


@pytest.mark.parametrize(
    ("n_places", "n_owners", "each"), [(64, 1, 56), (64, 2, 30), (64, 3, 20), (8, 1, 7), (2, 1, 2)]
)
def test_a_crowd_of_owners_leaves_a_place_to_the_next_one(n_places: int, n_owners: int, each: int) -> None:
    has = [0] * n_owners
    while any(may := [may_have_more(n, n_places - sum(has)) for n in has]):
        has[min((n, i) for i, n in enumerate(has) if may[i])[1]] += 1
    assert sum(has) in range(each * n_owners, (each + 1) * n_owners)
    assert may_have_more(0, n_places - sum(has)) == (sum(has) < n_places)
