"""The ledger is an estimate, and the hosts' reports on their fetches correct it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.scheduler.placement.link_ledger import DISCIPLINES, Discipline, LinkLedger
from gateway.scheduler.placement.plans import fetch_key, later_key
from gateway.scheduler.view.hosts import HostView, new_host
from tests.scheduler.facts import report as plain_report
from thaw.host import FetchReport, HostReport

MB = 10**6
LINK = 100.0 * MB


def report(seen_s: float, *fetches: FetchReport, boot: str = "boot", offset_s: float = 1_000.0) -> HostReport:
    """A report of a host whose clock is ``offset_s`` ahead."""
    seen_ms = int((seen_s + offset_s) * 1000)
    return plain_report("h", boot_id=boot, network_bytes_per_s=LINK, seen_wall_ms=seen_ms, fetches=fetches)


def host(discipline: Discipline = "edf", key: str = fetch_key("g", 0), n: int = 1000 * MB) -> HostView:
    """A host with a fetch of ``n`` bytes."""
    view = new_host(report(0.0), discipline, 0.0)
    view.take_report(report(0.0), {}, 0.0)
    view.ledger.add(key, n, 60.0, 0.0)
    return view


def fetch(group: str, left: float, rate: float = LINK, n: int = 1000 * MB, later: int = 0) -> FetchReport:
    return FetchReport(group, n, n - int(left), rate, 0, int(left), later)


@pytest.mark.parametrize("discipline", DISCIPLINES)
@settings(max_examples=40, deadline=None)
@given(speed=st.floats(0.4, 1.0), lags=st.lists(st.floats(0.0, 1.5), min_size=3, max_size=8))
def test_on_a_link_slower_than_it_says_the_ledger_stays_within_a_twentieth_of_what_is_left(
    discipline: Discipline, speed: float, lags: list[float]
) -> None:
    """Reports come once a second and up to 1.5 s late.  The first one is not late."""
    view, n = host(discipline), 1000 * MB
    for i, lag in enumerate([0.0, *lags], 1):
        seen, rate = i - 0.5, LINK * speed
        view.take_report(report(seen, fetch("g", n - rate * seen, rate)), {}, seen + lag)
        left = n - rate * (seen + lag)
        assert view.ledger.pending(fetch_key("g", 0)) == pytest.approx(max(0.0, left), abs=0.05 * n)


def test_a_fetch_that_ended_early_gives_its_link_back_at_once() -> None:
    view = host()
    view.take_report(report(1.0, fetch("g", 500 * MB)), {}, 1.0)
    assert view.ledger.busy_until_s == pytest.approx(6.0)
    view.take_report(report(2.0), {}, 2.0)
    assert view.ledger.fetches() == {}
    assert view.ledger.bandwidth(100 * MB, 4.0, 2.0) == LINK


def test_a_fetch_that_no_report_has_told_of_yet_stays_booked() -> None:
    view = host()
    view.take_report(report(1.0), {}, 1.0)
    view.ledger.advance(1.0)
    assert view.ledger.pending(fetch_key("g", 0)) == pytest.approx(900 * MB)


def test_one_that_should_have_ended_goes_on_under_its_old_deadline_and_nothing_new_is_promised_before() -> None:
    ledger = LinkLedger(LINK)
    ledger.add("slow", 100 * MB, 5.0, 0.0)
    ledger.advance(2.0)
    assert ledger.fetches() == {}
    ledger.correct("slow", 400 * MB, 2.0)
    assert ledger.fetches()["slow"].deadline == 5.0
    assert ledger.bandwidth(10 * MB, 60.0, 2.0) == 0.0  # the slow fetch will be late already
    assert ledger.in_line_after_s == math.inf
    ledger.correct("slow", 0.0, 3.0)
    assert ledger.bandwidth(10 * MB, 60.0, 3.0) == LINK


def test_the_background_part_is_corrected_under_its_own_key() -> None:
    view = host(key=later_key("g", 0), n=900 * MB)
    view.take_report(report(1.0, fetch("g", 0, later=400 * MB)), {}, 1.0)
    assert view.ledger.pending(later_key("g", 0)) == pytest.approx(400 * MB)


def test_a_report_that_was_read_twice_corrects_once() -> None:
    view = host()
    said = report(1.0, fetch("g", 900 * MB))
    view.take_report(said, {}, 1.0)
    view.take_report(said, {}, 3.0)
    view.ledger.advance(3.0)
    assert view.ledger.pending(fetch_key("g", 0)) == pytest.approx(700 * MB)


@pytest.mark.parametrize(
    ("told", "left"),
    [
        (FetchReport("g", 1000 * MB, 0, LINK, 0, 5000 * MB), 1000 * MB),
        (FetchReport("g", 1000 * MB, 0, LINK, 0, -5), 0),
        (FetchReport("g", 1000 * MB, 500 * MB, math.nan, 0, 500 * MB), 500 * MB),
        (FetchReport("g", 1000 * MB, 500 * MB, -3.0, 0, 500 * MB), 500 * MB),
        (FetchReport("g", -7, 0, LINK, 0, 500 * MB), 0),
    ],
)
def test_a_fetch_that_reports_nonsense_is_clamped_and_flagged(told: FetchReport, left: float) -> None:
    view = host()
    odd = view.take_report(report(0.5, told), {}, 0.5)
    assert view.ledger.pending(fetch_key("g", 0)) == pytest.approx(left)
    assert len(odd) == 1
    assert "fetch of g/0" in odd[0]


def test_a_host_that_was_rebooted_or_whose_clock_jumped_is_believed_anew() -> None:
    view = host()
    view.take_report(report(1.0, fetch("g", 900 * MB), offset_s=-50_000.0), {}, 1.0)
    assert view.ledger.pending(fetch_key("g", 0)) == pytest.approx(900 * MB)
    view.take_report(report(2.0, fetch("g", 800 * MB), boot="next", offset_s=70_000.0), {}, 2.0)
    assert view.ledger.pending(fetch_key("g", 0)) == pytest.approx(800 * MB)
