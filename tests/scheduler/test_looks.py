"""A host's inspection of a model, while the store is away and when it is back."""

from __future__ import annotations

from gateway.scheduler.decisions import Decision, FailDemand, Flag, InspectModelOn, StartGroup
from tests.scheduler.facts import CHAT, FACTS, OTHER, chat
from tests.scheduler.world import World, of, world
from thaw.errors import ErrorInfo

AWAY = ErrorInfo("StoreUnavailable", "Connection refused (gave up after 4 attempts)", "is the store up?")
GONE = ErrorInfo("ModelNotFound", "no such bucket")


def store_is_away(w: World, seconds: float, decided: list[Decision]) -> list[Decision]:
    """Let every requested inspection fail at once for ``seconds``.  Return all decisions of this time."""
    until, seen = w.now + seconds, list(decided)
    while w.now < until:
        looks = len(of(decided, InspectModelOn))
        assert looks <= 1, "two looks at once"
        decided = w.looked(None, AWAY) if looks else w.later(0.05)
        seen += decided
    return seen


def test_a_request_waits_for_a_store_that_restarts_and_starts_within_seconds_of_its_return() -> None:
    w = world(facts=chat())
    seen = store_is_away(w, 60.0, w.ask(CHAT))
    assert of(seen, FailDemand) == []
    back = w.later(5.1)
    assert len(of(back, InspectModelOn)) == 1
    (start,) = of(w.looked(FACTS), StartGroup)
    assert start.activation_ids == ("a0",)


def test_looks_come_in_growing_pauses_of_five_seconds_at_most_and_each_that_fails_is_logged() -> None:
    w = world(facts=chat())
    seen = store_is_away(w, 60.0, w.ask(CHAT))
    assert 12 <= len(of(seen, InspectModelOn)) <= 18
    flags = of(seen, Flag)
    assert len(flags) == len(of(seen, InspectModelOn))
    assert (flags[0].name, flags[0].fields["code"]) == ("look_failed", "StoreUnavailable")


def test_a_request_ends_with_the_stores_error_before_its_time_limit_does() -> None:
    w = world(facts=chat(timeout_s=20.0))
    seen = store_is_away(w, 10.0, w.ask(CHAT))
    seen += store_is_away(w, 9.9, w.ask(CHAT))
    assert [(f.activation_ids, f.error) for f in of(seen, FailDemand)] == [(("a0",), AWAY)]
    assert [f.activation_ids for f in of(store_is_away(w, 10.0, []), FailDemand)] == [("a1",)]


def test_a_store_that_stays_away_for_as_long_as_a_start_may_fails_all_that_wait() -> None:
    w = world(facts=chat(timeout_s=3600.0), start_deadline_s=30.0)
    seen = store_is_away(w, 29.0, w.ask(CHAT))
    assert of(seen, FailDemand) == []
    assert [f.error for f in of(store_is_away(w, 10.0, []), FailDemand)] == [AWAY]
    assert of(store_is_away(w, 29.0, w.ask(CHAT)), FailDemand) == [], "the next request waits as long again"


def test_without_a_request_nobody_looks_and_the_next_one_waits_its_whole_time() -> None:
    w = world(facts=chat(timeout_s=10.0), start_deadline_s=30.0)
    assert len(of(store_is_away(w, 12.0, w.ask(CHAT)), FailDemand)) == 1
    assert of(w.later(60.0), InspectModelOn) == []
    seen = store_is_away(w, 7.0, w.ask(CHAT))
    assert len(of(seen, InspectModelOn)) > 2
    assert of(seen, FailDemand) == []


def test_a_start_that_fails_since_the_store_is_away_does_not_use_up_the_requests_attempts() -> None:
    """The inspection before the next start waits for the store."""
    w = world(facts=chat())
    w.ask(CHAT)
    (start,) = of(w.looked(FACTS), StartGroup)
    failed = w.gone(start, error=AWAY)
    assert of(failed, FailDemand) == []
    seen = store_is_away(w, 60.0, failed)
    assert (of(seen, FailDemand), of(seen, StartGroup)) == ([], [])
    w.later(5.1)
    assert len(of(w.looked(FACTS), StartGroup)) == 1


def test_requests_that_come_in_a_pause_wait_for_the_look_at_its_end() -> None:
    w = world(facts=chat())
    seen = store_is_away(w, 20.0, w.ask(CHAT))
    n_looks = len(of(seen, InspectModelOn))
    for _ in range(100):
        seen += store_is_away(w, 0.1, w.ask(CHAT))
    assert len(of(seen, InspectModelOn)) - n_looks <= 3


def test_a_function_that_is_deployed_anew_in_a_pause_is_looked_at_at_once() -> None:
    w = world(facts=chat())
    store_is_away(w, 20.0, w.ask(CHAT))
    assert len(of(w.deploy(chat(version="2"), changed=True), InspectModelOn)) == 1


def test_a_request_that_is_due_before_the_pause_ends_is_told_of_the_store_in_time() -> None:
    w = world(facts=chat(timeout_s=4.0))
    w.deploy(chat(name=OTHER))
    store_is_away(w, 20.0, w.ask(OTHER))
    seen = store_is_away(w, 3.9, w.ask(CHAT))
    assert [(f.action, f.error) for f in of(seen, FailDemand)] == [(CHAT, AWAY)]
