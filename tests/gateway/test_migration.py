"""Running requests whose worker leaves: real sockets, waiting room and threads; stand-in invokers; every failure rule.

The test itself is the request's thread: it takes one token after the other from ``llm_tokens``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from gateway.serving import move_rules
from gateway.serving.call import Call
from gateway.serving.demand import Demand
from gateway.serving.dispatch import Dispatcher
from gateway.serving.hangup import ClientGone, Hangup
from gateway.serving.invoker_pool import InvokerPool
from gateway.serving.migration import Migrations
from gateway.serving.move import Limits, Move
from gateway.serving.move_rules import State
from gateway.serving.moving import Moving
from gateway.serving.runs import llm_tokens
from gateway.serving.versions import Versions
from gateway.serving.waiting_room import WaitingRoom
from relay.protocol.messages import RunFinished, RunToken
from relay.state.api_keys import Subject
from tests.gateway.fake_invoker import FakeInvoker
from thaw.action import KIND_LLM, Action, Exec
from thaw.action import Limits as ActionLimits
from thaw.errors import InstanceBusy, InstanceGone, NotFound, PlatformError, Throttled, WorkerLost
from thaw.ids import ActionName, ActivationId, Namespace
from thaw.instance import InstanceRecord, InstanceState
from thaw.logs import Log

CHAT = ActionName("guest/chat")
WAIT_S = 20.0


class NotedDemand:
    """What the registry would be told, by the waiting room's word."""

    def __init__(self, room: WaitingRoom) -> None:
        self._room = room
        self.waits: dict[ActivationId, float] = {}  # since when

    def settle(self, call: Call) -> None:
        ticket = self._room.waiting(call.action.name, call.activation_id)
        if ticket is None:
            self.waits.pop(call.activation_id, None)
        else:
            self.waits[call.activation_id] = ticket.since_s

    def add(self, call: Call) -> None:
        call.announced_s = time.monotonic()
        self.settle(call)

    def withdraw(self, call: Call) -> None:
        self.settle(call)


class Watched(Migrations):
    """Notes every move."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.moves: list[Move] = []

    def begin(self, call: Call, source: InstanceRecord) -> Move:
        self.moves.append(super().begin(call, source))
        return self.moves[-1]


class Gateway:
    """A gateway's serving parts in this process, and two hosts."""

    def __init__(self, url: str, limits: Limits) -> None:
        self.source, self.dest = FakeInvoker(url, "h0"), FakeInvoker(url, "h1")
        self.source.pace = threading.Semaphore(0)
        self.room = WaitingRoom()
        self.demand = NotedDemand(self.room)
        self.pool = InvokerPool(self.source.token)
        log = Log("gateway")
        self.version = "0.0.1"  # of the action, as it is deployed; empty: it was deleted
        versions = Versions(self.action)
        self.dispatcher = Dispatcher(self.room, cast(Demand, self.demand), self.pool, versions, log)
        self.migrations = Watched(self.room, self.demand, self.pool, versions, log, limits)
        self.dispatcher.migrations = self.migrations
        self.here = self.ready(self.source)

    def ready(self, host: FakeInvoker, *, slots: int = 8) -> InstanceRecord:
        record = host.ready(CHAT, instance=f"on-{host.host}", group=host.host[-1] * 32, slots=slots)
        self.room.instance_changed(record)
        return record

    def drain(self) -> None:
        self.room.instance_changed(replace(self.here, state=InstanceState.DRAINING, drained=True))

    def action(self, _: ActionName = CHAT) -> Action:
        if not self.version:
            raise NotFound("The requested resource does not exist.")
        return Action(CHAT, Namespace("guest"), self.version, Exec(KIND_LLM), ActionLimits(timeout=60_000))

    def call(self, name: str = "a", **body: Any) -> Call:
        payload = {"messages": [], "max_tokens": 40, **body}
        subject = Subject(Namespace("guest"), "x")
        return Call(ActivationId(name), self.action(), subject, payload, Hangup(), endpoint="chat", seed=7)

    def close(self) -> None:
        self.pool.close()
        for host in (self.source, self.dest):
            host.pace = host.prefill_pace = None
            host.stop()


class Run:
    """A request that the test takes token by token."""

    def __init__(self, gateway: Gateway, call: Call) -> None:
        self.gateway, self.call = gateway, call
        self.steps = llm_tokens(gateway.dispatcher, call)
        self.tokens: list[RunToken] = []
        self.end: RunFinished | None = None

    def read(self, n: int = 1, *, paced: FakeInvoker | None = None) -> None:
        """Take ``n`` tokens, which ``paced`` may send now."""
        if paced is not None and paced.pace is not None:
            paced.pace.release(n)
        for step in self.steps:
            if isinstance(step, RunToken):
                self.tokens.append(step)
                n -= 1
            elif isinstance(step, RunFinished):
                self.end = step
            if n == 0:
                return

    def read_all(self) -> None:
        self.gateway.source.pace = self.gateway.dest.pace = None
        self.read(-1)

    def is_whole(self, n_tokens: int = 40) -> bool:
        """Every token came once and in order, and the answer ended."""
        texts = [t.text for t in self.tokens]
        indices = [t.index for t in self.tokens]
        return self.end is not None and indices == list(range(n_tokens)) and texts == [f"w{i} " for i in indices]

    @property
    def ends(self) -> list[dict[str, Any]]:
        return [dict(e.attrs) for e in self.call.events if e.name == "move.end"]


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture
def gateway(valkey_url: str, limits: Limits) -> Iterator[Gateway]:
    made = Gateway(valkey_url, limits)
    yield made
    made.close()


@pytest.fixture
def run(gateway: Gateway) -> Generator[Run, None, None]:
    """A run with three tokens, whose worker leaves while there is no other one."""
    made = Run(gateway, gateway.call())
    made.read(3, paced=gateway.source)
    gateway.drain()
    yield made
    made.steps.close()


def until(happens: Callable[[], object], what: str = "") -> None:
    until_s, tick = time.monotonic() + WAIT_S, threading.Event()
    while not happens():
        assert time.monotonic() < until_s, what or "it never happened"
        tick.wait(0.005)


def movers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name in ("mover", "move-asker")]


def nothing_is_held(gateway: Gateway) -> bool:
    """No slot, no place in the queue, no demand, no run at the hosts, no thread."""
    routes = {*gateway.room._table._routes.get(CHAT, {}).values(), *gateway.room._table._aside.values()}
    return (
        not gateway.room.counts()[0]
        and not gateway.demand.waits
        and all(r.inflight == 0 for r in routes)
        and gateway.source.running == gateway.dest.running == 0
        and not movers()
    )


def caught_up(gateway: Gateway, run: Run) -> None:
    """Begin the move, before the next token, and let it come to where the token boundary after it switches."""
    run.read(1, paced=gateway.source)
    until(lambda: gateway.migrations.moves and gateway.migrations.moves[-1].state is State.CAUGHT_UP)


def resumed(host: FakeInvoker, *, prefill_only: bool) -> list[int]:
    """The number of tokens with which each run came to the host."""
    values = [r["value"] for r in host.runs if r["value"]["prefill_only"] is prefill_only]
    return [len((v["resume"] or {"output_token_ids": ()})["output_token_ids"]) for v in values]


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
    assert run.is_whole()
    (moved,) = run.ends
    assert (moved["to"], moved["rounds"], moved["tokens"]) == ("h1", 1, 3 + first)
    assert moved["pause_s"] > 0
    assert moved["rounds_s"] > 0
    assert [e.name for e in run.call.events].count("move.begin") == 1
    assert run.call.losses == 0
    until(lambda: nothing_is_held(gateway))


@pytest.mark.parametrize("limits", [Limits(first_message_s=0.3)])
def test_the_deadline_of_the_switch_is_none_for_the_rest_of_the_answer(gateway: Gateway, run: Run) -> None:
    gateway.dest.pace = threading.Semaphore(1)
    gateway.ready(gateway.dest)
    caught_up(gateway, run)
    run.read(1)
    assert run.ends[0]["to"] == "h1"
    later = threading.Timer(0.6, gateway.dest.pace.release)  # longer than the switch may take
    later.start()
    run.read(1)
    later.join()
    run.read_all()
    assert run.is_whole()
    assert run.call.losses == 0
    until(lambda: nothing_is_held(gateway))


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
    until(lambda: gateway.migrations.moves[0].state is State.CAUGHT_UP)
    run.read_all()
    assert run.is_whole()
    assert resumed(gateway.dest, prefill_only=True)[1] == 21
    assert run.ends[0]["tokens"] == 300 + 21  # each token once
    until(lambda: nothing_is_held(gateway))


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
    until(lambda: gateway.migrations.moves[0].state is State.CAUGHT_UP)
    assert gateway.demand.waits == {}
    run.read_all()
    assert run.is_whole()
    until(lambda: nothing_is_held(gateway))


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
    assert sorted(movers()) == ["mover"] * 8
    gateway.dest.prefill_pace = None
    for run, move in zip(runs, gateway.migrations.moves, strict=True):
        until(lambda move=move: move.state is State.CAUGHT_UP)
        run.read_all()
        assert run.is_whole()
        assert run.ends[0]["to"] == "h1"
    until(lambda: nothing_is_held(gateway))


def test_a_run_whose_worker_stays_is_never_looked_at(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moving, "at_boundary", None)
    run = Run(gateway, gateway.call())
    run.read_all()
    assert run.is_whole()


# the rules for failures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("while_", ["asking", "computing", "caught up"])
def test_a_run_that_ends_first_is_answered_by_its_source_and_everything_is_given_back(
    gateway: Gateway, run: Run, while_: str
) -> None:
    if while_ == "computing":
        gateway.dest.prefill_pace = threading.Semaphore(0)
    if while_ != "asking":
        gateway.ready(gateway.dest)
    run.read(1 if while_ == "caught up" else 36, paced=gateway.source)  # a further token would be the boundary
    wanted = {"asking": State.ASKING, "computing": State.RESUMING, "caught up": State.CAUGHT_UP}[while_]
    until(lambda: gateway.migrations.moves[0].state is wanted)
    if while_ == "computing":
        until(lambda: gateway.dest.running)
    if while_ == "caught up":
        run.steps.close()  # its thread comes to no boundary any more
    else:
        run.read_all()
        assert run.is_whole()
    assert run.ends[0]["stayed"] == "the run ended first"
    assert resumed(gateway.dest, prefill_only=False) == []
    until(lambda: nothing_is_held(gateway))


@pytest.mark.parametrize("computing", [True, False])
def test_a_run_whose_source_is_lost_meanwhile_goes_on_at_the_destination_at_hand(
    gateway: Gateway, run: Run, computing: bool
) -> None:
    gateway.dest.prefill_pace = threading.Semaphore(0) if computing else None
    gateway.ready(gateway.dest, slots=1)  # its only slot is held by the move
    run.read(1, paced=gateway.source)
    wanted = State.RESUMING if computing else State.CAUGHT_UP
    until(lambda: gateway.migrations.moves[0].state is wanted)
    if computing:
        until(lambda: gateway.dest.running)
    move = gateway.migrations.moves[0]
    if not computing:
        move.state = State.RESUMING  # it catches up just after the boundary
    gateway.source.drop_runs()
    run.read_all()
    assert run.is_whole()
    assert resumed(gateway.dest, prefill_only=False) == [4]
    assert run.ends[0]["to"] == "h1"
    assert run.call.losses == 1
    until(lambda: nothing_is_held(gateway))


def test_a_run_whose_source_is_lost_while_it_asks_waits_as_every_run_that_lost_its_worker(
    gateway: Gateway, run: Run
) -> None:
    run.read(1, paced=gateway.source)
    gateway.source.drop_runs()
    gateway.source.pace = None
    reader = threading.Thread(target=run.read_all)
    reader.start()
    until(lambda: run.call.losses and gateway.demand.waits)
    assert gateway.room.counts()[0] == 1
    assert gateway.demand.waits == {"a": run.call.received_s}
    gateway.ready(gateway.dest)
    reader.join(WAIT_S)
    assert run.is_whole()
    until(lambda: nothing_is_held(gateway))


FAULTS: dict[str, Callable[[FakeInvoker], None]] = {
    "is lost in a round": lambda d: d.cut_after.extend([0]),
    "fails a round": lambda d: d.failures.append(PlatformError("the engine is full")),
    "reports its loss in a round": lambda d: d.failures.append(WorkerLost("the engine failed")),
    "has left": lambda d: d.refusals.append(InstanceGone("no such instance")),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_when_the_destination_fails_the_source_goes_on_and_another_one_is_tried(
    gateway: Gateway, run: Run, fault: str
) -> None:
    FAULTS[fault](gateway.dest)
    gateway.ready(gateway.dest)
    run.read(1, paced=gateway.source)
    until(lambda: gateway.migrations.moves[0].state is State.ENDED)
    run.read(1, paced=gateway.source)
    gateway.ready(gateway.dest)  # it is there again
    caught_up(gateway, run)
    run.read_all()
    assert run.is_whole()
    failed, moved = run.ends
    assert failed["stayed"]
    assert moved["to"] == "h1"
    until(lambda: nothing_is_held(gateway))


@pytest.mark.parametrize("limits", [Limits(round_s=0.2, first_message_s=0.2)])
@pytest.mark.parametrize("in_a_round", [True, False])
def test_a_destination_that_hangs_counts_as_failed_after_a_deadline_and_no_token_is_missing(
    gateway: Gateway, run: Run, in_a_round: bool
) -> None:
    gateway.dest.pace = threading.Semaphore(0)
    gateway.dest.prefill_pace = threading.Semaphore(0) if in_a_round else None
    gateway.ready(gateway.dest)
    run.read(1, paced=gateway.source)
    if in_a_round:
        until(lambda: gateway.migrations.moves[0].state is State.ENDED)
    else:
        until(lambda: gateway.migrations.moves[0].state is State.CAUGHT_UP)
    run.read(1, paced=gateway.source)
    assert gateway.migrations.moves[0].state is State.ENDED
    assert len(run.tokens) == 5
    assert gateway.dest.closed.acquire(timeout=WAIT_S)  # what it computed is dropped
    gateway.dest.prefill_pace = None
    run.read_all()
    assert run.is_whole()
    until(lambda: nothing_is_held(gateway))


@pytest.mark.parametrize("fault", ["is lost", "fails", "has left"])
def test_a_destination_that_does_not_take_the_run_over_leaves_it_with_the_source(
    gateway: Gateway, run: Run, fault: str
) -> None:
    gateway.ready(gateway.dest)
    caught_up(gateway, run)
    match fault:
        case "is lost":
            gateway.dest.cut_after.append(0)
        case "fails":
            gateway.dest.failures.append(WorkerLost("the engine failed"))
        case "has left":
            gateway.dest.refusals.append(InstanceGone("no such instance"))
    run.read(1, paced=gateway.source)
    assert len(run.tokens) == 5
    assert gateway.migrations.moves[0].state is State.ENDED
    assert gateway.source.running == 1
    run.read_all()
    assert run.is_whole()
    until(lambda: nothing_is_held(gateway))


def test_destinations_are_tried_three_times_at_most(gateway: Gateway, run: Run) -> None:
    gateway.dest.failures.extend(Throttled("no") for _ in range(9))
    gateway.ready(gateway.dest)
    for n in range(1, 4):
        run.read(2, paced=gateway.source)
        until(lambda n=n: len(gateway.migrations.moves) == n and gateway.migrations.moves[-1].state is State.ENDED)
    run.read_all()
    assert run.is_whole()
    assert len(gateway.migrations.moves) == len(run.ends) == 3
    until(lambda: nothing_is_held(gateway))


def test_what_failed_in_one_drain_is_tried_again_in_the_next(gateway: Gateway, run: Run) -> None:
    gateway.dest.failures.extend(Throttled("no") for _ in range(3))
    gateway.ready(gateway.dest)
    for n in range(1, 4):
        run.read(2, paced=gateway.source)
        until(lambda n=n: len(gateway.migrations.moves) == n and gateway.migrations.moves[-1].state is State.ENDED)
    run.read(2, paced=gateway.source)
    assert len(gateway.migrations.moves) == 3
    gateway.room.instance_changed(replace(gateway.here))
    run.read(1, paced=gateway.source)
    gateway.drain()
    caught_up(gateway, run)
    run.read_all()
    assert run.is_whole()
    assert run.ends[-1]["to"] == "h1"
    until(lambda: nothing_is_held(gateway))


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
    until(lambda: nothing_is_held(gateway))


def test_a_start_that_fails_elsewhere_leaves_the_run_with_its_source(gateway: Gateway, run: Run) -> None:
    run.read(1, paced=gateway.source)
    until(lambda: gateway.demand.waits)
    gateway.room.fail(CHAT, ["a"], PlatformError("no host has room"))  # type: ignore[list-item]
    until(lambda: gateway.migrations.moves[0].state is State.ENDED)
    run.read(1, paced=gateway.source)
    assert run.ends[0] == {"stayed": "no host has room", "rounds": 0, "tokens": 0, "rounds_s": 0.0}
    run.read_all()
    assert run.is_whole()
    until(lambda: nothing_is_held(gateway))


def test_a_run_whose_slot_others_took_asks_again_less_and_less_often_and_moves(
    gateway: Gateway, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.dest.refusals.extend(InstanceBusy("all slots are taken") for _ in range(5))
    gateway.ready(gateway.dest)
    run.read(1, paced=gateway.source)
    (move,) = gateway.migrations.moves
    asked: list[int] = []
    retry = gateway.room.retry
    monkeypatch.setattr(gateway.room, "retry", lambda action: (asked.append(move.n_refusals), retry(action)))
    until_s = time.monotonic() + WAIT_S
    while move.state is not State.CAUGHT_UP and time.monotonic() < until_s:
        run.read(1, paced=gateway.source)  # each token is a boundary, and none of them begins another move
        threading.Event().wait(0.1)
    assert asked == [1, 2, 3, 4]  # each time after a longer pause
    assert not gateway.dest.refusals  # and so many refusals are no three failures
    run.read_all()
    assert run.is_whole()
    assert gateway.migrations.moves == [move]
    assert [e.name for e in run.call.events if e.name.startswith("move.")] == ["move.begin", "move.end"]
    until(lambda: nothing_is_held(gateway))


def test_a_run_whose_slot_others_took_before_the_switch_stays_and_asks_again(gateway: Gateway, run: Run) -> None:
    gateway.ready(gateway.dest)
    caught_up(gateway, run)
    gateway.dest.refusals.extend(InstanceBusy("all slots are taken") for _ in range(2))
    run.read(1, paced=gateway.source)
    assert gateway.source.running == 1
    (move,) = gateway.migrations.moves
    until(lambda: move.state is State.CAUGHT_UP)  # again
    run.read_all()
    assert run.is_whole()
    assert run.ends[-1]["to"] == "h1"
    until(lambda: nothing_is_held(gateway))


def test_the_last_slot_of_the_destination_is_asked_for_at_once_again_when_a_round_has_just_ended_there(
    gateway: Gateway, run: Run
) -> None:
    gateway.dest.frees_late = True
    gateway.ready(gateway.dest, slots=1)
    caught_up(gateway, run)
    run.read(1)
    assert run.ends[0]["to"] == "h1"
    run.read_all()
    assert run.is_whole()
    until(lambda: nothing_is_held(gateway))


@pytest.mark.parametrize("when", ["asking", "computing", "switching"])
def test_a_client_that_leaves_frees_both_ends_and_is_no_fault_of_the_destination(
    gateway: Gateway, run: Run, when: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.dest.pace = threading.Semaphore(0)
    if when == "computing":
        gateway.dest.prefill_pace = threading.Semaphore(0)
    if when != "asking":
        gateway.ready(gateway.dest)
    run.read(1, paced=gateway.source)
    if when == "asking":
        until(lambda: gateway.demand.waits)
    if when == "computing":
        until(lambda: gateway.dest.running)
    if when == "switching":
        until(lambda: gateway.migrations.moves[0].state is State.CAUGHT_UP)
        leaves = threading.Thread(target=lambda: (until(lambda: gateway.dest.running), run.call.hangup.set()))
        leaves.start()
    else:
        run.call.hangup.set()
    with pytest.raises(ClientGone):
        run.read(1)
    assert run.ends[0]["stayed"] == "the run ended first"
    assert "move_failed" not in capsys.readouterr().err
    until(lambda: nothing_is_held(gateway))


@pytest.mark.parametrize("when", ["asking", "computing", "caught up"])
def test_a_drain_that_is_withdrawn_ends_the_move_and_the_source_goes_on_and_is_a_route_again(
    gateway: Gateway, run: Run, when: str
) -> None:
    if when == "computing":
        gateway.dest.prefill_pace = threading.Semaphore(0)
    if when != "asking":
        gateway.ready(gateway.dest)
    run.read(1, paced=gateway.source)
    wanted = {"asking": State.ASKING, "computing": State.RESUMING, "caught up": State.CAUGHT_UP}[when]
    until(lambda: gateway.migrations.moves[0].state is wanted)
    gateway.room.instance_changed(gateway.here)
    run.read(1, paced=gateway.source)
    assert gateway.migrations.moves[0].state is State.ENDED
    (route,) = (r for r in gateway.room._table._routes[CHAT].values() if r.record.host_id == "h0")
    assert (route.inflight, route.leaves) == (1, False)  # it knows its run still
    run.read_all()
    assert run.is_whole()
    assert [end["stayed"] for end in run.ends] == ["the host is not emptied after all"]
    assert resumed(gateway.dest, prefill_only=False) == []
    until(lambda: nothing_is_held(gateway))


@pytest.mark.parametrize("limits", [Limits(boundary_s=0.05)])
def test_a_run_whose_client_does_not_read_gives_its_slot_at_the_destination_back(gateway: Gateway, run: Run) -> None:
    gateway.ready(gateway.dest)
    run.read(1, paced=gateway.source)
    until(lambda: gateway.migrations.moves[0].state is State.ENDED)
    until(lambda: not movers())
    (route,) = gateway.room._table._routes[CHAT].values()
    assert route.inflight == 0
    run.read_all()
    assert run.is_whole()
    assert "read no token" in run.ends[0]["stayed"]
    until(lambda: nothing_is_held(gateway))


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
    until(lambda: nothing_is_held(gateway))


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
    assert run.is_whole()
    until(lambda: nothing_is_held(gateway))


def test_there_is_no_switch_to_a_destination_whose_rounds_are_slow(
    gateway: Gateway, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(move_rules, "SLOW_ROUND_S", -1.0)
    gateway.ready(gateway.dest)
    for n in range(1, 4):
        run.read(2, paced=gateway.source)
        until(lambda n=n: len(gateway.migrations.moves) == n and gateway.migrations.moves[-1].state is State.ENDED)
    run.read_all()
    assert run.is_whole()
    assert resumed(gateway.dest, prefill_only=False) == []
    assert all("for a round" in end["stayed"] for end in run.ends)
    until(lambda: nothing_is_held(gateway))


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
    until(lambda: gateway.migrations.moves[1].state is State.CAUGHT_UP)
    for run in runs:
        run.read_all()
        assert run.is_whole()
    assert "a row that cannot be read" in runs[0].ends[0]["stayed"]
    assert runs[1].ends[0]["to"] == "h1"
    until(lambda: nothing_is_held(gateway))


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
    until(lambda: gateway.migrations.moves[1].state is State.CAUGHT_UP)
    run.read_all()
    assert run.is_whole()
    assert run.ends[-1]["to"] == "h1"
    until(lambda: nothing_is_held(gateway))


# one answer, one model ---------------------------------------------------------------------------------------------


def updated(gateway: Gateway, version: str) -> None:
    gateway.version = version
    gateway.room.action_changed(CHAT)


def test_a_run_moves_to_no_other_version_of_its_action(gateway: Gateway, run: Run) -> None:
    there = gateway.dest.ready(CHAT, instance="later", group="d" * 32, version="0.0.2")
    gateway.room.instance_changed(there)
    updated(gateway, "0.0.2")
    run.read(1, paced=gateway.source)
    until(lambda: gateway.migrations.moves[0].state is State.ENDED)
    assert not gateway.demand.waits  # which would start another worker of the later version
    run.read_all()
    assert run.is_whole()
    assert gateway.dest.runs == []
    (stayed,) = run.ends
    assert "Version 0.0.1 of guest/chat began this answer, and the action is version 0.0.2 now" in stayed["stayed"]
    until(lambda: nothing_is_held(gateway))


@pytest.mark.parametrize("version", ["0.0.2", ""])
def test_a_move_ends_when_its_action_changes_while_it_asks_for_a_slot(gateway: Gateway, run: Run, version: str) -> None:
    run.read(1, paced=gateway.source)
    until(lambda: gateway.demand.waits)
    updated(gateway, version)
    until(lambda: gateway.migrations.moves[0].state is State.ENDED and not gateway.demand.waits)
    run.read_all()
    assert run.is_whole()
    until(lambda: nothing_is_held(gateway))


def test_a_run_still_moves_to_a_worker_of_its_version_when_the_action_has_a_later_one(
    gateway: Gateway, run: Run
) -> None:
    updated(gateway, "0.0.2")
    gateway.ready(gateway.dest)
    caught_up(gateway, run)
    run.read_all()
    assert run.is_whole()
    assert run.ends[0]["to"] == "h1"
    until(lambda: nothing_is_held(gateway))


@pytest.mark.parametrize("when", ["before", "while it waits"])
@pytest.mark.parametrize("version", ["0.0.2", ""])
def test_an_answer_whose_worker_was_lost_is_not_continued_by_another_version(
    gateway: Gateway, when: str, version: str
) -> None:
    run = Run(gateway, gateway.call())
    run.read(3, paced=gateway.source)
    if when == "before":
        there = gateway.dest.ready(CHAT, instance="later", group="d" * 32, version="0.0.2")
        gateway.room.instance_changed(there)
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
    until(lambda: nothing_is_held(gateway))


def test_an_answer_that_has_not_begun_may_be_made_by_a_later_version(gateway: Gateway) -> None:
    run = Run(gateway, gateway.call())
    gateway.source.cut_after.append(0)
    gateway.dest.pace = None
    assert next(run.steps) == "the worker was lost, continuing elsewhere"
    updated(gateway, "0.0.2")
    there = gateway.dest.ready(CHAT, instance="later", group="d" * 32, version="0.0.2")
    gateway.room.instance_changed(there)
    run.read_all()
    assert run.is_whole()


# other requests ----------------------------------------------------------------------------------------------------


def test_an_instance_that_drains_for_another_reason_keeps_its_runs(gateway: Gateway) -> None:
    run = Run(gateway, gateway.call())
    run.read(3, paced=gateway.source)
    gateway.room.instance_changed(replace(gateway.here, state=InstanceState.DRAINING))
    gateway.ready(gateway.dest)
    run.read_all()
    assert run.is_whole()
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
    gateway.drain()  # of which stage the host is emptied makes no difference: the first one drains
    there = gateway.dest.ready(CHAT, instance="d0", group="d" * 32, n_stages=2)
    gateway.room.instance_changed(replace(there, instance_id="d1", stage=1, slots=0))  # type: ignore[arg-type]
    gateway.room.instance_changed(there)
    caught_up(gateway, run)
    run.read_all()
    assert run.is_whole()
    assert {r["path"] for r in gateway.dest.runs} == {"/instances/d0/run"}
    until(lambda: nothing_is_held(gateway))


def test_a_moved_run_may_move_again(gateway: Gateway, run: Run) -> None:
    gateway.dest.pace = threading.Semaphore(2)
    there = gateway.ready(gateway.dest)
    caught_up(gateway, run)
    run.read(2)
    gateway.room.instance_changed(replace(there, state=InstanceState.DRAINING, drained=True))
    gateway.room.instance_changed(replace(gateway.here, state=InstanceState.GONE))
    gateway.room.instance_changed(replace(gateway.here, instance_id="back"))  # type: ignore[arg-type]
    run.read(1, paced=gateway.dest)
    run.read(1, paced=gateway.dest)
    until(lambda: len(gateway.migrations.moves) == 2 and gateway.migrations.moves[1].state is State.CAUGHT_UP)
    run.read_all()
    assert run.is_whole()
    assert [end["to"] for end in run.ends] == ["h1", "h0"]
    until(lambda: nothing_is_held(gateway))
