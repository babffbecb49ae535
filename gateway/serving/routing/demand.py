"""Demand: this gateway's requests without a route, in the registry, for the scheduler to start instances.

A request's own thread adds and withdraws its demand.  After the state server was away, the heartbeat and the
reconnection correct it: demand that no request waits for would start instances and keep them.  After the gateway itself
was away for longer than its lease, the heartbeat says all demand again, because the scheduler has dropped it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from gateway.serving.actions.action_cache import namespace_of
from gateway.serving.call import Call
from gateway.serving.routing.waiting_room import Ticket, WaitingRoom
from relay.protocol.messages import DemandAdded
from relay.state.registry import Registry
from thaw.clock import wall_ms
from thaw.errors import PlatformError
from thaw.ids import ActionName, ActivationId, GatewayId
from thaw.logs import Log


class Demand:
    def __init__(self, room: WaitingRoom, registry: Registry, gateway: GatewayId, log: Log) -> None:
        self._room, self._registry, self._gateway, self._log = room, registry, gateway, log
        self._lock = threading.Lock()
        self._left: dict[ActivationId, ActionName] = {}  # withdrawals and writes of settle() that failed

    def add(self, call: Call, *, ahead: bool = False) -> None:
        """Tell the scheduler that a request has no route.  If it was told before the request waited, it is told again:
        a failed start may have ended the first demand.  ``ahead``: it will wait later.  Raises Unavailable."""
        if call.announced_s is None:
            call.announced_s = time.monotonic()
        self._say(call, ahead=ahead)

    def withdraw(self, call: Call) -> None:
        """An activation may run a second time while its first run ends: its client reconnected, and its answer is
        computed again.  The second run's demand stays, here or at another gateway."""
        if call.announced_s is None:
            return
        call.announced_s = None
        try:
            self._agree(call.activation_id, call.action.served_by)
        except PlatformError as e:
            with self._lock:
                self._left[call.activation_id] = call.action.served_by
            self._log.event("demand_not_removed", activation_id=call.activation_id, error=e.message)

    def settle(self, call: Call) -> None:
        """Put or withdraw the demand of a call that runs already, as the room has it waiting for another slot or not.
        It keeps its age.  Never raises: the next retry() repeats a failed write."""
        try:
            self._agree(call.activation_id, call.action.served_by)
        except PlatformError as e:
            with self._lock:
                self._left[call.activation_id] = call.action.served_by
            self._log.event("demand_not_settled", activation_id=call.activation_id, error=e.message)

    def retry(self) -> None:
        """Put the demand right that could not be put right before.  Raises Unavailable."""
        with self._lock:
            left = list(self._left.items())
        for activation_id, action in left:
            self._agree(activation_id, action)
            with self._lock:
                self._left.pop(activation_id, None)

    def restore(
        self, waiting: Iterable[Ticket], is_held: Callable[[ActivationId], bool], ahead: Iterable[Call] = ()
    ) -> None:
        """Say all demand again, and put it right: some may be gone with a server or with this gateway's lease, and some
        may have outlived its request.  ``is_held`` knows of requests that will wait, and ``ahead`` are those of them
        whose demand was added ahead.  Raises Unavailable."""
        known = {ticket.activation_id: ticket.action for ticket in waiting}
        for activation_id, action in known.items():
            self._agree(activation_id, action)
        for call in ahead:
            if call.announced_s is not None:
                self._say(call, ahead=True)
                if call.announced_s is None:  # its run has begun meanwhile, and has perhaps ended
                    self._agree(call.activation_id, call.action.served_by)
        for demand in self._registry.demand():
            of_nobody = demand.activation_id not in known and not is_held(demand.activation_id)
            if demand.gateway == self._gateway and of_nobody:
                self._agree(demand.activation_id, demand.action)

    def _say(self, call: Call, *, ahead: bool) -> None:
        action = call.action.served_by
        self._put(call.activation_id, action, call.received_ms, ahead=ahead, adapter=call.wanted_adapter)

    def _agree(self, activation_id: ActivationId, action: ActionName) -> None:
        """Make the registry agree with the room.  The request's own thread may have written meanwhile, so check
        again."""
        while True:
            ticket = self._room.waiting(action, activation_id)
            if ticket is None:
                self._registry.drop_demand(activation_id, action, self._gateway)
            else:
                waited_ms = max(0, round(1000 * (time.monotonic() - ticket.since_s)))
                self._put(activation_id, action, wall_ms() - waited_ms, adapter=ticket.adapter)
            if (self._room.waiting(action, activation_id) is None) == (ticket is None):
                return

    def _put(
        self,
        activation_id: ActivationId,
        action: ActionName,
        received_ms: int,
        *,
        ahead: bool = False,
        adapter: str = "",
    ) -> None:
        """Put the demand with its age: a request that lost its worker before its first token goes to the head of the
        scheduler's queue."""
        waited_ms = max(0, wall_ms() - received_ms)
        self._registry.add_demand(
            DemandAdded(
                activation_id, action, namespace_of(action), self._gateway, received_ms, waited_ms, ahead, adapter
            )
        )
