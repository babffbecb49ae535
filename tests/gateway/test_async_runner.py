"""The runner of 202s when the state server fails it at the wrong moment."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from gateway.actions import Actions
from gateway.async_runner import AsyncRunner
from gateway.calls import Call
from gateway.demand import Demand
from gateway.dispatch import Dispatcher
from gateway.link import InvokerPool
from gateway.recorder import Recorder
from gateway.runs import Outcome
from gateway.waiting import WaitingRoom
from relay import keys, redis_link
from relay.pending import PendingClaims
from relay.records import Pending, Records
from relay.registry import Registry
from thaw.errors import Unavailable
from thaw.ids import ActionName, ActivationId, GatewayId, Namespace
from thaw.logs import Log

OURS, OWNER = GatewayId("ours"), GatewayId("owner")


class _Failing(Registry):
    """The first look at a lease meets an error."""

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


def test_what_another_gateway_runs_is_left_to_it_though_the_first_look_at_it_failed(valkey_url: str) -> None:
    def never(call: Call) -> Outcome:
        pytest.fail(f"{call.activation_id} was run twice")

    log = Log("gateway")
    with redis_link.connect(valkey_url) as client:
        records, registry, claims = Records(client), _Failing(client), _Claims(client, OURS)
        claims.handed = threading.Event()
        pool, room = InvokerPool("token"), WaitingRoom()
        demand = Demand(room, registry, OURS, log)
        runner = AsyncRunner(
            valkey_url, OURS, never, Dispatcher(room, demand, pool, log), demand, Actions(client, records), records,
            registry, claims, Recorder(records, pool, log), 2, log,
        )  # fmt: skip
        registry.gateway_alive(OWNER)
        pending = Pending(ActivationId("a"), Namespace("guest"), "x", ActionName("guest/hello"), "0.0.1", {}, 0, 0)
        records.accept(pending, OWNER)
        runner.start()
        try:
            assert claims.handed.wait(10)
        finally:
            runner.stop()
        held = cast(Any, client.xpending_range(keys.PENDING, keys.PENDING_GROUP, "-", "+", 10))
        assert [row["consumer"] for row in held] == [OWNER.encode()]
        assert records.activation(ActivationId("a")) is None
