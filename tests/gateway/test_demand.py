"""Demand in the registry, and the leases by which gateways judge one another, tested without a gateway process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
import redis

from gateway.core import OwnHeartbeats
from gateway.serving.routing.demand import Demand
from gateway.serving.routing.waiting_room import Ticket, WaitingRoom
from relay.protocol.messages import DemandAdded
from relay.state import redis_link
from relay.state.registry import Registry
from tests.conftest import ValkeyServer
from tests.gateway.calls import GUEST, HELLO, call_of
from tests.gateway.conftest import Start
from thaw.ids import ActionName, ActivationId, GatewayId
from thaw.logs import Log

OURS, OTHERS = GatewayId("ours"), GatewayId("others")


class Slow(Registry):
    """A registry in which ``meanwhile`` runs just before a write arrives."""

    meanwhile: Callable[[], None] | None = None

    def add_demand(self, demand: DemandAdded) -> None:
        self._now()
        super().add_demand(demand)

    def drop_demand(self, activation_id: ActivationId, action: ActionName, gateway: GatewayId) -> None:
        self._now()
        super().drop_demand(activation_id, action, gateway)

    def _now(self) -> None:
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()


class Parts:
    """The demand of one gateway, its waiting room, and the registry."""

    def __init__(self, client: redis.Redis) -> None:
        self.registry, self.room = Slow(client), WaitingRoom()
        self.demand = Demand(self.room, self.registry, OURS, Log("gateway"))

    def enter(self, activation_id: str) -> Ticket:
        ticket = Ticket(ActivationId(activation_id), HELLO, "0.0.1")
        self.room.enter(ticket)
        return ticket

    def added(self, activation_id: str, gateway: GatewayId = OURS) -> None:
        demand = DemandAdded(ActivationId(activation_id), HELLO, GUEST, gateway, 0, 0)
        self.registry.add_demand(demand)

    @property
    def names(self) -> set[str]:
        return {str(d.activation_id) for d in self.registry.demand()}


@pytest.fixture
def parts(valkey_url: str) -> Iterator[Parts]:
    with redis_link.connect(valkey_url) as client:
        yield Parts(client)


def test_demand_that_could_not_be_withdrawn_is_withdrawn_later(own_valkey: ValkeyServer) -> None:
    with redis_link.connect(own_valkey.url) as client:
        parts, call = Parts(client), call_of("a")
        parts.demand.add(call)
        own_valkey.kill()
        parts.demand.withdraw(call)
        own_valkey.start()
        assert parts.names == {"a"}
        parts.demand.retry()
        assert parts.names == set()


def test_a_run_that_ends_leaves_the_demand_of_its_activations_next_run_at_another_gateway(parts: Parts) -> None:
    ended = call_of("a")
    parts.demand.add(ended)
    parts.added("a", OTHERS)
    parts.demand.withdraw(ended)
    assert [d.gateway for d in parts.registry.demand()] == [OTHERS]


def test_a_run_that_ends_leaves_the_demand_of_its_activations_next_run_at_this_gateway(parts: Parts) -> None:
    ended, following = call_of("a"), call_of("a")
    parts.demand.add(ended)
    ticket = parts.enter("a")
    parts.demand.add(following)
    parts.demand.withdraw(ended)
    assert parts.names == {"a"}
    parts.room.leave(ticket)
    parts.demand.withdraw(following)
    assert parts.names == set()


def test_a_run_that_begins_to_wait_while_the_last_one_withdraws_keeps_its_demand(parts: Parts) -> None:
    ended, following = call_of("a"), call_of("a")
    parts.demand.add(ended)
    parts.registry.meanwhile = lambda: (parts.enter("a"), parts.demand.add(following))
    parts.demand.withdraw(ended)
    assert parts.names == {"a"}


def test_a_late_withdrawal_leaves_the_demand_of_a_request_that_has_moved_to_another_pool(parts: Parts) -> None:
    parts.added("a")
    parts.registry.drop_demand(ActivationId("a"), ActionName("guest/before"), OURS)
    assert parts.names == {"a"}


def test_a_reconnection_adds_what_waits_and_drops_what_nobody_holds(parts: Parts) -> None:
    for name, gateway in (("stray", OURS), ("held", OURS), ("theirs", OTHERS)):
        parts.added(name, gateway)
    parts.enter("waits")
    parts.demand.restore(parts.room.reload(()), lambda activation_id: activation_id == "held")
    assert parts.names == {"waits", "held", "theirs"}


def test_who_left_before_its_demand_was_restored_leaves_none(parts: Parts) -> None:
    ticket = parts.enter("a")

    def served() -> None:
        parts.room.leave(ticket)
        parts.registry.drop_demand(ticket.activation_id, HELLO, OURS)

    parts.registry.meanwhile = served
    parts.demand.restore(parts.room.reload(()), lambda _: False)
    assert parts.names == set()


def test_who_comes_back_while_its_old_demand_is_dropped_keeps_the_new(parts: Parts) -> None:
    parts.added("a")
    parts.registry.meanwhile = lambda: (parts.enter("a"), parts.added("a"))
    parts.demand.restore((), lambda _: False)
    assert parts.names == {"a"}


@pytest.mark.parametrize(
    ("beats_s", "claims"),
    [
        ((0, 3, 6), [True, True, True]),
        ((0, 3, 12, 15, 18, 21, 23), [True, True, False, False, False, False, True]),
    ],
)
def test_no_gateway_is_taken_for_dead_while_leases_may_have_ended_for_want_of_a_server(
    beats_s: tuple[int, ...], claims: list[bool]
) -> None:
    own = OwnHeartbeats(3.0)
    assert [own.may_claim(now_s) for now_s in beats_s] == claims


def test_demand_that_was_added_ahead_is_said_again_until_its_run_has_begun(parts: Parts) -> None:
    ahead, begun = call_of("a"), call_of("b")
    for call in (ahead, begun):
        parts.demand.add(call, ahead=True)
        parts.registry.drop_demand(call.activation_id, HELLO, OURS)
    begun.announced_s = None
    parts.demand.restore((), lambda _: True, (ahead, begun))
    assert [(d.activation_id, d.ahead) for d in parts.registry.demand()] == [("a", True)]


def test_a_run_that_begins_and_ends_while_its_demand_is_said_again_leaves_none(parts: Parts) -> None:
    ahead = call_of("a")
    parts.demand.add(ahead, ahead=True)

    def runs() -> None:
        ahead.announced_s = None
        parts.registry.drop_demand(ahead.activation_id, HELLO, OURS)

    parts.registry.meanwhile = runs
    parts.demand.restore((), lambda _: True, (ahead,))
    assert parts.names == set()


def test_demand_is_said_again_with_its_adapter(parts: Parts) -> None:
    ticket = parts.enter("a")
    ticket.adapter = "s3://adapters/one"
    parts.demand.restore(parts.room.all_waiting(), lambda _: False)
    assert [d.adapter for d in parts.registry.demand()] == ["s3://adapters/one"]


def test_a_heartbeat_knows_whether_the_lease_had_run_out(parts: Parts) -> None:
    assert [parts.registry.gateway_alive(OURS) for _ in range(2)] == [False, True]
    parts.registry.forget_gateway(OURS)
    assert parts.registry.gateway_alive(OURS) is False


@pytest.mark.parametrize("drops", [1, 2])
def test_a_gateway_that_stood_still_says_again_for_what_its_requests_wait(start_gateway: Start, drops: int) -> None:
    """The scheduler has called it lost, and dropped its demand.  It may do so just after the gateway's first beat."""
    gateway = start_gateway(THAW_GATEWAY_HEARTBEAT_S="1.5")
    gateway.put_python()
    asked = gateway.soon(gateway.invoke, n=1)
    (demand,) = gateway.invoker.wait_for_demand()
    registry = gateway.invoker.registry
    os.killpg(gateway.process.pid, signal.SIGSTOP)
    registry.forget_gateway(demand.gateway)  # as if it had run out
    registry.drop_demand(demand.activation_id, demand.action, demand.gateway)
    os.killpg(gateway.process.pid, signal.SIGCONT)
    (again,) = gateway.invoker.wait_for_demand()
    for _ in range(1, drops):
        registry.drop_demand(demand.activation_id, demand.action, demand.gateway)
        (again,) = gateway.invoker.wait_for_demand()
    assert again.activation_id == demand.activation_id
    gateway.invoker.ready("guest/hello")
    assert asked.result(60).json()["response"]["result"] == {"n": 1}
