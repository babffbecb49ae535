"""Worked example 4 and the window's edges."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.scheduler.placement.window import Lacking, Window, groups, keep, new_workers


def test_worked_example_4_figure_7_thirty_requests_are_eight_groups() -> None:
    assert new_workers(30, 0, 0, 1) == 30
    assert groups(30) == [4, 4, 4, 4, 4, 4, 4, 2]


def test_worked_example_4_starting_slots_count_as_supply() -> None:
    assert new_workers(21, 19, 8, 8) == 4
    assert groups(4) == [4]


def test_worked_example_4_consolidation_keeps_two_of_four() -> None:
    assert keep(9, 0, 3, 0, 8, 2) == 2


def test_the_window_is_open_at_its_old_end_and_closed_at_now() -> None:
    window = Window(1.0)
    for at_s in (0.0, 0.5, 1.0):
        window.add(at_s)
    assert window.count(1.0) == 2
    assert window.count(1.5) == 1
    assert window.count(2.0) == 0


def test_an_arrival_that_is_older_than_the_last_leaves_the_window_first() -> None:
    window = Window(1.0)
    for at_s in (2.0, 1.5, 1.75, 2.0):
        window.add(at_s)
    assert [window.count(at_s) for at_s in (2.0, 2.5, 2.75, 3.0)] == [4, 3, 2, 0]


@given(*(st.integers(0, 99) for _ in range(4)), st.integers(1, 16), st.integers(1, 8))
def test_who_outlives_consolidation_is_just_enough(
    inflight: int, waiting: int, arrivals: int, free: int, slots: int, n_full: int
) -> None:
    kept = keep(inflight, waiting, arrivals, free, slots, n_full)
    assert 1 <= kept <= n_full
    assert kept == n_full or kept * slots + free >= inflight + waiting + arrivals
    assert kept == 1 or (kept - 1) * slots + free < inflight + waiting + arrivals


@given(st.integers(0, 200), st.integers(1, 8))
def test_groups_cover_exactly_the_workers(n: int, largest: int) -> None:
    made = groups(n, largest)
    assert sum(made) == n
    assert all(g == largest for g in made[:-1])


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.integers(1, 16))
def test_new_workers_are_just_enough(waiting: int, arrivals: int, supply: int, slots: int) -> None:
    new = new_workers(waiting, arrivals, supply, slots)
    assert new * slots + supply >= waiting + arrivals
    assert new == 0 or (new - 1) * slots + supply < waiting + arrivals


def test_the_window_knows_its_newest_arrival_whatever_came_behind_it() -> None:
    window = Window(1.0)
    assert window.newest_s == -math.inf
    for at_s, newest_s in ((2.0, 2.0), (1.5, 2.0), (3.0, 3.0), (2.5, 3.0)):
        window.add(at_s)
        assert window.newest_s == newest_s


@pytest.mark.parametrize(
    ("workers", "instances", "room", "sizes"),
    [
        (0, 0, 9, []),
        (1, 0, 9, [1]),
        (8, 0, 9, [4, 4]),
        (5, 0, 9, [4, 1]),
        (5, 4, 9, [4, 1, 1, 1]),  # the two groups that demand asks for count for the minimum
        (0, 3, 9, [1, 1, 1]),  # a minimum asks for instances, and a group counts as one
        (-2, 1, 9, [1]),
        (6, 4, 8, [4, 2, 1, 1]),
        (30, 0, 2, [4, 4]),
        (8, 4, 3, [4, 4, 1]),
        (8, 4, 1, [4]),
        (8, 4, 0, []),
        (8, 4, -1, []),
        (-1, -1, 5, []),
    ],
)
def test_what_an_action_lacks_is_started_in_groups_for_demand_and_one_by_one_for_its_minimum(
    workers: int, instances: int, room: int, sizes: list[int]
) -> None:
    lacking = Lacking(workers, instances, room)
    assert lacking.sizes(4) == sizes
    assert lacking.is_nothing == (not sizes)
    if workers > 0 and room > workers:
        assert lacking.sizes(1)[:workers] == [1] * workers
