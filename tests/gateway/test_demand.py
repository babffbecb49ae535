"""Demand in the registry, and the leases by which gateways judge one another, tested without a gateway process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis

from gateway.core import OwnHeartbeats
from gateway.serving.call import Call
from gateway.serving.hangup import Hangup
from gateway.serving.routing.demand import Demand
from gateway.serving.routing.waiting_room import Ticket, WaitingRoom
from relay.protocol.messages import DemandAdded
from relay.state import redis_link
from relay.state.api_keys import Subject
from relay.state.registry import Registry
from tests.conftest import ValkeyServer
from thaw.action import KIND_PYTHON, Action, Exec, Limits
from thaw.ids import ActionName, ActivationId, GatewayId, Namespace
from thaw.logs import Log

HELLO = ActionName("guest/hello")
OURS, OTHERS = GatewayId("ours"), GatewayId("others")


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis_link.connect(valkey_url) as connected:
        yield connected


def demand_of(room: WaitingRoom, registry: Registry) -> Demand:
    return Demand(room, registry, OURS, Log("gateway"))


def added(activation_id: str, gateway: GatewayId = OURS) -> DemandAdded:
    return DemandAdded(ActivationId(activation_id), HELLO, Namespace("guest"), gateway, 0, 0)


def enter(room: WaitingRoom, activation_id: str) -> Ticket:
    ticket = Ticket(ActivationId(activation_id), HELLO, "0.0.1")
    room.enter(ticket)
    return ticket


def names(registry: Registry) -> set[str]:
    return {str(d.activation_id) for d in registry.demand()}


def test_demand_that_could_not_be_withdrawn_is_withdrawn_later(own_valkey: ValkeyServer) -> None:
    with redis_link.connect(own_valkey.url) as client:
        registry = Registry(client)
        demand = demand_of(WaitingRoom(), registry)
        call = call_of("a")
        demand.add(call)
        own_valkey.kill()
        demand.withdraw(call)
        own_valkey.start()
        assert names(registry) == {"a"}
        demand.retry()
        assert names(registry) == set()


def call_of(activation_id: str) -> Call:
    action = Action(HELLO, Namespace("guest"), "0.0.1", Exec(KIND_PYTHON), Limits())
    return Call(ActivationId(activation_id), action, Subject(Namespace("guest"), "x"), {}, Hangup())


def test_a_run_that_ends_leaves_the_demand_of_its_activations_next_run_at_another_gateway(client: redis.Redis) -> None:
    registry = Registry(client)
    demand, ended = demand_of(WaitingRoom(), registry), call_of("a")
    demand.add(ended)
    registry.add_demand(added("a", OTHERS))
    demand.withdraw(ended)
    assert [d.gateway for d in registry.demand()] == [OTHERS]


def test_a_run_that_ends_leaves_the_demand_of_its_activations_next_run_at_this_gateway(client: redis.Redis) -> None:
    registry, room = Registry(client), WaitingRoom()
    demand, ended, following = demand_of(room, registry), call_of("a"), call_of("a")
    demand.add(ended)
    ticket = enter(room, "a")
    demand.add(following)
    demand.withdraw(ended)
    assert names(registry) == {"a"}
    room.leave(ticket)
    demand.withdraw(following)
    assert names(registry) == set()


def test_a_run_that_begins_to_wait_while_the_last_one_withdraws_keeps_its_demand(client: redis.Redis) -> None:
    registry, room = _Slow(client), WaitingRoom()
    demand, ended, following = demand_of(room, registry), call_of("a"), call_of("a")
    demand.add(ended)

    def waits() -> None:
        enter(room, "a")
        demand.add(following)

    registry.meanwhile = waits
    demand.withdraw(ended)
    assert names(registry) == {"a"}


def test_a_late_withdrawal_leaves_the_demand_of_a_request_that_has_moved_to_another_pool(client: redis.Redis) -> None:
    registry = Registry(client)
    registry.add_demand(added("a"))
    registry.drop_demand(ActivationId("a"), ActionName("guest/before"), OURS)
    assert names(registry) == {"a"}


def test_a_reconnection_adds_what_waits_and_drops_what_nobody_holds(client: redis.Redis) -> None:
    registry, room = Registry(client), WaitingRoom()
    for one in (added("stray"), added("held"), added("theirs", OTHERS)):
        registry.add_demand(one)
    enter(room, "waits")
    demand_of(room, registry).restore(room.reload(()), lambda activation_id: activation_id == "held")
    assert names(registry) == {"waits", "held", "theirs"}


class _Slow(Registry):
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


def test_who_left_before_its_demand_was_restored_leaves_none(client: redis.Redis) -> None:
    registry, room = _Slow(client), WaitingRoom()
    ticket = enter(room, "a")

    def served() -> None:
        room.leave(ticket)
        registry.drop_demand(ticket.activation_id, HELLO, OURS)

    registry.meanwhile = served
    demand_of(room, registry).restore(room.reload(()), lambda _: False)
    assert names(registry) == set()


def test_who_comes_back_while_its_old_demand_is_dropped_keeps_the_new(client: redis.Redis) -> None:
    registry, room = _Slow(client), WaitingRoom()
    registry.add_demand(added("a"))

    def refused() -> None:
        enter(room, "a")
        registry.add_demand(added("a"))

    registry.meanwhile = refused
    demand_of(room, registry).restore((), lambda _: False)
    assert names(registry) == {"a"}


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
