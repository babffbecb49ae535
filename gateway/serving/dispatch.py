"""From a call to an instance that has accepted it: route, wait, send; and again when the instance did not take it.

::

    route? ──yes──────────────▶ POST ──200──▶ the caller reads the answer
      │ no                       │ an error of elsewhere.py
      ▼                          │
    demand + wait ◀──────────────┘

The methods are generators.  They yield sentences for a client that waits, and they return the result.  A reply is
yielded, too, before it is waited for: the driver of the run may leave the waiting to another thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Final

from gateway.processor import waiting
from gateway.serving.call import Call
from gateway.serving.moving.migration import Migrations
from gateway.serving.routing.demand import Demand
from gateway.serving.routing.elsewhere import Sign, give_back, sign_of
from gateway.serving.routing.invoker_pool import InvokerPool, Reply
from gateway.serving.routing.routes import Route
from gateway.serving.routing.sending import send_run
from gateway.serving.routing.versions import Versions
from gateway.serving.routing.waiting_room import Ticket, WaitingRoom
from thaw.action import Action
from thaw.clock import wall_ms
from thaw.errors import PlatformError, ThawError, TimeLimitExceeded, Unavailable
from thaw.logs import Log
from thaw.tracing.trace import Phase

MAX_LOSSES: Final = 3
"""The number of workers that one activation may lose before it counts as the cause."""
_MAX_PUT_OFF: Final = 3
"""The number of times that one activation may be put off by instances that had accepted it.  Each may have taken as
long as a request waits for its grammar."""
_REFUSED_S: Final = (0.05, 0.1, 0.25, 0.5)
"""Waits between two tries at an instance whose slots other gateways hold, or whose host cannot be reached; a slot freed
here is used at once."""


class Dispatcher:
    def __init__(
        self,
        room: WaitingRoom,
        demand: Demand,
        pool: InvokerPool,
        versions: Versions,
        log: Log,
        llm_result_bytes: int = 64 << 20,
        on_cold_start: Callable[[Call], None] = lambda _: None,
    ) -> None:
        """``llm_result_bytes``: the most memory for the tokens of one answer.  ``on_cold_start`` is called with a call
        that waited for a start when it has its first token."""
        self.on_cold_start = on_cold_start
        self.llm_result_bytes, self.result_bytes = llm_result_bytes, pool.result_bytes
        self.room, self._demand, self._pool, self._versions, self._log = room, demand, pool, versions, log
        self.migrations = Migrations(room, demand, pool, versions, log)

    def reach(self, call: Call, at_hand: Route | None = None) -> Generator[str | Reply, None, tuple[Route, Reply]]:
        """Return an instance that has accepted the call.  The caller ends the reply and gives the route back.
        ``at_hand``: a slot that the call has already, which is tried first."""
        try:
            return (yield from self._reach(call, at_hand))
        finally:
            self._demand.withdraw(call)

    def _reach(self, call: Call, at_hand: Route | None) -> Generator[str | Reply, None, tuple[Route, Reply]]:
        refusals = 0
        while True:
            if at_hand is not None:
                route, at_hand = at_hand, None
                self._note_route(call, route)
            else:
                route = yield from self._route(call, refusals)
            reply = None
            try:
                self._claim(call)
                reply = self._send(call, route)
                self._demand.withdraw(call)  # after the request, so that no slot waits for the state server
                yield reply
                reply.read_head()
                return route, reply
            except BaseException as e:
                if reply is not None:
                    reply.abort()
                give_back(self.room, route, e)
                if not isinstance(e, ThawError):
                    raise
                self.go_on(call, e, was_accepted=False)
                refusals += sign_of(e) is Sign.BUSY

    def _claim(self, call: Call) -> None:
        """Take the one right to run a call that is not idempotent, before anything runs."""
        if call.claim is not None and not call.claim():
            raise PlatformError("A gateway was lost while this function ran; it is not run twice.")
        call.claim = None

    def go_on(self, call: Call, error: ThawError, *, was_accepted: bool = True) -> None:
        """Return when the call goes on elsewhere after ``error``, which ended it where it ran; else raise it."""
        if isinstance(error, TimeLimitExceeded):
            raise time_limit(call) from None
        if (sign := sign_of(error)) is None:
            raise error
        if sign is Sign.LOST:
            self._note_loss(call, error)
        elif sign is Sign.BUSY and was_accepted:
            call.n_put_off += 1
            if call.n_put_off > _MAX_PUT_OFF:
                raise Unavailable(error.message, hint="send the request again") from error

    def _note_loss(self, call: Call, error: ThawError) -> None:
        """Raises ``error`` for a call that may not run again."""
        call.losses += 1
        self._log.event("worker_lost", activation_id=call.activation_id, losses=call.losses, error=error.message)
        if not call.action.idempotent or call.losses > MAX_LOSSES:
            raise error

    def fault(self, call: Call, error: Exception) -> PlatformError:
        """Return the error that ends a call after an error of our own."""
        self._log.event("run_failed", activation_id=call.activation_id, error=repr(error))
        return PlatformError("There was an internal server error.")

    def _route(self, call: Call, refusals: int) -> Generator[str, None, Route]:
        while True:
            ticket, serves = _ticket(call), call.action
            self.room.enter(ticket)
            try:
                if ticket.route is None:
                    self._check_version(ticket)
                    self._begin_wait(call)
                    yield "queued"
                    serves = yield from self._wait(call, ticket, refusals)
            except BaseException:
                self.room.leave(ticket)
                raise
            if ticket.route is not None and serves is call.action:
                self._note_route(call, ticket.route)
                return ticket.route
            self.room.leave(ticket)
            self._demand.withdraw(call)
            call.action = serves

    def _begin_wait(self, call: Call) -> None:
        if not call.queued:
            call.queued = True
            call.trace(Phase.QUEUED_BEGIN)
        self._demand.add(call)

    def _wait(self, call: Call, ticket: Ticket, refusals: int) -> Generator[str, None, Action]:
        """Return the call's action with a route on the ticket, or another action that serves the call now."""
        with call.hangup.waking(ticket.event.set):
            while ticket.route is None:
                self._check_version(ticket)
                if ticket.error is not None:
                    raise ticket.error
                if ticket.looks and not ticket.exact:
                    ticket.looks = False
                    if (now := self._versions.of_waiting(call.action)) is not call.action:
                        return now
                call.hangup.check()
                remaining_s = call.wait_deadline_s - time.monotonic()
                if remaining_s <= 0:
                    raise time_limit(call, waiting=True)
                asks = self.room.must_ask(ticket)
                pause_s = _REFUSED_S[min(max(refusals, 1), len(_REFUSED_S)) - 1] if asks else remaining_s
                with waiting():
                    is_set = ticket.event.wait(min(pause_s, remaining_s))
                if not is_set:
                    if asks:
                        self.room.retry(call.action.served_by)
                    continue
                ticket.event.clear()
                while ticket.notices:
                    yield ticket.notices.popleft()
        call.hangup.check()
        return call.action

    def _check_version(self, ticket: Ticket) -> None:
        if ticket.exact:
            self._versions.check(ticket.action, ticket.version, ticket.called)

    def _note_route(self, call: Call, route: Route) -> None:
        """Note the call's route.  The call is cold if it waited and got one of the slots that the instance was started
        for."""
        call.note_instance(route.record)
        waited = call.announced_s is not None and route.ready_s >= call.announced_s
        call.cold = waited and route.handed <= route.record.slots
        if call.queued:
            call.trace(Phase.QUEUED_END)
            call.queued = False

    def _send(self, call: Call, route: Route) -> Reply:
        deadline_s = call.run_deadline_s()
        call.trace(Phase.DISPATCHED, {"instance_id": route.record.instance_id, "host": route.record.host_id})
        call.dispatched_ms = call.dispatched_ms or wall_ms()
        return send_run(self._pool, call, route.record, deadline_s=deadline_s)


def _ticket(call: Call) -> Ticket:
    """An answer that has begun goes on with the versions of the action and of the model that began it."""
    began = call.instance if call.emitted else None
    return Ticket(
        call.activation_id,
        call.action.served_by,
        call.action.served_version if began is None else began.action_version,
        call.received_s,
        exact=began is not None,
        model_version=call.model_version if call.emitted else "",
        called=call.action.name,
        looks=True,  # it may have changed since the request came
        adapter=call.wanted_adapter,
    )


def time_limit(call: Call, *, waiting: bool = False) -> TimeLimitExceeded:
    when = " during initialization." if waiting else "."
    return TimeLimitExceeded(f"The action exceeded its time limits of {call.action.limits.timeout} milliseconds{when}")
