"""Running requests whose worker leaves go on elsewhere: the normal course, versions, and other requests beside them."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from gateway.serving.moving.between_tokens import Moving
from gateway.serving.moving.move import Limits
from gateway.serving.moving.move_rules import State
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
from thaw.errors import WorkerLost
from thaw.instance import InstanceState

__all__ = ["gateway", "leaving", "limits"]


# the normal course -------------------------------------------------------------------------------------------------


def test_a_run_whose_host_is_emptied_goes_on_elsewhere_and_no_token_comes_twice_or_not_at_all(
    gateway: Gateway, run: Run
) -> None:
    gateway.ready(gateway.dest)
    caught_up(gateway, run)
    (first,) = resumed(gateway.dest, prefill_only=True)  # while the source went on
    assert first in (3, 4)
    gateway.source.pace.release(5)  # type: ignore[union-attr]  tokens that nobody will read from there
    run.read()
    assert resumed(gateway.dest, prefill_only=False) == [4]
    assert gateway.source.closed.acquire(timeout=WAIT_S)  # stopped, and its slot is free
    run.read_all()
    (moved,) = run.ends
    assert (moved["to"], moved["rounds"], moved["tokens"]) == ("h1", 1, 3 + first)
    assert moved["pause_s"] > 0
    assert moved["rounds_s"] > 0
    assert [e.name for e in run.call.events].count("move.begin") == 1
    assert run.call.losses == 0


@pytest.mark.parametrize("limits", [Limits(first_message_s=3.0)])
def test_the_deadline_of_the_switch_is_none_for_the_rest_of_the_answer(gateway: Gateway, run: Run) -> None:
    gateway.dest.pace = threading.Semaphore(1)
    gateway.ready(gateway.dest)
    caught_up(gateway, run)
    run.read(1)
    assert run.ends[0]["to"] == "h1"
    later = threading.Timer(3.2, gateway.dest.pace.release)  # longer than the switch may take
    later.start()
    run.read(1)
    later.join()
    run.read_all()
    assert run.call.losses == 0


def test_the_destination_is_sent_what_came_meanwhile_until_little_is_missing(gateway: Gateway, run: Run) -> None:
    gateway.dest.prefill_pace, gateway.dest.prompt_tokens = threading.Semaphore(0), 300
    gateway.ready(gateway.dest)
    run.read(1, paced=gateway.source)
    until(lambda: resumed(gateway.dest, prefill_only=True))
    run.read(17, paced=gateway.source)  # the client reads on while the destination computes
    gateway.dest.prefill_pace.release()
    until(lambda: len(resumed(gateway.dest, prefill_only=True)) == 2)
    run.read(2, paced=gateway.source)
    gateway.dest.prefill_pace.release()
    comes_to(gateway, State.CAUGHT_UP)
    run.read_all()
    assert resumed(gateway.dest, prefill_only=True)[1] == 21
    assert run.ends[0]["tokens"] == 300 + 21  # each token once


def test_a_run_that_finds_no_slot_elsewhere_asks_for_one_as_a_new_request_and_is_counted_once(
    gateway: Gateway, run: Run
) -> None:
    run.read(1, paced=gateway.source)
    until(lambda: gateway.demand.waits)
    assert gateway.demand.waits["a"] > run.call.received_s  # its move is young, and its source serves it still
    assert gateway.room.counts()[0] == 1
    run.read(5, paced=gateway.source)  # the source goes on meanwhile
    assert gateway.room.counts()[0] == 1
    gateway.ready(gateway.dest)
    comes_to(gateway, State.CAUGHT_UP)
    assert gateway.demand.waits == {}
    run.read_all()


def test_many_runs_move_with_a_bounded_number_of_threads_that_end(gateway: Gateway) -> None:
    gateway.source.pace = None  # a test reads as slowly as it likes
    runs = [Run(gateway, gateway.call(f"a{i}")) for i in range(20)]
    gateway.here = gateway.ready(gateway.source, slots=20)
    for run in runs:
        run.read(2, paced=gateway.source)
    gateway.drain()
    gateway.dest.prefill_pace = threading.Semaphore(0)
    for run in runs:
        run.read(1, paced=gateway.source)
    until(lambda: len(gateway.demand.waits) == 20)
    assert movers() == ["move-asker"]  # a wait for a slot costs no thread of its own
    gateway.ready(gateway.dest, slots=20)
    until(lambda: gateway.dest.running == 8)
    until(lambda: "move-asker" not in movers())  # it has found a slot for each
    assert movers() == ["mover"] * 8
    gateway.dest.prefill_pace = None
    for run, move in zip(runs, gateway.migrations.moves, strict=True):
        until(lambda move=move: move.state is State.CAUGHT_UP)
        run.read_all()
        assert run.ends[0]["to"] == "h1"


def test_a_run_whose_worker_stays_is_never_looked_at(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moving, "at_boundary", None)
    run = Run(gateway, gateway.call())
    run.read_all()


# one answer, one model ---------------------------------------------------------------------------------------------


def updated(gateway: Gateway, version: str) -> None:
    gateway.version = version
    gateway.room.action_changed(CHAT)


def later_is_ready(gateway: Gateway) -> None:
    there = gateway.dest.ready(CHAT, instance="later", group="d" * 32, version="0.0.2")
    gateway.room.instance_changed(there)


def test_a_run_moves_to_no_other_version_of_its_action(gateway: Gateway, run: Run) -> None:
    later_is_ready(gateway)
    updated(gateway, "0.0.2")
    begins(gateway, run, State.ENDED)
    assert not gateway.demand.waits  # demand would start another worker of the later version
    run.read_all()
    assert gateway.dest.runs == []
    (stayed,) = run.ends
    assert "Version 0.0.1 of guest/chat began this answer, and the action is version 0.0.2 now" in stayed["stayed"]


@pytest.mark.parametrize("version", ["0.0.2", ""])
def test_a_move_ends_when_its_action_changes_while_it_asks_for_a_slot(gateway: Gateway, run: Run, version: str) -> None:
    run.read(1, paced=gateway.source)
    until(lambda: gateway.demand.waits)
    updated(gateway, version)
    until(lambda: gateway.migrations.moves[0].state is State.ENDED and not gateway.demand.waits)
    run.read_all()


def test_a_run_still_moves_to_a_worker_of_its_version_when_the_action_has_a_later_one(
    gateway: Gateway, run: Run
) -> None:
    updated(gateway, "0.0.2")
    gateway.ready(gateway.dest)
    caught_up(gateway, run)
    run.read_all()
    assert run.ends[0]["to"] == "h1"


@pytest.mark.parametrize("when", ["before", "while it waits"])
@pytest.mark.parametrize("version", ["0.0.2", ""])
def test_an_answer_whose_worker_was_lost_is_not_continued_by_another_version(
    gateway: Gateway, when: str, version: str
) -> None:
    run = Run(gateway, gateway.call())
    run.read(3, paced=gateway.source)
    if when == "before":
        later_is_ready(gateway)
        updated(gateway, version)
    else:
        changes = threading.Thread(target=lambda: (until(lambda: gateway.demand.waits), updated(gateway, version)))
        changes.start()
    gateway.source.drop_runs()
    with pytest.raises(WorkerLost, match=f"action {'is version 0.0.2 now' if version else 'was deleted'}"):
        run.read(1)
    assert gateway.dest.runs == []
    if when != "before":
        changes.join()


def test_an_answer_that_has_not_begun_may_be_made_by_a_later_version(gateway: Gateway) -> None:
    run = Run(gateway, gateway.call())
    gateway.source.cut_after.append(0)
    gateway.dest.pace = None
    assert next(run.steps) == "the worker was lost, continuing elsewhere"
    updated(gateway, "0.0.2")
    later_is_ready(gateway)
    run.read_all()


# other requests ----------------------------------------------------------------------------------------------------


def test_an_instance_that_drains_for_another_reason_keeps_its_runs(gateway: Gateway) -> None:
    run = Run(gateway, gateway.call())
    run.read(3, paced=gateway.source)
    gateway.room.instance_changed(replace(gateway.here, state=InstanceState.DRAINING))
    gateway.ready(gateway.dest)
    run.read_all()
    assert gateway.migrations.moves == []


def test_the_runs_of_a_pipeline_move_off_the_group_and_may_move_to_one(gateway: Gateway) -> None:
    gateway.source.pace = threading.Semaphore(0)
    gateway.room.instance_changed(replace(gateway.here, state=InstanceState.GONE))
    stages = [replace(gateway.here, n_stages=2, stage=s, instance_id=f"s{s}", slots=8) for s in (1, 0)]  # type: ignore[arg-type]
    for stage in stages:
        gateway.room.instance_changed(stage)
    run = Run(gateway, gateway.call())
    run.read(3, paced=gateway.source)
    gateway.here = stages[1]
    gateway.drain()  # it does not matter which stage's host is emptied: the first stage drains
    there = gateway.dest.ready(CHAT, instance="d0", group="d" * 32, n_stages=2)
    gateway.room.instance_changed(replace(there, instance_id="d1", stage=1, slots=0))  # type: ignore[arg-type]
    gateway.room.instance_changed(there)
    caught_up(gateway, run)
    run.read_all()
    assert {r["path"] for r in gateway.dest.runs} == {"/instances/d0/run"}


def test_a_moved_run_may_move_again(gateway: Gateway, run: Run) -> None:
    gateway.dest.pace = threading.Semaphore(2)
    there = gateway.ready(gateway.dest)
    caught_up(gateway, run)
    run.read(2)
    gateway.room.instance_changed(replace(there, state=InstanceState.DRAINING, drained=True))
    gateway.room.instance_changed(replace(gateway.here, state=InstanceState.GONE))
    gateway.room.instance_changed(replace(gateway.here, instance_id="back"))  # type: ignore[arg-type]
    run.read(1, paced=gateway.dest)
    comes_to(gateway, State.CAUGHT_UP, n_moves=2)
    run.read_all()
    assert [end["to"] for end in run.ends] == ["h1", "h0"]
