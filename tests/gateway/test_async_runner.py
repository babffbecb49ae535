"""The runner of 202s when the state server fails at the wrong moment."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import redis

from gateway.processor import Processor
from gateway.serving import async_runner
from gateway.serving.actions.action_cache import Actions
from gateway.serving.async_runner import AsyncRunner
from gateway.serving.call import Call
from gateway.serving.dispatch import Dispatcher
from gateway.serving.recorder import Recorder
from gateway.serving.routing.demand import Demand
from gateway.serving.routing.invoker_pool import InvokerPool
from gateway.serving.routing.versions import Versions
from gateway.serving.routing.waiting_room import WaitingRoom
from gateway.serving.runs import Outcome
from relay.state import keys, redis_link
from relay.state.pending import PendingClaims
from relay.state.records import Records
from relay.state.registry import Registry
from tests.gateway.calls import HELLO, accepted, action_of
from tests.gateway.shared_processor import shared
from tests.gateway.waits import until
from thaw import wire
from thaw.action import KIND_LLM, KIND_SEQUENCE, Action, Exec
from thaw.activation import ActivationStatus
from thaw.config import parse_llm_config
from thaw.errors import Unavailable
from thaw.ids import ActionName, ActivationId, GatewayId, Namespace
from thaw.logs import Log

Run = Callable[..., AbstractContextManager[AsyncRunner]]
OURS, OWNER = GatewayId("ours"), GatewayId("owner")


class _Failing(Registry):
    """The first question about a lease raises an error."""

    failed = False

    def is_gateway_alive(self, gateway_id: GatewayId) -> bool:
        if not self.failed:
            self.failed = True
            raise Unavailable("away")
        return super().is_gateway_alive(gateway_id)


class _Claims(PendingClaims):
    handed: threading.Event

    def hand_to(self, owner: GatewayId, entry_id: bytes) -> None:
        super().hand_to(owner, entry_id)
        self.handed.set()


OK = Outcome(ActivationStatus.SUCCESS, {})


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis_link.connect(valkey_url) as connected:
        yield connected


@pytest.fixture
def run(client: redis.Redis, valkey_url: str) -> Run:
    """Run 202s as the gateway OURS does, during the block.  All parts are real except ``execute``."""

    @contextmanager
    def run(
        execute: Callable[[Call], Outcome],
        registry: Registry | None = None,
        claims: PendingClaims | None = None,
        processor: Processor | None = None,
    ) -> Iterator[AsyncRunner]:
        given = registry or Registry(client), claims or PendingClaims(client, OURS), processor or Processor()
        runner = runner_of(client, valkey_url, execute, *given)
        runner.start()
        try:
            yield runner
        finally:
            runner.stop()

    return run


def runner_of(
    client: redis.Redis,
    url: str,
    execute: Callable[[Call], Outcome],
    registry: Registry,
    claims: PendingClaims,
    processor: Processor,
) -> AsyncRunner:
    log, records = Log("gateway"), Records(client)
    pool, room = InvokerPool("token"), WaitingRoom()
    demand = Demand(room, registry, OURS, log)
    actions, recorder = Actions(client, records), Recorder(records, pool, log)
    dispatcher = Dispatcher(room, demand, pool, Versions(actions.get), log)
    parts = execute, dispatcher, demand, actions, records, registry, claims, recorder
    return AsyncRunner(url, OURS, *parts, 2, log, processor)


def deploy(client: redis.Redis, *names: str) -> None:
    for name in names:
        Actions(client, Records(client)).put(action_of(name), last=None)


def test_what_another_gateway_runs_is_left_to_it_though_the_first_look_at_it_failed(
    client: redis.Redis, run: Run
) -> None:
    def never(call: Call) -> Outcome:
        pytest.fail(f"{call.activation_id} was run twice")

    records, registry, claims = Records(client), _Failing(client), _Claims(client, OURS)
    claims.handed = threading.Event()
    registry.gateway_alive(OWNER)
    records.accept(accepted("a"), OWNER)
    with run(never, registry, claims):
        assert claims.handed.wait(60)
    held = cast(Any, client.xpending_range(keys.PENDING, keys.PENDING_GROUP, "-", "+", 10))
    assert [row["consumer"] for row in held] == [OWNER.encode()]
    assert records.activation(ActivationId("a")) is None


def test_a_function_that_a_lost_gateway_had_started_may_not_start_again(client: redis.Redis, run: Run) -> None:
    """A function that two gateways hold at once may not start again either: the first gateway to ask gets the run."""
    asked: queue.Queue[bool] = queue.Queue()

    def execute(call: Call) -> Outcome:
        asked.put(call.claim())
        return OK

    records = Records(client)
    deploy(client, HELLO)
    for name in ("a", "b"):
        records.accept(accepted(name))
    assert records.mark_started(ActivationId("a"), "lost")
    with run(execute):
        answers = {asked.get(timeout=60), asked.get(timeout=60)}
    assert answers == {True, False}
    assert records.mark_started(ActivationId("b"), OURS)
    assert not records.mark_started(ActivationId("b"), "another")


def flood(client: redis.Redis, namespace: str, n: int) -> None:
    """So many 202s of a namespace as gateways have accepted them."""
    pipe = client.pipeline(transaction=False)
    for i in range(n):
        pending = accepted(f"{namespace}{i}", f"{namespace}/f", {"n": i})
        pipe.xadd(keys.PENDING, {"p": wire.dumps(pending), "id": pending.activation_id, "o": ""})
    pipe.execute()


def test_a_202_computes_when_it_has_its_turn(client: redis.Redis, run: Run) -> None:
    processor, ran = shared(), threading.Event()

    def execute(call: Call) -> Outcome:
        ran.set()
        return OK

    deploy(client, "flood/f")
    flood(client, "flood", 1)
    with ExitStack() as running:
        with processor.computing(Namespace("honest")):
            running.enter_context(run(execute, processor=processor))
            until(lambda: processor.n_in_line, most_s=60)
            assert not ran.is_set()
        assert ran.wait(60)


def test_a_202_waits_for_few_of_the_ten_thousand_before_it(
    client: redis.Redis, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_runner, "READ_AHEAD", 20)
    gate, order = threading.Semaphore(0), queue.Queue[tuple[str, Any]]()

    def execute(call: Call) -> Outcome:
        assert gate.acquire(timeout=200)
        order.put((call.activation_id, call.payload))
        return OK

    for name, n in (("flood", 9_000), ("more", 1_000), ("honest", 1)):
        deploy(client, f"{name}/f")
        flood(client, name, n)
    with run(execute) as runner:
        until(lambda: runner.holds(ActivationId("honest0")), most_s=200)
        gate.release(12)
        first = [order.get(timeout=60) for _ in range(12)]
        assert ("honest0", {"n": 0}) in first, "two ran, and each of the others had at most two turns"
        assert {payload["n"] for name, payload in first if name.startswith("more")} >= {0, 1}
        gate.release(100)
        beyond = [order.get(timeout=60) for _ in range(100)]
        assert all(name.endswith(str(payload["n"])) for name, payload in beyond), "arguments are read again"
        ran = [name for name, _ in (*first, *beyond)]
        assert len(set(ran)) == len(ran)
    gate.release(10)
    runner._pool.shutdown()


def adapted(**changes: Any) -> Action:
    model = {"base": "s3://models/base", "adapter": "s3://models/a"}
    config = parse_llm_config({"kind": "llm:vllm", "model": model, **changes})
    return action_of("guest/a", KIND_LLM, config=config)


PLAIN = adapted(model={"uri": "s3://models/plain"})
SEQUENCE = replace(PLAIN, exec=Exec(KIND_SEQUENCE, components=(ActionName("guest/b"),)), config=None)
OTHER_ADAPTER = adapted(model={"base": "s3://models/base", "adapter": "s3://models/new"})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (adapted(), adapted(scaling={"max_batch": 2})),
        (adapted(), PLAIN),
        (PLAIN, adapted()),
        (PLAIN, SEQUENCE),
        (adapted(), OTHER_ADAPTER),
    ],
    ids=["another pool", "out of a pool", "into a pool", "a sequence", "another adapter"],
)
def test_the_demand_of_a_202_ends_whatever_its_action_has_become(
    client: redis.Redis, run: Run, before: Action, after: Action
) -> None:
    entered, gate, ran = threading.Semaphore(0), threading.Semaphore(0), queue.Queue[ActivationId]()
    registry, records = Registry(client), Records(client)
    actions, demand = Actions(client, records), Demand(WaitingRoom(), registry, OURS, Log("gateway"))

    def execute(call: Call) -> Outcome:
        entered.release()
        assert gate.acquire(timeout=60)
        if not call.action.is_composed:
            demand.withdraw(call)  # as the dispatcher does
        ran.put(call.activation_id)
        return OK

    actions.put(before, last=None)
    with run(execute, registry) as runner:
        for name in ("1", "2", "3"):  # two of them run, and the last one waits
            records.accept(accepted(name, before.name))
        for _ in range(2):
            assert entered.acquire(timeout=60)
        until(lambda: [d.action for d in registry.demand() if d.activation_id == "3"] == [before.served_by], most_s=60)
        actions.put(replace(after, version="0.0.2"), last="0.0.1", old=before)
        runner._actions.forget()
        gate.release(3)
        assert {ran.get(timeout=60) for _ in range(3)} == {"1", "2", "3"}
    runner._pool.shutdown()
    assert registry.demand() == []
