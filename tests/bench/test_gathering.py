"""The bursts that bench/burst.py replays to the policy, with requests that come one by one or all at once."""

from __future__ import annotations

import pytest

from bench._gathering import WAYS, Way, gaps_ms, meet, table
from gateway.scheduler.policy import starts

ONE_BY_ONE = [0.004 * i for i in range(30)]
AT_ONCE = [7.0] * 30
EACH, GATHER_50 = WAYS[0], WAYS[3]


def test_requests_that_come_one_by_one_get_single_workers_and_gathered_ones_get_groups() -> None:
    each, gathered = meet(ONE_BY_ONE, EACH), meet(ONE_BY_ONE, GATHER_50)
    assert each.n_groups > gathered.n_groups
    assert gathered.ttft_s < each.ttft_s
    assert each.n_workers >= 4
    assert gathered.n_workers >= 4


def test_a_burst_that_is_read_at_once_needs_no_gathering() -> None:
    assert meet(AT_ONCE, EACH).n_groups == meet(AT_ONCE, GATHER_50).n_groups == 2


def test_a_pause_before_the_first_start_meets_the_whole_burst_with_it() -> None:
    late = [0.001 * i for i in range(30)]
    assert meet(late, Way("pause", pause_s=0.002, most_s=0.100)).n_groups == 2
    assert meet(late, Way("pause", pause_s=0.002, most_s=0.005)).n_groups > 2


def test_the_rows_are_of_every_way_and_the_policy_keeps_its_own_afterwards() -> None:
    own = starts.GATHER_S
    rows = table([AT_ONCE, ONE_BY_ONE])
    assert list(rows) == [way.name for way in WAYS]
    assert rows["pause_5"]["lone_ms"] == 5.0
    assert starts.GATHER_S == own == GATHER_50.gather_s


def test_gaps_are_of_neighbours_within_a_burst() -> None:
    found = gaps_ms([[1.0, 1.0, 1.010], [5.0, 5.020, 5.021]])
    assert found["span_ms"] == pytest.approx(15.5)
    assert found["longest_gap_ms"] == pytest.approx(15.0)
