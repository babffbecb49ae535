"""The counts of invocations per namespace, with a clock that the test moves."""

from __future__ import annotations

import pytest

from gateway.serving.routing.throttle import Place, Throttle
from tests.conftest import Clock
from thaw.errors import Throttled
from thaw.ids import Namespace

OURS, THEIRS = Namespace("ours"), Namespace("theirs")


def test_invocations_in_flight_are_counted_by_namespace_up_to_the_limit() -> None:
    throttle = Throttle(100, 2, Clock())
    throttle.enter(OURS)
    throttle.enter(OURS)
    throttle.enter(THEIRS)
    with pytest.raises(Throttled, match=r"Too many concurrent requests in flight \(count: 3, allowed: 2\)"):
        throttle.enter(OURS)
    throttle.leave(OURS)
    for _ in range(3):  # one that fails gives its slot back
        with pytest.raises(ZeroDivisionError), throttle.counted(OURS):
            raise ZeroDivisionError
    throttle.enter(OURS)


def fill(throttle: Throttle, namespace: Namespace) -> int:
    for n in range(10_000):
        try:
            throttle.enter(namespace)
        except Throttled:
            return n
    raise AssertionError("no limit")


def test_namespaces_that_take_all_they_may_leave_places_to_the_next_one() -> None:
    throttle = Throttle(10_000, 2_000, Clock(), places=1_200)
    crowd = [Namespace(f"n{n}") for n in range(3)]
    assert [fill(throttle, namespace) for namespace in crowd] == [1_050, 132, 16]
    assert fill(throttle, THEIRS) == 2
    throttle.leave(crowd[0])
    with pytest.raises(Throttled):
        throttle.enter(crowd[0])  # it has most places, so others get the one that it gives back
    throttle.enter(THEIRS)


def test_a_place_that_was_given_back_is_free_again() -> None:
    throttle = Throttle(10_000, 100, Clock(), places=8)
    for _ in range(20):
        throttle.enter(OURS)
        throttle.leave(OURS)
    for _ in range(7):
        throttle.enter(OURS)
    with pytest.raises(
        Throttled, match=r"count: 8, allowed now: 7\): 1 of this gateway's threads.* THAW_GATEWAY_THREADS"
    ):
        throttle.enter(OURS)


def test_a_minutes_invocations_are_counted_up_to_the_limit_and_again_from_the_next_minute() -> None:
    clock = Clock(6_000.0 + 45.0)
    throttle = Throttle(2, 100, clock)
    throttle.enter(OURS)
    throttle.enter(OURS)
    with pytest.raises(Throttled, match=r"in the last minute \(count: 3, allowed: 2\)") as refused:
        throttle.enter(OURS)
    assert refused.value.retry_after_s == pytest.approx(15.0)
    throttle.enter(THEIRS)
    clock.now_s += 15.0
    throttle.enter(OURS)
    throttle.enter(OURS)
    with pytest.raises(Throttled):
        throttle.enter(OURS)


def test_several_requests_count_together_or_not_at_all() -> None:
    throttle = Throttle(3, 1, Clock())
    throttle.enter_again(OURS, 2)
    with pytest.raises(Throttled, match=r"in the last minute \(count: 4, allowed: 3\)"):
        throttle.enter_again(OURS, 2)
    throttle.enter_again(OURS)


def test_a_request_that_goes_on_with_an_invocation_counts_in_its_minute_alone() -> None:
    throttle = Throttle(3, 1, Clock())
    throttle.enter(OURS)
    throttle.enter_again(OURS)
    throttle.enter_again(OURS)
    with pytest.raises(Throttled, match=r"in the last minute \(count: 4, allowed: 3\)"):
        throttle.enter_again(OURS)
    throttle.leave(OURS)
    with pytest.raises(Throttled, match="in the last minute"):
        throttle.enter(OURS)


def test_what_was_refused_counts_as_neither() -> None:
    throttle = Throttle(2, 1, Clock())
    throttle.enter(OURS)
    for _ in range(3):
        with pytest.raises(Throttled, match="concurrent"):
            throttle.enter(OURS)
    throttle.leave(OURS)
    throttle.enter(OURS)


def test_what_goes_on_without_a_request_gives_its_place_back_as_long_as_few_do() -> None:
    """Work that goes on holds a thread of its own, and there are as many threads as places."""
    throttle = Throttle(10_000, 100, Clock(), places=8)
    places = [Place(throttle, OURS) for _ in range(7)]
    with pytest.raises(Throttled):
        throttle.enter(OURS)
    for place in places:
        place.leave_thread()
        place.leave_thread()
    more = [Place(throttle, OURS) for _ in range(7)]
    for place in more:
        place.leave_thread()  # one namespace has seven of the eight
    with pytest.raises(Throttled):
        throttle.enter(OURS)
    throttle.enter(THEIRS)
    throttle.leave(THEIRS)
    for place in (*places, *more):
        place.close()
        place.leave_thread()  # it came too late
    assert fill(throttle, OURS) == 7
    assert fill(throttle, THEIRS) == 1


def test_a_request_that_goes_on_with_a_run_takes_a_place_again() -> None:
    throttle = Throttle(10_000, 100, Clock(), places=1)
    throttle.enter(OURS)
    assert throttle.leave_thread(OURS)
    throttle.enter(THEIRS)
    with pytest.raises(Throttled, match="0 of this gateway's threads are free"):
        throttle.return_to_thread(OURS)
    throttle.leave(THEIRS)
    throttle.return_to_thread(OURS)
    with pytest.raises(Throttled):
        throttle.enter(THEIRS)
    throttle.leave(OURS)
    throttle.enter(THEIRS)
