"""The counts of invocations per namespace, with a clock that the test moves."""

from __future__ import annotations

import pytest

from gateway.serving.throttle import Throttle
from tests.conftest import Clock
from thaw.errors import Throttled
from thaw.ids import Namespace

OURS, THEIRS = Namespace("ours"), Namespace("theirs")


def test_an_invocation_that_fails_gives_its_slot_back() -> None:
    throttle = Throttle(100, 1, Clock())
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), throttle.counted(OURS):
            raise ZeroDivisionError
    with throttle.counted(OURS), pytest.raises(Throttled, match=r"in flight \(count: 2, allowed: 1\)"):
        throttle.enter(OURS)


def test_invocations_in_flight_are_counted_by_namespace_up_to_the_limit() -> None:
    throttle = Throttle(100, 2, Clock())
    throttle.enter(OURS)
    throttle.enter(OURS)
    throttle.enter(THEIRS)
    with pytest.raises(Throttled, match=r"Too many concurrent requests in flight \(count: 3, allowed: 2\)"):
        throttle.enter(OURS)
    throttle.leave(OURS)
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
