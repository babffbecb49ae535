"""A run that moves to another worker: every row of the failure rules, by name."""

from __future__ import annotations

import itertools
import math

import pytest

from gateway.scheduler.placement.serverlessllm import ResumeCost
from gateway.serving.moving.move_rules import (
    FEW_TOKENS,
    TABLE,
    Command,
    Event,
    Next,
    State,
    Step,
    after_round,
    is_enough,
    patience_s,
    rounds,
    step,
)

UNDER_WAY = (State.ASKING, State.RESUMING, State.CAUGHT_UP, State.SWITCHING)
AT_DEST = (State.RESUMING, State.CAUGHT_UP, State.SWITCHING)
COURSE = (Event.SLOT_FOUND, Event.CAUGHT_UP, Event.BOUNDARY, Event.FIRST_MESSAGE)


def test_a_move_that_nothing_disturbs_ends_at_the_destination_and_frees_the_source_last() -> None:
    state, said = State.ASKING, list[Command]()
    for event in COURSE:
        state, commands = step(state, event)
        said += commands
    assert state is State.MOVED
    assert said == [Command.COMPUTE_AT_DEST, Command.SEND_TO_DEST, Command.STOP_SOURCE]


def test_the_source_is_stopped_only_when_the_destination_has_answered() -> None:
    pairs = itertools.product(State, Event)
    stopping = [pair for pair in pairs if Command.STOP_SOURCE in step(*pair).commands]
    assert stopping == [(State.SWITCHING, Event.FIRST_MESSAGE)]


DROPS, LEAVES = Step(State.ENDED, (Command.DROP_AT_DEST,)), Step(State.ENDED, (Command.LEAVE_QUEUE,))
CONTINUES = Step(State.ENDED, (Command.CONTINUE_AT_DEST,))
ASKS_AGAIN = Step(State.ASKING, (Command.DROP_AT_DEST, Command.ASK_AGAIN))
HAS_SLOT = (State.RESUMING, State.CAUGHT_UP)


@pytest.mark.parametrize(
    ("event", "states", "becomes"),
    [
        pytest.param(Event.RUN_ENDED, AT_DEST, DROPS, id="a run that ends first is answered by its source"),
        pytest.param(Event.RUN_ENDED, (State.ASKING,), LEAVES, id="a run that ends before a slot was found"),
        pytest.param(Event.STAYS, (State.ASKING,), LEAVES, id="a drain that is withdrawn before a slot was found"),
        pytest.param(Event.SOURCE_FAILED, (State.ASKING,), LEAVES, id="a source that fails before a slot was found"),
        pytest.param(Event.DEST_FAILED, (State.ASKING,), LEAVES, id="a failure before a slot was found"),
        pytest.param(Event.SOURCE_FAILED, HAS_SLOT, CONTINUES, id="a lost run continues at the destination at hand"),
        # the paper's R22 prints "src server fails" for both paragraphs, but the second one describes the destination
        pytest.param(Event.DEST_FAILED, AT_DEST, DROPS, id="R22: the source goes on when the destination fails"),
        pytest.param(Event.STAYS, HAS_SLOT, DROPS, id="the source goes on when the drain is withdrawn"),
        pytest.param(Event.OVERDUE, (State.CAUGHT_UP,), DROPS, id="a run whose client does not read holds no slot"),
        pytest.param(Event.OVERDUE, (State.SWITCHING,), Step(State.SWITCHING), id="its boundary came meanwhile"),
        pytest.param(Event.DEST_BUSY, (State.RESUMING, State.SWITCHING), ASKS_AGAIN, id="others took the slot"),
    ],
)
def test_a_failure_has_its_row(event: Event, states: tuple[State, ...], becomes: Step) -> None:
    assert {state: step(state, event) for state in states} == dict.fromkeys(states, becomes)


def test_whatever_happens_in_whatever_order_a_slot_at_the_destination_is_used_or_given_back_once() -> None:
    for events in itertools.permutations(Event, 5):
        state, said = State.ASKING, list[Command]()
        for event in (*events, Event.RUN_ENDED):
            state, commands = step(state, event)
            said += commands
        ends = (Command.STOP_SOURCE, Command.DROP_AT_DEST, Command.CONTINUE_AT_DEST)
        n_asked, n_found = 1 + said.count(Command.ASK_AGAIN), said.count(Command.COMPUTE_AT_DEST)
        assert sum(said.count(c) for c in ends) == n_found <= n_asked, events
        assert said.count(Command.LEAVE_QUEUE) == n_asked - n_found, events


@pytest.mark.parametrize("state", [State.ENDED, State.MOVED])
def test_a_word_that_comes_late_changes_nothing(state: State) -> None:
    assert {step(state, event) for event in Event} == {Step(state)}


def test_every_failure_has_a_row_in_every_state_in_which_it_can_be_noticed() -> None:
    failures = (Event.RUN_ENDED, Event.SOURCE_FAILED, Event.DEST_FAILED, Event.STAYS)
    unseen = {(State.SWITCHING, Event.SOURCE_FAILED), (State.SWITCHING, Event.STAYS)}  # the thread waits for the other
    assert {(s, e) for s, e in TABLE if e in failures} == set(itertools.product(UNDER_WAY, failures)) - unseen


def test_another_round_follows_only_while_it_gains_more_than_a_few_tokens() -> None:
    assert not is_enough(missing=100, gained=900)
    assert is_enough(missing=FEW_TOKENS, gained=900)
    assert is_enough(missing=100, gained=FEW_TOKENS)
    assert is_enough(missing=100, gained=-5)


def test_rounds_shrink_by_how_much_faster_tokens_are_recomputed_than_said() -> None:
    found = rounds(600, 300, resume_per_token_s=0.00025, round_s=0.02, token_s=0.03)
    # 900 tokens take 0.245 s, in which 8.17 are generated: one round, then 0.022 s in which no server answers
    assert found.n_rounds == 1
    assert found.stopped_s == pytest.approx(0.02 + 0.00025 * 0.245 / 0.03)
    assert found.resume_s == pytest.approx(0.245 + found.stopped_s)
    assert found.resume_s - found.stopped_s == pytest.approx(ResumeCost(0.00025, 0.02, 0.03).resume_s(600, 9.0))


def test_a_destination_that_recomputes_no_faster_than_the_source_speaks_never_catches_up() -> None:
    assert rounds(10, 100, resume_per_token_s=0.03, round_s=0.0, token_s=0.03).resume_s == math.inf
    slow_rounds = rounds(10, 1_000, resume_per_token_s=0.0001, round_s=5.0, token_s=0.01)
    assert slow_rounds.n_rounds == 2  # in each round 500 more tokens are generated


def test_a_short_last_round_is_followed_by_the_switch() -> None:
    assert after_round(missing=5, gained=300, took_s=0.2, n_in_vain=0) is Next.SWITCH
    assert after_round(missing=40, gained=3, took_s=0.2, n_in_vain=0) is Next.SWITCH  # rounds make them no fewer
    assert after_round(missing=40, gained=300, took_s=0.2, n_in_vain=0) is Next.ROUND


@pytest.mark.parametrize(("missing", "took_s"), [(5, 2.5), (65, 0.2)])
def test_no_client_waits_for_a_switch_after_a_slow_round_or_with_much_missing(missing: int, took_s: float) -> None:
    assert after_round(missing, 300, took_s, 0) is Next.ROUND
    assert after_round(missing, 0, took_s, 0) is Next.ROUND  # once may be an accident
    assert after_round(missing, 0, took_s, 1) is Next.GIVE_UP


def test_the_switch_may_take_little_longer_than_the_last_round() -> None:
    assert patience_s(0.1, most_s=10) < 2
    assert patience_s(60.0, most_s=10) == 10
