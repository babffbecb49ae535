"""Live migration: every row of the failure rules, by name."""

from __future__ import annotations

import itertools
import math

import pytest

from gateway.scheduler.placement.serverlessllm import ResumeCost
from gateway.scheduler.policy.migration import TABLE, Command, Event, State, Step, rounds, step

BEFORE_THE_ROUTE = (State.LOADING, State.ASKING, State.RESUMING, State.SWITCHING)


def test_a_migration_that_nothing_disturbs_ends_at_the_destination_and_frees_the_source() -> None:
    state, said = State.LOADING, list[Command]()
    for event in (Event.LOADED, Event.RESUME_ACCEPTED, Event.CAUGHT_UP, Event.ROUTED):
        state, commands = step(state, event)
        said += commands
    assert state is State.MOVED
    assert said == [
        Command.ASK_SOURCE,
        Command.RESUME_AT_DEST,
        Command.STOP_SOURCE,
        Command.ROUTE_TO_DEST,
        Command.RELEASE_SOURCE,
    ]


@pytest.mark.parametrize("state", [State.RESUMING, State.SWITCHING])
def test_a_run_that_ends_between_steps_3_and_5_is_answered_by_its_source_and_the_destination_drops_the_kv(
    state: State,
) -> None:
    ended = step(state, Event.RUN_ENDED)
    assert ended == Step(State.ENDED, (Command.DROP_KV_AT_DEST,))
    assert Command.UNLOAD_AT_DEST not in ended.commands  # the destination keeps the model and is idle


@pytest.mark.parametrize("state", [State.LOADING, State.ASKING])
def test_a_run_that_ends_before_anything_was_resumed_leaves_nothing_to_undo(state: State) -> None:
    assert step(state, Event.RUN_ENDED) == Step(State.ENDED)


def test_a_source_that_fails_while_the_destination_loads_aborts_unloads_and_is_retried_elsewhere() -> None:
    state, commands = step(State.LOADING, Event.SOURCE_FAILED)
    assert state is State.ENDED
    assert Command.UNLOAD_AT_DEST in commands
    assert commands[-1] is Command.RETRY_ELSEWHERE


@pytest.mark.parametrize("state", [State.RESUMING, State.SWITCHING])
def test_a_source_that_fails_during_migration_has_its_kv_cleared_and_its_model_unloaded_at_the_destination(
    state: State,
) -> None:
    assert step(state, Event.SOURCE_FAILED).commands == (
        Command.DROP_KV_AT_DEST,
        Command.UNLOAD_AT_DEST,
        Command.RETRY_ELSEWHERE,
    )


def test_a_destination_that_fails_while_loading_cancels_the_migration_and_the_source_never_knew() -> None:
    assert step(State.LOADING, Event.DEST_FAILED) == Step(State.ENDED)


def test_r22_a_destination_that_fails_while_resuming_leaves_the_source_going_on() -> None:
    """The paper prints "src server fails" for both paragraphs, but the second one describes the destination."""
    state, commands = step(State.RESUMING, Event.DEST_FAILED)
    assert (state, commands) == (State.ENDED, (Command.TELL_SOURCE,))
    assert step(State.RESUMING, Event.SOURCE_FAILED).commands != commands


@pytest.mark.parametrize(("state", "event"), list(itertools.product(BEFORE_THE_ROUTE, Event)))
def test_until_the_route_is_switched_no_request_is_lost_whatever_fails(state: State, event: Event) -> None:
    after, commands = step(state, event)
    if after is not State.ENDED:
        return
    source_answers = event in (Event.RUN_ENDED, Event.DEST_FAILED) and Command.RELEASE_SOURCE not in commands
    assert source_answers or Command.RETRY_ELSEWHERE in commands


@pytest.mark.parametrize("event", list(Event))
def test_a_word_that_comes_late_changes_nothing(event: Event) -> None:
    assert step(State.ENDED, event) == Step(State.ENDED)
    assert step(State.MOVED, event) == Step(State.MOVED)
    assert step(State.SWITCHING, Event.LOADED) == Step(State.SWITCHING)


def test_every_failure_has_a_row_in_every_state_before_the_end() -> None:
    failures = (Event.RUN_ENDED, Event.SOURCE_FAILED, Event.DEST_FAILED)
    assert {(s, e) for s, e in TABLE if e in failures} == set(itertools.product(BEFORE_THE_ROUTE, failures))


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
