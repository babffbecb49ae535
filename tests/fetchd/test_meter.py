"""The network's rate, learnt from the bytes that were read.  The tests supply all times as numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fetchd import meter
from fetchd.meter import Meter
from tests.conftest import Clock

MB, MIB = 1_000_000, 2**20


def clean() -> Meter:
    made = Meter()
    made.begin(0.0, clean=True)
    return made


def test_a_runs_rate_is_its_mean_which_settles_as_it_goes_on() -> None:
    measured = clean()
    assert not measured.count(10 * MB, 1.0), "a window is two seconds"
    assert measured.bytes_per_s == 0.0
    assert measured.count(10 * MB, 2.0)
    assert measured.bytes_per_s == pytest.approx(10 * MB)
    assert not measured.count(20 * MB, 3.5)
    assert measured.count(20 * MB, 4.0)
    assert measured.bytes_per_s == pytest.approx(15 * MB)
    assert measured.count(0, 6.0)
    assert measured.bytes_per_s == pytest.approx(10 * MB), "the first windows of a run are no measure of their own"


def test_a_window_ends_after_128_mib_too_and_never_before_it_says_anything() -> None:
    measured = clean()
    assert measured.count(128 * MIB, 0.5)
    assert not measured.count(127 * MIB, 0.9)
    assert measured.count(MIB, 1.0)
    assert measured.bytes_per_s == pytest.approx(256 * MIB)
    few = clean()
    assert not few.count(4 * MIB - 1, 2.0)
    assert few.count(1, 3.0)
    assert few.bytes_per_s == pytest.approx(4 * MIB / 3)


def test_a_run_ends_after_ten_seconds_and_the_best_of_the_last_sixteen_counts() -> None:
    measured = clean()
    assert measured.count(200 * MB, 10.0)
    for run in range(1, 16):
        assert measured.count(100 * MB, 10.0 + 10.0 * run)
        assert measured.bytes_per_s == pytest.approx(20 * MB)
    assert measured.count(100 * MB, 170.0)
    assert measured.bytes_per_s == pytest.approx(10 * MB), "the best one is too long ago"


def test_a_run_of_less_than_ten_seconds_goes_on_whenever_it_began() -> None:
    measured = Meter()
    measured.begin(5_000.0, clean=True)
    assert measured.count(20 * MB, 5_002.0)
    assert measured.count(60 * MB, 5_004.0)
    assert measured.bytes_per_s == pytest.approx(20 * MB), "one run of four seconds, and not one of two after another"


def test_a_run_that_begins_among_bytes_of_another_lets_them_pass() -> None:
    measured = Meter()
    measured.begin(0.0, clean=False)
    assert not measured.count(500 * MB, 2.0)
    assert not measured.count(10 * MB, 3.0)
    assert measured.count(10 * MB, 4.0)
    assert measured.bytes_per_s == pytest.approx(10 * MB)


@pytest.mark.parametrize(("n_bytes", "rate"), [(16 * MIB, 16 * MIB), (16 * MIB - 1, 0.0)])
def test_a_run_that_ends_early_counts_if_it_was_long_enough(
    monkeypatch: pytest.MonkeyPatch, n_bytes: int, rate: float
) -> None:
    clock = Clock(50.0)
    monkeypatch.setattr(meter, "time", SimpleNamespace(monotonic=clock))
    measured = Meter()
    measured.count(n_bytes, 50.5)
    clock.now_s = 51.0
    measured.end()
    assert measured.bytes_per_s == pytest.approx(rate)
    assert not measured.count(100 * MB, 53.0), "what comes next begins among bytes of the run before"
    assert not measured.count(20 * MB, 54.9)
    assert measured.count(20 * MB, 55.0)


def test_reads_that_are_held_to_a_rate_try_more_and_believe_what_came_when_the_link_did_not_follow() -> None:
    measured = clean()
    measured.count(20 * MB, 2.0)
    assert not measured.count_held(20 * MB, 3.9, 9.5 * MB)
    assert measured.count_held(0, 4.0, 9.5 * MB), "it took all that was allowed"
    assert measured.bytes_per_s == pytest.approx(12.5 * MB)
    assert measured.count_held(19_200_000, 6.0, 11.9 * MB)
    assert measured.bytes_per_s == pytest.approx(9.6 * MB), "the link did not follow"
    assert not measured.count_held(20 * MB, 8.0, 9.5 * MB), "it is tried again after a minute"
    assert not measured.count_held(545 * MB, 65.0, 9.5 * MB)
    assert measured.count_held(20 * MB, 67.0, 9.5 * MB)
    assert measured.bytes_per_s == pytest.approx(12 * MB)
    assert measured.count_held(4 * MB, 69.0, 11.9 * MB)
    assert measured.bytes_per_s == pytest.approx(9.6 * MB), (
        "less than it has carried before is a slow store, no slow link"
    )


def test_who_is_slow_without_a_try_says_nothing_of_the_link() -> None:
    measured = clean()
    measured.count(20 * MB, 2.0)
    assert not measured.count_held(2 * MB, 4.0, 9.5 * MB)
    assert measured.bytes_per_s == pytest.approx(10 * MB)
