"""202s: entries of the pending stream, each run like a held request and ended in exactly one record.

::

    pending stream ──read──▶ line (thousands) ──▶ ahead (hundreds: their demand is announced) ──▶ a thread runs it
                             └────── namespaces take turns in both (gateway/fair.py) ──────┘

The stream's consumer group gives an entry to one gateway; another claims a dead gateway's entries (heartbeat).
Records.end writes only one record, even if steps are repeated; mark_started prevents user code from running twice.

The line is so long that a namespace with a few entries is not behind all those of another one in the stream.  It holds
the arguments of a few entries only; those of the others are read again when their turn has come.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from gateway.fair import FairQueue, may_have_more
from gateway.processor import Processor
from gateway.serving.actions.action_cache import Actions
from gateway.serving.call import Call
from gateway.serving.dispatch import Dispatcher
from gateway.serving.hangup import Hangup
from gateway.serving.outcome import outcome_of
from gateway.serving.recorder import Recorder
from gateway.serving.routing.demand import Demand
from gateway.serving.runs import Outcome
from relay.state.api_keys import Subject
from relay.state.pending import Entry, PendingClaims, PendingReader
from relay.state.records import Pending, Records
from relay.state.registry import Registry
from thaw.action import KIND_PYTHON, Action, Exec, Limits
from thaw.errors import DeveloperError, NotFound, PlatformError, Unavailable
from thaw.ids import ActivationId, GatewayId, Namespace
from thaw.logs import Log

READ_AHEAD: Final = 500
"""Entries beyond those that run whose demand is announced, so that instances start for all of them."""
LINE: Final = 50_000
"""Entries that one gateway takes, of some 600 bytes each."""
_RETRY_S: Final = 0.5


@dataclass(slots=True, eq=False)
class _Waiting:
    """An entry in line.  ``ahead`` announced its demand."""

    entry: Entry
    is_whole: bool  # else its argument was left out
    ahead: Call | None = None

    @property
    def namespace(self) -> Namespace:
        return self.entry.pending.namespace


class _RunsElsewhere(PlatformError):
    """A call that is not idempotent was started by a gateway that is alive."""

    def __init__(self, starter: GatewayId) -> None:
        super().__init__("Another gateway runs this function.")
        self.starter = starter


class AsyncRunner:
    def __init__(
        self,
        url: str,
        gateway: GatewayId,
        execute: Callable[[Call], Outcome],
        dispatcher: Dispatcher,
        demand: Demand,
        actions: Actions,
        records: Records,
        registry: Registry,
        claims: PendingClaims,
        recorder: Recorder,
        threads: int,
        log: Log,
        processor: Processor,
        weight_of: Callable[[Namespace], float] = lambda _: 1.0,
    ) -> None:
        """``weight_of``: a namespace's weight in the turns of those that wait."""
        self._gateway, self._execute, self._dispatcher, self._demand = gateway, execute, dispatcher, demand
        self._actions = actions
        self._records, self._registry, self._claims, self._recorder = records, registry, claims, recorder
        self._log, self._threads, self._processor = log, threads, processor
        self._pool = ThreadPoolExecutor(threads, "async-run")
        self._reader = PendingReader(url, gateway, self._take, self._room, log)
        self._lock = threading.Condition()
        self._held: set[ActivationId] = set()
        self._line = FairQueue[Namespace, _Waiting](weight_of)
        self._ahead = FairQueue[Namespace, _Waiting](weight_of)
        self._running: Counter[Namespace] = Counter()
        self._stop = threading.Event()

    def start(self) -> None:
        self._reader.start()

    def stop(self) -> None:
        """Take no more entries.  Another gateway claims those that have not ended."""
        self._stop.set()
        self._reader.stop()
        with self._lock:
            self._lock.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def claim_dead(self) -> None:
        """Run the entries that lost gateways had taken.  Raises Unavailable."""
        for consumer in self._claims.consumers():
            if self._registry.is_gateway_alive(consumer):
                continue
            while self._has_room() and (claimed := self._claims.claim(consumer)):
                for entry in claimed:
                    self._log.event("entry_claimed", activation_id=entry.pending.activation_id, gateway=consumer)
                    self._take(entry)

    def holds(self, activation_id: ActivationId) -> bool:
        with self._lock:
            return activation_id in self._held

    def ahead(self) -> list[Call]:
        """The calls whose demand is announced before a thread is free for them."""
        with self._lock:
            return [waiting.ahead for waiting in self._ahead if waiting.ahead is not None]

    def _room(self) -> int:
        with self._lock:
            self._lock.wait_for(self._has_room)
            return 0 if self._stop.is_set() else LINE - len(self._held)

    def _has_room(self) -> bool:
        return len(self._held) < LINE or self._stop.is_set()

    def _take(self, entry: Entry) -> None:
        if entry.owner == self._gateway:
            return  # a blocking call of ours that became a 202: it runs already
        activation_id = entry.pending.activation_id
        with self._lock:
            if activation_id in self._held:
                return
            self._held.add(activation_id)
            is_whole = len(self._held) <= self._threads + READ_AHEAD
        try:
            if self._hand_to_owner(entry):
                self._forget(activation_id)
                return
        except PlatformError as e:  # the thread of the run meets the same error and deals with it
            self._log.event("entry_unprepared", activation_id=activation_id, error=e.message)
        if not is_whole:
            entry = replace(entry, pending=replace(entry.pending, payload=None))
        waiting = _Waiting(entry, is_whole)
        with self._lock:
            self._line.put(waiting.namespace, waiting)
        self._go_on()

    def _go_on(self) -> None:
        """Begin the entries whose turn it is, as far as there are threads, and announce the next ones."""
        while not self._stop.is_set():
            with self._lock:
                following = self._begin()
                announced = None if following is not None else self._next_ahead()
            if following is not None:
                try:
                    self._pool.submit(self._run, following)
                except RuntimeError:  # the pool is shut: this gateway stops, another claims the entry
                    self._forget(following.entry.pending.activation_id)
            elif announced is not None:
                self._announce(announced)
                with self._lock:
                    self._ahead.put(announced.namespace, announced)
            else:
                return

    def _begin(self) -> _Waiting | None:
        following = self._ahead.take(self._may_run) or self._line.take(self._may_run)
        if following is not None:
            self._running[following.namespace] += 1
        return following

    def _may_run(self, namespace: Namespace) -> bool:
        return may_have_more(self._running[namespace], self._threads - self._running.total())

    def _next_ahead(self) -> _Waiting | None:
        return self._line.take() if len(self._ahead) < READ_AHEAD else None

    def _announce(self, waiting: _Waiting) -> None:
        pending = waiting.entry.pending
        try:
            waiting.ahead = self._announced(pending)
        except (PlatformError, NotFound) as e:  # the thread of the run meets the same error and deals with it
            self._log.event("entry_unprepared", activation_id=pending.activation_id, error=e.message)

    def _announced(self, pending: Pending) -> Call | None:
        """A call whose demand is known before its thread is there.  A sequence or composition needs no instance."""
        call = self._call(pending)
        if call.action.is_composed:
            return None
        self._demand.add(call, ahead=True)
        return call

    def _hand_to_owner(self, entry: Entry) -> bool:
        owner = GatewayId(entry.owner)
        if not owner or not self._registry.is_gateway_alive(owner):
            return False
        self._claims.hand_to(owner, entry.entry_id)
        return True

    def _run(self, waiting: _Waiting) -> None:
        with self._processor.computing(waiting.namespace):
            self._run_to_end(waiting)

    def _run_to_end(self, waiting: _Waiting) -> None:
        entry, ahead = waiting.entry, waiting.ahead
        try:
            while not self._stop.is_set():
                try:
                    if not waiting.is_whole:
                        found = self._claims.entry(entry.entry_id)
                        if found is None:
                            return  # it has ended
                        entry, waiting.is_whole = found, True
                    if self._run_once(entry, ahead):
                        return
                except PlatformError as e:
                    self._log.event("run_postponed", activation_id=entry.pending.activation_id, error=e.message)
                except Exception as e:  # noqa: BLE001  an error of our own: the entry ends all the same
                    call = _make_call(entry.pending, _deleted(entry.pending))
                    self._end(call, outcome_of(self._dispatcher.fault(call, e)), entry)
                    return
                self._stop.wait(_RETRY_S)
        finally:
            if ahead is not None:
                self._demand.withdraw(ahead)
            self._forget(entry.pending.activation_id, waiting.namespace)
            self._go_on()

    def _run_once(self, entry: Entry, ahead: Call | None) -> bool:
        """Return False when nothing ran because the state server was away: the entry is tried again.  Raises
        PlatformError for the same reason."""
        ended = self._records.activation(entry.pending.activation_id)
        if ended is not None:  # its gateway died between the record and the acknowledgement
            self._records.end(ended, pending_entry=entry.entry_id)
            return True
        if self._hand_to_owner(entry):
            return True
        try:
            call = self._call(entry.pending)
        except NotFound:
            call = _make_call(entry.pending, _deleted(entry.pending))
            self._end(call, outcome_of(DeveloperError("The action was deleted before it ran.")), entry)
            return True
        if ahead is not None:
            self._hand_demand_on(ahead, call)
        outcome = self._execute(call)
        if isinstance(outcome.error, _RunsElsewhere):  # claimed while its gateway could not write a heartbeat
            self._claims.hand_to(outcome.error.starter, entry.entry_id)
            self._log.event("entry_handed_back", activation_id=call.activation_id, gateway=outcome.error.starter)
            return True
        if isinstance(outcome.error, Unavailable) and call.dispatched_ms is None:
            return False
        self._end(call, outcome, entry)
        return True

    def _hand_demand_on(self, ahead: Call, call: Call) -> None:
        """The call takes the demand over, unless that is for instances which do not serve it any more."""
        if ahead.action.served_by != call.action.served_by or call.action.is_composed:
            self._demand.withdraw(ahead)
        else:
            call.announced_s, ahead.announced_s = ahead.announced_s, None

    def _end(self, call: Call, outcome: Outcome, entry: Entry) -> None:
        while True:
            try:
                self._recorder.end_pending(call, outcome, entry.entry_id)
                return
            except PlatformError as e:
                self._log.event("record_postponed", activation_id=call.activation_id, error=e.message)
                if self._stop.wait(_RETRY_S):
                    return  # the entry is still pending: the gateway that claims it ends it

    def _call(self, pending: Pending) -> Call:
        """The call as it was accepted.  Raises Unavailable, NotFound (deleted since)."""
        action = self._actions.get(pending.action)
        if pending.parameters:
            action = replace(action, parameters=pending.parameters)
        call = _make_call(pending, action)
        if not call.action.idempotent:
            call.claim = lambda: self._may_start(pending.activation_id)
        return call

    def _may_start(self, activation_id: ActivationId) -> bool:
        """Return False when the gateway that started the call is lost.  Raises _RunsElsewhere, Unavailable."""
        if self._records.mark_started(activation_id, self._gateway):
            return True
        starter = self._claims.starter(activation_id)
        if starter is not None and self._registry.is_gateway_alive(starter):
            raise _RunsElsewhere(starter)
        return False

    def _forget(self, activation_id: ActivationId, ran_for: Namespace | None = None) -> None:
        """``ran_for``: the namespace whose thread is free now."""
        with self._lock:
            self._held.discard(activation_id)
            if ran_for is not None:
                self._running[ran_for] -= 1
                if not self._running[ran_for]:
                    del self._running[ran_for]
            self._lock.notify_all()


def _make_call(pending: Pending, action: Action) -> Call:
    subject = Subject(pending.namespace, pending.subject, digest=pending.key_digest, until_ms=pending.key_until_ms)
    call = Call(pending.activation_id, action, subject, pending.payload, Hangup(), pending.endpoint, pending.seed)
    call.received_ms, call.cause, call.binding = pending.accepted_ms, pending.cause, pending.binding
    return call


def _deleted(pending: Pending) -> Action:
    """Return the fields of a deleted action that the record needs."""
    return Action(pending.action, pending.namespace, pending.action_version, Exec(KIND_PYTHON), Limits())
