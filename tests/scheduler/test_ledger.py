"""Worked example 3, and the promises of both disciplines, compared with an independent simulation of the link."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.scheduler.placement.link_ledger import Discipline, LinkLedger

G = 1e9


def test_worked_example_3_admission_with_equal_shares() -> None:
    ledger = LinkLedger(2 * G, "equal")
    assert ledger.add("w1", 6 * G, 7.5, 0.0)
    assert ledger.node_bandwidth(1.0) == pytest.approx(1 * G)
    assert ledger.pending("w1") == pytest.approx(4 * G)
    assert ledger.add("w2", 3 * G, 7.0, 1.0)
    assert ledger.node_bandwidth(2.0) == pytest.approx(2 / 3 * G)
    assert (ledger.pending("w1"), ledger.pending("w2")) == pytest.approx((3 * G, 2 * G))
    assert ledger.add("w3", 4 * G, 20.0, 2.0)
    assert ledger.node_bandwidth(3.0) == 0.0
    assert [ledger.pending(w) for w in ("w1", "w2", "w3")] == pytest.approx([2.3333 * G, 1.3333 * G, 3.3333 * G], 1e-4)
    ledger.advance(5.0 + 1e-6)
    assert ledger.pending("w2") == 0.0
    assert (ledger.pending("w1"), ledger.pending("w3")) == pytest.approx((1 * G, 2 * G), 1e-5)
    ledger.advance(6.0 + 1e-6)
    assert ledger.pending("w1") == 0.0
    ledger.advance(6.2)
    assert ledger.pending("w3") == pytest.approx(0.6 * G, 1e-4)
    ledger.advance(6.5 + 1e-6)
    assert ledger.fetches() == {}


def test_a_fetch_that_cannot_meet_its_own_deadline_is_not_booked() -> None:
    for discipline in ("equal", "edf"):
        ledger = LinkLedger(G, discipline)
        assert not ledger.add("late", 5 * G, 4.0, 0.0)
        assert ledger.fetches() == {}


def test_a_newcomer_between_two_promises_is_refused_when_its_own_deadline_is_not_kept() -> None:
    """Both earlier promises are kept with it and without it, but the first one leaves it too little time."""
    ledger = LinkLedger(1e6)
    assert ledger.add("near", 5e6, 5.0, 0.0)
    assert ledger.add("far", 1e6, 100.0, 0.0)
    assert ledger.bandwidth(3e6, 6.0, 0.0) == 0.0
    assert not ledger.add("between", 3e6, 6.0, 0.0)
    assert set(ledger.fetches()) == {"near", "far"}
    assert ledger.add("small", 1e6, 6.0, 0.0), "so much fits exactly"


def test_a_fetch_that_is_said_to_have_ended_goes_on_under_its_old_deadline_when_it_did_not() -> None:
    for deadline in (20.0, math.inf):
        ledger = LinkLedger(G)
        assert ledger.add("a", 5 * G, deadline, 0.0)
        ledger.correct("a", 0.0, 1.0)
        assert ledger.fetches() == {}
        assert (ledger.promised_until_s, ledger.busy_until_s) == (1.0, 1.0)
        ledger.correct("a", 2 * G, 2.0)
        assert {k: (f.pending, f.deadline) for k, f in ledger.fetches().items()} == {"a": (2 * G, deadline)}
        ledger.remove("a", 2.0)
        ledger.correct("a", 2 * G, 3.0)
        ledger.correct("stranger", G, 3.0)
        assert ledger.fetches() == {}, "one that was removed, or that was never booked, is none of ours"


def test_a_fetch_is_booked_once_and_one_that_is_not_known_can_be_removed() -> None:
    ledger = LinkLedger(G)
    for n_bytes in (3 * G, 30 * G):  # the values of a repeated booking are ignored
        assert ledger.add("a", n_bytes, 10.0, 0.0)
    assert ledger.pending("a") == 3 * G
    for key in ("nobody", "a", "a"):
        ledger.remove(key, 0.0)
    assert ledger.fetches() == {}


def test_when_the_promised_fetches_and_all_will_have_ended() -> None:
    for discipline in ("equal", "edf"):
        ledger = LinkLedger(2 * G, discipline, 10.0)
        assert (ledger.promised_until_s, ledger.busy_until_s) == (10.0, 10.0)
        ledger.add("promised", 4 * G, 30.0, 10.0)
        ledger.add("background", 6 * G, math.inf, 10.0)
        assert (ledger.promised_until_s, ledger.busy_until_s) == (12.0, 15.0)
        ledger.set_bandwidth(1 * G, 11.0)
        assert (ledger.promised_until_s, ledger.busy_until_s) == pytest.approx((13.0, 19.0))
        ledger.remove("background", 11.0)
        assert ledger.busy_until_s == pytest.approx(13.0)


def test_background_never_blocks_a_promise_and_gets_what_is_left() -> None:
    for discipline in ("equal", "edf"):
        ledger = LinkLedger(G, discipline)
        assert ledger.add("background", 10 * G, math.inf, 0.0)
        assert ledger.add("promised", 4 * G, 4.0, 0.0)
        ledger.advance(4.0)
        assert (ledger.pending("promised"), ledger.pending("background")) == pytest.approx((0.0, 10 * G))
        ledger.advance(5.0)
        assert ledger.pending("background") == pytest.approx(9 * G)


def test_edf_admits_what_equal_shares_cannot() -> None:
    equal, edf = LinkLedger(G, "equal"), LinkLedger(G, "edf")
    for ledger in (equal, edf):
        assert ledger.add("near", 3 * G, 4.0, 0.0)
    assert not equal.add("far", 3 * G, 6.5, 0.0)
    assert edf.add("far", 3 * G, 6.5, 0.0)
    assert edf.bandwidth(0.5 * G, 7.5, 0.0) == pytest.approx(0.5 * G * G / (6.5 * G))


def test_a_clock_that_jumps_back_changes_nothing() -> None:
    ledger = LinkLedger(G)
    ledger.add("a", 5 * G, 10.0, 0.0)
    ledger.advance(2.0)
    ledger.advance(1.0)
    assert ledger.pending("a") == pytest.approx(3 * G)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_link_without_a_positive_bandwidth_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="positive bandwidth"):
        LinkLedger(bad)


Arrivals = list[tuple[float, float, float]]
arrivals = st.lists(
    st.tuples(st.floats(0, 3), st.floats(0.01, 8), st.floats(0.05, 12)), min_size=1, max_size=12
)  # the pause before the fetch, its bytes, and its deadline, counted from its arrival


def finish_times(discipline: Discipline, admitted: Arrivals, link: float) -> list[float]:
    """An exact fluid link, independent of the ledger: from event to event, serve by rank or in equal shares."""
    left = [n for _, n, _ in admitted]
    done = [math.inf] * len(admitted)
    now = 0.0
    while any(x > 0 for x in left):
        active = [i for i, (at, _, _) in enumerate(admitted) if at <= now and left[i] > 0]
        coming = min((at for at, _, _ in admitted if at > now), default=math.inf)
        if not active:
            now = coming
            continue
        if discipline == "edf":
            active = [min(active, key=lambda i: admitted[i][2])]
        rate = link / len(active)
        step = min(coming - now, min(left[i] for i in active) / rate)
        now += step
        for i in active:
            left[i] -= step * rate
            if left[i] < 1e-9:
                left[i], done[i] = 0.0, now
    return done


@pytest.mark.parametrize("discipline", ["equal", "edf"])
@given(wanted=arrivals, link=st.floats(0.5, 4))
def test_no_admitted_deadline_is_broken_on_a_fluid_link_and_nothing_pending_is_negative(
    discipline: Discipline, wanted: Arrivals, link: float
) -> None:
    scale = 1e6  # the ledger's unit is the byte, and it ignores thousandths of it
    ledger, now, admitted = LinkLedger(link * scale, discipline), 0.0, []
    for i, (pause, n_bytes, within) in enumerate(wanted):
        now += pause
        if ledger.add(str(i), n_bytes * scale, now + within, now):
            admitted.append((now, n_bytes, now + within))
        assert all(f.pending >= 0 for f in ledger.fetches().values())
    for (_, _, deadline), done in zip(admitted, finish_times(discipline, admitted, link), strict=True):
        assert done <= deadline + 1e-5


@given(wanted=arrivals, link=st.floats(0.5, 4))
def test_whatever_equal_admits_edf_admits_and_the_two_move_the_same_bytes(wanted: Arrivals, link: float) -> None:
    equal, edf = LinkLedger(link * 1e6, "equal"), LinkLedger(link * 1e6, "edf")
    now = 0.0
    for i, (pause, n_bytes, within) in enumerate(wanted):
        now += pause
        if equal.add(str(i), n_bytes * 1e6, now + within, now):
            assert edf.add(str(i), n_bytes * 1e6, now + within, now)
        edf.advance(now)
        totals = [sum(f.pending for f in led.fetches().values()) for led in (equal, edf)]
        assert totals[0] == pytest.approx(totals[1], abs=1.0)
