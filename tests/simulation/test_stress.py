"""A small stress run: each request is made when it arrives, and every request ends once."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from bench.simulation import stress


@pytest.fixture(autouse=True)
def garbage_as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_a_small_crowd_is_answered_and_forgotten() -> None:
    found = stress.run(60, n_hosts=20)
    assert (found.n_requests, found.n_starts > 10) == (60, True)
    assert 0.0 <= found.in_time_pct <= 100.0
    assert found.n_events > 3 * 60


def test_a_seed_gives_the_same_crowd() -> None:
    first, second = (stress.run(40, seed=7, n_hosts=10) for _ in range(2))
    assert (first.n_events, first.simulated_s, first.n_starts) == (second.n_events, second.simulated_s, second.n_starts)
