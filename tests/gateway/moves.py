"""Running requests that move, in one process: real sockets, waiting room and threads; stand-in invokers.

The test itself is the request's thread: it takes one token after the other from ``llm_tokens``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from gateway.serving.call import Call
from gateway.serving.dispatch import Dispatcher
from gateway.serving.hangup import Hangup
from gateway.serving.moving import move_rules
from gateway.serving.moving.migration import Migrations
from gateway.serving.moving.move import Limits, Move
from gateway.serving.moving.move_rules import State
from gateway.serving.routing.demand import Demand
from gateway.serving.routing.invoker_pool import InvokerPool
from gateway.serving.routing.versions import Versions
from gateway.serving.routing.waiting_room import WaitingRoom
from gateway.serving.runs import llm_tokens
from relay.protocol.messages import RunFinished, RunToken
from relay.state.api_keys import Subject
from tests.gateway.fake_invoker import FakeInvoker
from tests.gateway.waits import WAIT_S, until
from thaw.action import KIND_LLM, Action, Exec
from thaw.action import Limits as ActionLimits
from thaw.errors import NotFound
from thaw.ids import ActionName, ActivationId, Namespace
from thaw.instance import InstanceRecord, InstanceState
from thaw.logs import Log

CHAT = ActionName("guest/chat")


class NotedDemand:
    """Records the demand that the waiting room would write to the registry."""

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
        self.version = "0.0.1"  # the deployed version of the action; empty: it was deleted
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
        self.is_whole()

    def is_whole(self, n_tokens: int = 40) -> None:
        """Every token came once and in order, and the answer ended."""
        assert [(t.index, t.text) for t in self.tokens] == [(i, f"w{i} ") for i in range(n_tokens)]
        assert self.end is not None

    @property
    def ends(self) -> list[dict[str, Any]]:
        return [dict(e.attrs) for e in self.call.events if e.name == "move.end"]


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture
def gateway(valkey_url: str, limits: Limits, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    """Only ``limits`` bounds a round and a switch.  On a busy machine, a round of these hosts may take longer than a
    client should wait.  Whatever a test does, nothing is held when its runs have ended.
    """
    monkeypatch.setattr(move_rules, "SLOW_ROUND_S", WAIT_S)
    monkeypatch.setattr(move_rules, "PATIENCE_S", WAIT_S)
    made = Gateway(valkey_url, limits)
    yield made
    until(lambda: nothing_is_held(made), "something is held")
    made.close()


@pytest.fixture(name="run")
def leaving(gateway: Gateway) -> Generator[Run, None, None]:
    """A run with three tokens, whose worker leaves while there is no other one."""
    made = Run(gateway, gateway.call())
    made.read(3, paced=gateway.source)
    gateway.drain()
    yield made
    made.steps.close()


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


def comes_to(gateway: Gateway, state: State, n_moves: int = 1) -> None:
    """Wait until so many moves have begun, and the last one is in this state."""
    moves = gateway.migrations.moves
    until(lambda: len(moves) == n_moves and moves[-1].state is state, f"no {state}")


def begins(gateway: Gateway, run: Run, state: State, n_moves: int = 1) -> None:
    """Begin the move, before the next token, and let it come to this state."""
    run.read(1, paced=gateway.source)
    comes_to(gateway, state, n_moves)
    if state is State.RESUMING:
        until(lambda: gateway.dest.running)


def caught_up(gateway: Gateway, run: Run, n_moves: int = 1) -> None:
    """Begin the move, and let it come to where the token boundary after it switches."""
    begins(gateway, run, State.CAUGHT_UP, n_moves)


def resumed(host: FakeInvoker, *, prefill_only: bool) -> list[int]:
    """The number of tokens with which each run came to the host."""
    values = [r["value"] for r in host.runs if r["value"]["prefill_only"] is prefill_only]
    return [len((v["resume"] or {"output_token_ids": ()})["output_token_ids"]) for v in values]
