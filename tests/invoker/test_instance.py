"""Every cell of the state table."""

from __future__ import annotations

import itertools
import socket

import pytest

from invoker.containers.instance import PUBLIC, TABLE, Effect, Event, State, step
from invoker.containers.live import Live
from invoker.drivers.base import status_of
from relay.clients.http_unix import UnixConnection
from tests.relay.samples import INSTANCE
from thaw.errors import WorkerLost
from thaw.instance import InstanceState

PAIRS = list(itertools.product(State, Event))


def test_the_table_has_every_state_with_every_event() -> None:
    assert set(TABLE) == set(PAIRS)
    assert set(PUBLIC) == set(State)


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_no_step_goes_back_but_between_idle_and_busy_and_where_a_drain_is_taken_back(
    state: State, event: Event
) -> None:
    order = [State.STARTING, State.INITIALISING, State.IDLE, State.BUSY, State.DRAINING, State.STOPPING, State.GONE]
    after = step(state, event)
    if (state, after.state) not in ((State.BUSY, State.IDLE), (State.DRAINING, State.BUSY)):
        assert order.index(after.state) >= order.index(state)
    if after.effect in (Effect.NONE, Effect.REFUSE) and (state, event) != (State.BUSY, Event.RUN_BEGAN):
        assert after.state is state


@pytest.mark.parametrize("state", State)
def test_a_dead_process_is_buried_once_from_any_state(state: State) -> None:
    first = step(state, Event.EXITED)
    assert first.state is State.GONE
    assert first.effect is (Effect.NONE if state is State.GONE else Effect.BURY)
    assert step(first.state, Event.EXITED).effect is Effect.NONE
    assert step(first.state, Event.STOPPED).effect is Effect.NONE


@pytest.mark.parametrize("state", State)
def test_only_what_serves_takes_runs(state: State) -> None:
    after = step(state, Event.RUN_BEGAN)
    assert (after.effect is Effect.REFUSE) is (PUBLIC[state] is not InstanceState.READY)


@pytest.mark.parametrize("state", State)
def test_a_release_of_idle_instances_never_ends_one_that_works(state: State) -> None:
    after = step(state, Event.RELEASE)
    assert (after.effect is Effect.STOP) is (state is State.IDLE)
    if state in (State.STARTING, State.INITIALISING, State.BUSY):
        assert after.effect is Effect.REFUSE


@pytest.mark.parametrize("event", Event)
def test_gone_is_final(event: Event) -> None:
    assert step(State.GONE, event).state is State.GONE


def test_the_first_reason_to_end_is_the_one_that_is_told() -> None:
    live = Live(INSTANCE, "python:3.11")
    live.blame(WorkerLost("it was killed by signal 9"))
    live.blame(WorkerLost("its pipeline group was given up"))
    assert live.error is not None
    assert live.error.message == "it was killed by signal 9"


@pytest.mark.parametrize(("exit_code", "status"), [(0, 0), (1, 1), (137, -9), (192, -64), (193, 193), (255, 255)])
def test_only_the_numbers_of_signals_say_that_a_container_was_killed(exit_code: int, status: int) -> None:
    assert status_of(exit_code) == status


def test_a_connection_that_comes_back_after_its_container_ended_is_closed() -> None:
    """The thread that serves a run and the thread that removes the instance race."""
    live = Live(INSTANCE, "python:3.11")
    kept, late = UnixConnection("kept"), UnixConnection("late")
    kept.sock, late.sock = socket.socket(), socket.socket()
    sockets = kept.sock, late.sock
    live.keep_connection(kept)
    live.drop_connections()
    live.keep_connection(late)
    assert live.take_connection() is None
    assert [s.fileno() for s in sockets] == [-1, -1]
