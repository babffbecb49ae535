"""Running requests whose worker leaves while something fails: every rule, and a switch that is too slow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from gateway.serving.hangup import ClientGone
from gateway.serving.moving import move_rules
from gateway.serving.moving.move import Limits
from gateway.serving.moving.move_rules import State
from tests.gateway.fake_invoker import FakeInvoker
from tests.gateway.moves import (
    CHAT,
    Gateway,
    Run,
    begins,
    caught_up,
    comes_to,
    gateway,
    leaving,
    limits,
    movers,
    resumed,
)
from tests.gateway.waits import WAIT_S, until
from thaw.errors import InstanceBusy, InstanceGone, PlatformError, Throttled, WorkerLost

__all__ = ["gateway", "leaving", "limits"]


# the rules for failures --------------------------------------------------------------------------------------------


WHILE = {"asking": State.ASKING, "computing": State.RESUMING, "caught up": State.CAUGHT_UP}
"""What a move does when something happens."""


def comes(gateway: Gateway, run: Run, state: State) -> None:
    """Let a move come to this state, and remain there."""
    if state is State.RESUMING:
        gateway.dest.prefill_pace = threading.Semaphore(0)
    if state is not State.ASKING:
        gateway.ready(gateway.dest)
    begins(gateway, run, state)
    if state is State.ASKING:
        until(lambda: gateway.demand.waits)


@pytest.mark.parametrize("state", WHILE.values(), ids=list(WHILE))
def test_a_run_that_ends_first_is_answered_by_its_source_and_everything_is_given_back(
    gateway: Gateway, run: Run, state: State
) -> None:
    if state is State.CAUGHT_UP:
        comes(gateway, run, state)
        run.steps.close()  # its thread comes to no boundary any more
    else:
        run.read(35, paced=gateway.source)
        comes(gateway, run, state)  # a further token would be the boundary
        run.read_all()
    assert run.ends[0]["stayed"] == "the run ended first"
    assert resumed(gateway.dest, prefill_only=False) == []


@pytest.mark.parametrize("state", [State.RESUMING, State.CAUGHT_UP], ids=["computing", "caught up"])
def test_a_run_whose_source_is_lost_meanwhile_goes_on_at_the_destination_at_hand(
    gateway: Gateway, run: Run, state: State
) -> None:
    gateway.dest.prefill_pace = threading.Semaphore(0) if state is State.RESUMING else None
    gateway.ready(gateway.dest, slots=1)  # its only slot is held by the move
    begins(gateway, run, state)
    (move,) = gateway.migrations.moves
    move.state = State.RESUMING  # one that has caught up did so just after the boundary
    gateway.source.drop_runs()
    run.read_all()
    assert resumed(gateway.dest, prefill_only=False) == [4]
    assert run.ends[0]["to"] == "h1"
    assert run.call.losses == 1


def test_a_run_whose_source_is_lost_while_it_asks_waits_as_every_run_that_lost_its_worker(
    gateway: Gateway, run: Run
) -> None:
    run.read(1, paced=gateway.source)
    gateway.source.drop_runs()
    gateway.source.pace = None
    reader = threading.Thread(target=run.read, args=(-1,))
    reader.start()
    # it waited as a run that asks for another worker before, with the time at which it asked
    until(lambda: run.call.losses and gateway.demand.waits == {"a": run.call.received_s})
    assert gateway.room.counts()[0] == 1
    gateway.ready(gateway.dest)
    reader.join(WAIT_S)
    run.is_whole()


FAULTS: dict[str, Callable[[FakeInvoker], None]] = {
    "is lost": lambda d: d.cut_after.append(0),
    "fails": lambda d: d.failures.append(PlatformError("the engine is full")),
    "reports its loss": lambda d: d.failures.append(WorkerLost("the engine failed")),
    "has left": lambda d: d.refusals.append(InstanceGone("no such instance")),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_when_the_destination_fails_in_a_round_the_source_goes_on_and_another_one_is_tried(
    gateway: Gateway, run: Run, fault: str
) -> None:
    FAULTS[fault](gateway.dest)
    gateway.ready(gateway.dest)
    begins(gateway, run, State.ENDED)
    run.read(1, paced=gateway.source)
    gateway.ready(gateway.dest)  # it is there again
    caught_up(gateway, run, n_moves=2)
    run.read_all()
    failed, moved = run.ends
    assert failed["stayed"]
    assert moved["to"] == "h1"


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_destination_that_does_not_take_the_run_over_leaves_it_with_the_source(
    gateway: Gateway, run: Run, fault: str
) -> None:
    gateway.ready(gateway.dest)
    caught_up(gateway, run)
    FAULTS[fault](gateway.dest)
    run.read(1, paced=gateway.source)
    assert len(run.tokens) == 5
    assert gateway.migrations.moves[0].state is State.ENDED
    assert gateway.source.running == 1
    run.read_all()


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (Limits(round_s=0.2), "the destination computed no round within 0.2 s"),
        (Limits(first_message_s=0.2), "the destination sent nothing within 0.2 s of the switch"),
    ],
    ids=["in a round", "at the switch"],
)
def test_a_destination_that_hangs_counts_as_failed_after_a_deadline_and_no_token_is_missing(
    gateway: Gateway, run: Run, limits: Limits, said: str
) -> None:
    in_a_round = limits.round_s < 1
    gateway.dest.pace = threading.Semaphore(0)
    gateway.dest.prefill_pace = threading.Semaphore(0) if in_a_round else None
    gateway.ready(gateway.dest)
    begins(gateway, run, State.ENDED if in_a_round else State.CAUGHT_UP)
    run.read(1, paced=gateway.source)
    assert gateway.migrations.moves[0].state is State.ENDED
    assert len(run.tokens) == 5
    assert gateway.dest.closed.acquire(timeout=WAIT_S)  # its tokens are dropped
    gateway.dest.prefill_pace = None
    run.read_all()
    assert run.ends[0]["stayed"] == said


def fails_three_times(gateway: Gateway, run: Run) -> None:
    gateway.ready(gateway.dest)
    for n in range(1, 4):
        run.read(2, paced=gateway.source)
        comes_to(gateway, State.ENDED, n)


def test_destinations_are_tried_three_times_in_a_drain_and_again_in_the_next(gateway: Gateway, run: Run) -> None:
    gateway.dest.failures.extend(Throttled("no") for _ in range(3))
    fails_three_times(gateway, run)
    run.read(2, paced=gateway.source)
    assert len(gateway.migrations.moves) == len(run.ends) == 3
    gateway.room.instance_changed(replace(gateway.here))
    run.read(1, paced=gateway.source)
    gateway.drain()
    caught_up(gateway, run, n_moves=4)
    run.read_all()
    assert run.ends[-1]["to"] == "h1"


def test_a_slot_that_is_there_does_not_wait_until_the_state_server_knows_of_all_demand(gateway: Gateway) -> None:
    gateway.source.pace = None
    runs = [Run(gateway, gateway.call(f"a{i}")) for i in range(3)]
    for run in runs:
        run.read(2)
    settle, answers = gateway.demand.settle, threading.Semaphore(0)
    gateway.demand.settle = cast(Any, lambda call: (answers.acquire(timeout=WAIT_S), settle(call)))
    gateway.drain()
    for run in runs:
        run.read(1)
    gateway.ready(gateway.dest)  # while the first demand is on its way
    answers.release()
    until(lambda: [m.state for m in gateway.migrations.moves] == [State.CAUGHT_UP] * 3)
    assert not answers.acquire(blocking=False)
    answers.release(20)
    for run in runs:
        run.steps.close()


def test_a_start_that_fails_elsewhere_leaves_the_run_with_its_source(gateway: Gateway, run: Run) -> None:
    run.read(1, paced=gateway.source)
    until(lambda: gateway.demand.waits)
    gateway.room.fail(CHAT, ["a"], PlatformError("no host has room"))  # type: ignore[list-item]
    until(lambda: gateway.migrations.moves[0].state is State.ENDED)
    run.read(1, paced=gateway.source)
    assert run.ends[0] == {"stayed": "no host has room", "rounds": 0, "tokens": 0, "rounds_s": 0.0}
    run.read_all()


def test_a_run_whose_slot_others_took_asks_again_less_and_less_often_and_moves(
    gateway: Gateway, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.dest.refusals.extend(InstanceBusy("all slots are taken") for _ in range(5))
    moves, asked = gateway.migrations.moves, list[int]()
    retry = gateway.room.retry
    monkeypatch.setattr(gateway.room, "retry", lambda action: (asked.append(moves[0].n_refusals), retry(action)))
    gateway.ready(gateway.dest)
    run.read(1, paced=gateway.source)
    (move,) = moves
    for _ in range(20):  # each token is a boundary, and none of them begins another move
        if move.state in (State.CAUGHT_UP, State.MOVED):
            break
        run.read(1, paced=gateway.source)
        threading.Event().wait(0.1)
    until(lambda: move.state in (State.CAUGHT_UP, State.MOVED))
    assert asked == [1, 2, 3, 4]  # each time after a longer pause
    assert not gateway.dest.refusals  # and so many refusals are no three failures
    run.read_all()
    assert gateway.migrations.moves == [move]
    assert [e.name for e in run.call.events if e.name.startswith("move.")] == ["move.begin", "move.end"]


def test_a_run_whose_slot_others_took_before_the_switch_stays_and_asks_again(gateway: Gateway, run: Run) -> None:
    gateway.ready(gateway.dest)
    caught_up(gateway, run)
    gateway.dest.refusals.extend(InstanceBusy("all slots are taken") for _ in range(2))
    run.read(1, paced=gateway.source)
    assert gateway.source.running == 1
    (move,) = gateway.migrations.moves
    until(lambda: move.state is State.CAUGHT_UP)  # again
    run.read_all()
    assert run.ends[-1]["to"] == "h1"


def test_the_last_slot_of_the_destination_is_asked_for_at_once_again_when_a_round_has_just_ended_there(
    gateway: Gateway, run: Run
) -> None:
    gateway.dest.frees_late = True
    gateway.ready(gateway.dest, slots=1)
    caught_up(gateway, run)
    run.read(1)
    assert run.ends[0]["to"] == "h1"
    run.read_all()


@pytest.mark.parametrize("state", WHILE.values(), ids=["asking", "computing", "switching"])
def test_a_client_that_leaves_frees_both_ends_and_is_no_fault_of_the_destination(
    gateway: Gateway, run: Run, state: State, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.dest.pace = threading.Semaphore(0)
    comes(gateway, run, state)
    if state is State.CAUGHT_UP:
        leaves = threading.Thread(target=lambda: (until(lambda: gateway.dest.running), run.call.hangup.set()))
        leaves.start()
    else:
        run.call.hangup.set()
    with pytest.raises(ClientGone):
        run.read(1)
    assert run.ends[0]["stayed"] == "the run ended first"
    assert "move_failed" not in capsys.readouterr().err


@pytest.mark.parametrize("state", WHILE.values(), ids=list(WHILE))
def test_a_drain_that_is_withdrawn_ends_the_move_and_the_source_goes_on_and_is_a_route_again(
    gateway: Gateway, run: Run, state: State
) -> None:
    comes(gateway, run, state)
    gateway.room.instance_changed(gateway.here)
    run.read(1, paced=gateway.source)
    assert gateway.migrations.moves[0].state is State.ENDED
    (route,) = (r for r in gateway.room._table._routes[CHAT].values() if r.record.host_id == "h0")
    assert (route.inflight, route.leaves) == (1, False)  # it knows its run still
    run.read_all()
    assert [end["stayed"] for end in run.ends] == ["the host is not emptied after all"]
    assert resumed(gateway.dest, prefill_only=False) == []


@pytest.mark.parametrize("limits", [Limits(boundary_s=0.05)])
def test_a_run_whose_client_does_not_read_gives_its_slot_at_the_destination_back(gateway: Gateway, run: Run) -> None:
    gateway.ready(gateway.dest)
    begins(gateway, run, State.ENDED)
    until(lambda: not movers())
    (route,) = gateway.room._table._routes[CHAT].values()
    assert route.inflight == 0
    run.read_all()
    assert "read no token" in run.ends[0]["stayed"]


@pytest.mark.parametrize("limits", [Limits(boundary_s=300)])
def test_clients_that_do_not_read_keep_no_worker_from_the_others(gateway: Gateway) -> None:
    gateway.source.pace = None
    gateway.here = gateway.ready(gateway.source, slots=20)
    runs = [Run(gateway, gateway.call(f"a{i}")) for i in range(9)]
    for run in runs:
        run.read(2)
    gateway.ready(gateway.dest, slots=20)
    gateway.drain()
    for run in runs[:8]:
        run.read(1)
    until(lambda: [m.state for m in gateway.migrations.moves] == [State.CAUGHT_UP] * 8)
    runs[8].read(1)
    until(lambda: gateway.migrations.moves[8].state is State.CAUGHT_UP)
    for run in runs:
        run.steps.close()


# the switch is short -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [Limits(first_message_s=0.2)])
def test_a_switch_that_was_too_slow_is_not_tried_again(gateway: Gateway, run: Run) -> None:
    gateway.dest.pace = threading.Semaphore(0)
    gateway.ready(gateway.dest)
    caught_up(gateway, run)
    run.read(1, paced=gateway.source)
    run.read(5, paced=gateway.source)
    assert len(gateway.migrations.moves) == len(run.ends) == 1
    run.read_all()


def test_there_is_no_switch_to_a_destination_whose_rounds_are_slow(
    gateway: Gateway, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(move_rules, "SLOW_ROUND_S", -1.0)
    fails_three_times(gateway, run)
    run.read_all()
    assert resumed(gateway.dest, prefill_only=False) == []
    assert all("for a round" in end["stayed"] for end in run.ends)


# errors of our own -------------------------------------------------------------------------------------------------


def test_a_move_that_fails_on_a_bug_ends_alone(gateway: Gateway) -> None:
    gateway.source.pace = None
    runs = [Run(gateway, gateway.call(f"a{i}")) for i in range(2)]
    for run in runs:
        run.read(2)
    settle = gateway.demand.settle
    gateway.demand.settle = cast(Any, lambda _: {}["a row that cannot be read"])
    gateway.drain()
    runs[0].read(1)
    until(lambda: gateway.migrations.moves[0].state is State.ENDED and not gateway.migrations._unchecked)
    gateway.demand.settle = cast(Any, settle)
    runs[1].read(1)
    until(lambda: gateway.demand.waits)
    gateway.ready(gateway.dest)
    comes_to(gateway, State.CAUGHT_UP, n_moves=2)
    for run in runs:
        run.read_all()
    assert "a row that cannot be read" in runs[0].ends[0]["stayed"]
    assert runs[1].ends[0]["to"] == "h1"


@pytest.mark.parametrize("name", ["move-asker", "mover"])
def test_a_run_stays_and_others_move_later_when_no_thread_can_be_started(
    gateway: Gateway, run: Run, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def full(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    if name == "mover":
        gateway.ready(gateway.dest)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        run.read(1, paced=gateway.source)
        assert gateway.migrations.moves[0].state is State.ENDED
        run.read(1, paced=gateway.source)
        assert len(run.ends) == 1
    run.read(1, paced=gateway.source)
    if name == "move-asker":
        until(lambda: gateway.demand.waits)
        gateway.ready(gateway.dest)
    comes_to(gateway, State.CAUGHT_UP, n_moves=2)
    run.read_all()
    assert run.ends[-1]["to"] == "h1"
