"""Has an instance started before anybody calls.

A warming waits for a slot as a request does: in the waiting room, behind all requests, and in the scheduler's demand.
It sends nothing, and leaves when the start has begun: a start that nobody waits for any more goes on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, Literal

from gateway.processor import waiting
from gateway.serving.call import Call
from gateway.serving.held.until_news import Held
from gateway.serving.routing.demand import Demand
from gateway.serving.routing.expected_wait import left_s
from gateway.serving.routing.routes import version_key
from gateway.serving.routing.versions import Versions
from gateway.serving.routing.waiting_room import Ticket, WaitingRoom
from relay.state.registry import Registry
from thaw.errors import Unavailable
from thaw.ids import HostId
from thaw.instance import InstanceRecord, InstanceState

_BEGINS_S: Final = 10.0
"""A scheduler that has room decides within milliseconds; with no host for it the answer must come some time."""
_MODEL_BEGINS_S: Final = 30.0
"""A model that is new here is inspected first."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """``busy``: it is ready, and all its slots are taken.  ``expected_s``: seconds until its first answer could come;
    None: nobody can say."""

    state: Literal["ready", "starting"]
    expected_s: float | None
    hosts: tuple[HostId, ...]
    busy: bool = False


class Warming:
    def __init__(self, room: WaitingRoom, demand: Demand, registry: Registry, held: Held, versions: Versions) -> None:
        self._room, self._demand, self._registry, self._held = room, demand, registry, held
        self._versions = versions

    def warm(self, call: Call, wait_s: float) -> Warmed:
        """``call`` is of the action to warm, and is not sent.  Return when an instance of its version is ready, or when
        its start has begun and ``wait_s`` are over.  An action that other instances serve meanwhile is warmed there.
        Raises Unavailable with the reason when no start begins, the error of one that fails, and what
        Versions.of_waiting() raises."""
        ticket = _ticket(call)
        self._room.enter(ticket)
        try:
            if (warm := self._ready(call, ticket)) is not None:
                return warm
            call.announced_s = None
            self._demand.add(call)
            with self._held.held(call.subject.namespace, call.hangup) as ends:
                ticket.event = ends  # the room wakes it, too
                return self._begun(call, ticket, wait_s)
        finally:
            self._room.leave(ticket)
            self._demand.withdraw(call)

    def _begun(self, call: Call, ticket: Ticket, wait_s: float) -> Warmed:
        until_s = call.received_s + wait_s
        begins_s = max(until_s, call.received_s + _begins_within_s(call))
        while True:
            ticket.event.clear()
            if ticket.error is not None:
                raise ticket.error
            call.hangup.check()
            if self._has_followed(call, ticket):
                begins_s = max(until_s, time.monotonic() + _begins_within_s(call))
            if (warm := self._ready(call, ticket)) is not None:
                return warm
            starting = self._starting(call)  # from the registry: earlier starts are not announced
            left = (until_s if starting else begins_s) - time.monotonic()
            if left <= 0 or self._held.is_over:
                break
            with waiting():
                ticket.event.wait(left)
        if not starting:
            raise Unavailable(
                f"No host has begun to start {call.action.name} within {time.monotonic() - call.received_s:.0f} s: "
                f"{self._reason(call)}.",
                hint="thaw top shows what runs; thaw host list shows the hosts",
            )
        groups = {r.group_id for r in starting}
        times = [left_s(p, 0.0) for p in self._registry.plans() if p.group_id in groups]
        expected_s = min((t for t in times if t is not None), default=None)
        return Warmed("starting", expected_s, tuple(sorted({r.host_id for r in starting})))

    def _has_followed(self, call: Call, ticket: Ticket) -> bool:
        """Wait for the instances that serve the action now, if an update has given it others."""
        if not ticket.looks:
            return False
        ticket.looks = False
        now = self._versions.of_waiting(call.action)
        if now is call.action:
            return False
        self._room.leave(ticket)
        self._demand.withdraw(call)
        call.action, ticket.action, ticket.version = now, now.served_by, now.served_version
        self._room.enter(ticket)
        self._demand.add(call)
        return True

    def _ready(self, call: Call, ticket: Ticket) -> Warmed | None:
        if ticket.route is not None:
            return Warmed("ready", 0.0, (ticket.route.record.host_id,))
        ready = [s.record for s in self._room.serving(call.action.served_by) if _is_of(call, s.record)]
        return Warmed("ready", 0.0, tuple(sorted({r.host_id for r in ready})), busy=True) if ready else None

    def _starting(self, call: Call) -> list[InstanceRecord]:
        return [r for r in self._of_action(call) if r.state is InstanceState.STARTING and _is_of(call, r)]

    def _of_action(self, call: Call) -> list[InstanceRecord]:
        return [r for r in self._registry.instances() if r.action == call.action.served_by]

    def _reason(self, call: Call) -> str:
        if self._held.is_over:
            return "this gateway is about to end, so ask again"
        if not self._registry.live_hosts():
            return "no host is up"
        config = call.action.config
        if config is not None and self._registry.model(config.model.uri) is None:
            return "its model is still being looked at, so ask again"
        if any(not _is_of(call, r) for r in self._of_action(call)):
            return "instances of an older version have not ended yet"
        return "no host has room for it"


def _ticket(call: Call) -> Ticket:
    action = call.action
    return Ticket(
        call.activation_id,
        action.served_by,
        action.served_version,
        call.received_s,
        called=action.name,
        ahead=True,
        looks=True,  # it may have changed since the request came
        adapter=call.wanted_adapter,
    )


def _begins_within_s(call: Call) -> float:
    return _MODEL_BEGINS_S if call.action.is_llm else _BEGINS_S


def _is_of(call: Call, record: InstanceRecord) -> bool:
    """Whether requests of the call's version may go to it."""
    return version_key(record.action_version) >= version_key(call.action.served_version)
