"""Has an instance started before anybody calls.

A warming waits for a slot as a request does: in the waiting room and in the scheduler's demand.  It sends nothing, and
leaves when the start has begun: a start that nobody waits for any more goes on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from gateway.serving.call import Call
from gateway.serving.demand import Demand
from gateway.serving.expected_wait import left_s
from gateway.serving.waiting_room import Ticket, WaitingRoom
from relay.state.registry import Registry
from thaw.errors import Unavailable
from thaw.instance import InstanceState

_BEGINS_S: Final = 10.0
"""A scheduler that has room decides within milliseconds; with no host for it the answer must come some time."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """``expected_s``: seconds until its first answer could come; None: nobody can say."""

    is_ready: bool
    expected_s: float | None
    hosts: tuple[str, ...] = ()


class Warming:
    def __init__(self, room: WaitingRoom, demand: Demand, registry: Registry) -> None:
        self._room, self._demand, self._registry = room, demand, registry

    def warm(self, call: Call, wait_s: float) -> Warmed:
        """``call`` is of the action to warm, and is not sent.  Return when a slot is free, or when its start has begun
        and ``wait_s`` are over.  Raises Unavailable when no start begins, and the error of one that fails."""
        ticket = Ticket(call.activation_id, call.action.name, call.action.version, call.received_s)
        self._room.enter(ticket)
        try:
            if ticket.route is None:
                call.announced_s = None
                self._demand.add(call)
                self._wait(call, ticket, wait_s)
            if ticket.route is not None:
                return Warmed(True, 0.0, (ticket.route.record.host_id,))
            return self._begun(call)
        finally:
            self._room.leave(ticket)
            self._demand.withdraw(call)

    def _wait(self, call: Call, ticket: Ticket, wait_s: float) -> None:
        begins_s, until_s = call.received_s + _BEGINS_S, call.received_s + wait_s
        begun = self._has_begun(call)
        with call.hangup.waking(ticket.event.set):
            while ticket.route is None and not (begun and time.monotonic() >= until_s):
                if ticket.error is not None:
                    raise ticket.error
                call.hangup.check()
                left = (until_s if begun else max(begins_s, until_s)) - time.monotonic()
                if left <= 0:
                    raise Unavailable(
                        f"No host has begun to start {call.action.name} within {max(_BEGINS_S, wait_s):g} s.",
                        hint="thaw top shows what runs; thaw host list shows the hosts",
                    )
                ticket.event.wait(left)
                ticket.event.clear()
                begun = begun or bool(ticket.notices)
                ticket.notices.clear()

    def _has_begun(self, call: Call) -> bool:
        """A start that began before this request waited is announced to nobody any more."""
        return bool(self._starting(call))

    def _starting(self, call: Call) -> list[tuple[str, str]]:
        """The group and the host of each container that starts."""
        return [
            (r.group_id, r.host_id)
            for r in self._registry.instances()
            if r.action == call.action.name and r.state is InstanceState.STARTING
        ]

    def _begun(self, call: Call) -> Warmed:
        starting = self._starting(call)
        groups = {group for group, _ in starting}
        times = [left_s(p, 0.0) for p in self._registry.plans() if p.group_id in groups]
        return Warmed(
            False, min((t for t in times if t is not None), default=None), tuple(sorted({host for _, host in starting}))
        )
