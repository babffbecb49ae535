"""The scheduler process: the one place with a queue, a clock and a connection.

One thread takes the events that have arrived (from the stream, from timers), asks the policy, and carries out its
decisions.  Other threads only feed the queue: the stream's reader, the lease's renewal and the relay work.  The loop
blocks until the next event or the next timer, whichever is first.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.scheduler.decisions import Decision, LearnFrom, RevokeCredential, StartGroup, Wake
from gateway.scheduler.events import Event, StartRefused, Timer
from gateway.scheduler.io import metrics
from gateway.scheduler.io.effects import Arrival, Effects, load_history
from gateway.scheduler.io.gc_pauses import Pauses
from gateway.scheduler.io.group_admission import (
    CredentialIssued,
    CredentialNotRevoked,
    CredentialOverdue,
    RelayWork,
    patience_s,
)
from gateway.scheduler.io.group_credentials import GroupCredentials
from gateway.scheduler.io.leading import Leadership, Term, wait_for_lease
from gateway.scheduler.io.metrics_port import MetricsPort
from gateway.scheduler.io.reading import Reading
from gateway.scheduler.policy.decide import decide_all
from gateway.scheduler.settings import SchedulerSettings
from gateway.scheduler.view.cluster import ClusterView
from relay.protocol.messages import DemandAdded, DemandRemoved, ModelInspected
from relay.state import redis_link
from relay.state.bus import EventReader
from relay.state.clock import StateClock
from relay.state.lease import SchedulerLease
from relay.state.registry import Registry
from thaw import settings as thaw_settings
from thaw.errors import PlatformError
from thaw.ids import random_hex_id
from thaw.logs import Log
from thaw.model_uri import policy_of
from thaw.plan import TransportKind
from thaw.process import lasting
from thaw.process.ending import end_within
from thaw.process.lasting import LastingThread

_TRACE_SETTLES_S = 2.0
"""Hosts write the last events of a start's trace about when they announce it ready."""
_RUN_SETTLES_S = (_TRACE_SETTLES_S, 8.0, 50.0)
"""Pauses before each search for a request's own trace, which is written at the request's end.  After a minute the next
start may teach the same."""
_RELOAD_RETRY_S = 0.3
_LAST_WORDS_S = 4.0
"""The process ends this long after SIGTERM.  If it cannot give its lease back, a successor waits for the lease's
expiry."""
_REVOKE_RETRY_S = 5.0
_TURN = 1_000
"""The most messages taken together.  A burst is smaller, and timers that fall due meanwhile come next."""


@dataclass(frozen=True, slots=True)
class Reload:
    """The event stream is up (again): the effects of missed events are in the registry."""


@dataclass(frozen=True, slots=True)
class Refresh:
    """Read heartbeats and leases."""


@dataclass(frozen=True, slots=True)
class Stop:
    pass


_OURS: Final = (Reload, Refresh, LearnFrom, CredentialIssued, CredentialNotRevoked, CredentialOverdue, RevokeCredential)
"""Items of the loop that are not events of the policy."""


class Scheduler:
    """One leadership: from taking the lease to losing it."""

    def __init__(self, settings: SchedulerSettings, lease: SchedulerLease, term: Term, log: Log) -> None:
        self._settings, self._epoch, self._log = settings, term.epoch, log.bind(epoch=term.epoch)
        self._client = redis_link.connect(settings.state_url)
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, object]] = []
        self._order = itertools.count()
        credentials = GroupCredentials(self._client, settings.relay_url)
        self._relay = RelayWork(credentials, self._queue.put, self._log)
        clock = StateClock()
        self._effects = Effects(self._client, term.epoch, self._log, self._relay, clock)
        self._leadership = Leadership(lease, term, lambda: self._queue.put(Stop()), self._log)
        self._reader = EventReader(settings.state_url, self._queue.put, lambda: self._queue.put(Reload()), self._log)
        self._view: ClusterView | None = None  # None: nothing is decided before the registry was read
        self._reading = Reading(self._client, credentials, self._log, clock, policy_of(settings.models))
        self._pauses = Pauses()

    def stop(self) -> None:
        """End the leadership.  May be called from any thread."""
        self._queue.put(Stop())

    def run(self) -> None:
        """Lead until stopped or until the lease is lost."""
        self._log.event("leading")
        metrics.LEADING.set(1)
        self._leadership.start()
        self._reader.start()
        self._at(time.monotonic() + self._settings.hosts_refresh_s, Refresh())
        try:
            for items in self._turns():
                if any(isinstance(item, Stop) for item in items) or not self._leadership.is_held:
                    break
                self._take_all(items)
        finally:
            metrics.LEADING.set(0)
            if not self._leadership.is_held:
                metrics.LEASES_LOST.inc()
            self._reader.stop()
            self._leadership.end()
            self._relay.close()
            self._client.close()
            self._log.event("leading_ended")

    def _turns(self) -> Iterator[list[object]]:
        """Yield the items that have arrived whenever the loop is ready: messages in the order in which they came, then
        the timers that are due.  Neither makes the other wait for longer than a turn."""
        while True:
            items, due_s = list[object](), self._timers[0][0]  # never empty: a refresh is always planned
            with contextlib.suppress(queue.Empty):
                items.append(self._queue.get(timeout=max(0.0, due_s - time.monotonic())))
                while len(items) < _TURN:
                    items.append(self._queue.get_nowait())
            items += self._due(time.monotonic())
            if items:
                yield items

    def _due(self, now_s: float) -> Iterator[object]:
        while self._timers and self._timers[0][0] <= now_s:
            yield heapq.heappop(self._timers)[2]

    def _take_all(self, items: Iterable[object]) -> None:
        """Take the loop's own items one by one, and the policy's events between two of them together."""
        for is_ours, some in itertools.groupby(items, lambda item: isinstance(item, _OURS)):
            for part in [[item] for item in some] if is_ours else [list(some)]:
                self._take(part)

    def _take(self, items: Sequence[object]) -> None:
        arrival = Arrival.now()
        try:
            match items:
                case [Reload()]:
                    self._reload(arrival)
                case [Refresh()]:
                    self._refresh(arrival)
                case [LearnFrom() as start]:
                    self._learn(start)
                case [CredentialIssued() | CredentialNotRevoked() | CredentialOverdue() | RevokeCredential() as word]:
                    self._relay_said(word, arrival)
                case _ if self._view is not None:
                    self._tell(items, self._view, arrival)
        except PlatformError as e:
            # a decision may be half carried out: the registry and the hosts know the state, so begin from them
            self._log.event("state_server_lost", error=e.message)
            self._view = None
            self._effects.give_up_all()
            self._at(time.monotonic() + _RELOAD_RETRY_S, Reload())

    def _tell(self, items: Sequence[object], view: ClusterView, arrival: Arrival) -> None:
        for item in items:
            self._note(item, arrival)
        if events := list(self._reading.events_of(items, view)):
            self._decide(events, arrival)

    def _relay_said(
        self, item: CredentialIssued | CredentialNotRevoked | CredentialOverdue | RevokeCredential, arrival: Arrival
    ) -> None:
        match item:
            case CredentialIssued() if self._leadership.is_held:
                self._effects.issued(item.group_id)
            case CredentialOverdue() if (refused := self._effects.give_up(item.group_id)) is not None:
                self._queue.put(refused)
            case CredentialNotRevoked():
                self._at(time.monotonic() + _REVOKE_RETRY_S, RevokeCredential(item.group_id))
            case RevokeCredential():
                self._carry_out(item, arrival)

    def _note(self, item: object, arrival: Arrival) -> None:
        match item:
            case DemandAdded():
                self._effects.seen(item.activation_id, arrival, item.adapter)
            case DemandRemoved():
                self._effects.gone(item.activation_id)
            case ModelInspected():
                self._effects.looked(item)
            case StartRefused():
                self._effects.give_up(item.group_id)

    def _reload(self, arrival: Arrival) -> None:
        history = load_history(self._client, self._log)
        rebuilt = self._reading.rebuilt()
        self._effects.reloaded(rebuilt.demand)
        self._timers = [t for t in self._timers if not isinstance(t[2], (Timer, Reload))]
        heapq.heapify(self._timers)
        self._view = ClusterView(self._epoch, self._settings, random_hex_id, history)
        self._decide([rebuilt], arrival)
        metrics.RELOADS.inc()
        self._pauses.after_rebuild()
        self._log.event(
            "view_rebuilt",
            hosts=len(rebuilt.hosts),
            instances=len(rebuilt.instances),
            demand=len(rebuilt.demand),
            actions=len(rebuilt.actions),
        )

    def _refresh(self, arrival: Arrival) -> None:
        self._at(time.monotonic() + self._settings.hosts_refresh_s, Refresh())
        if self._view is not None:
            self._decide(list(self._reading.heartbeats(self._view)), arrival)
            metrics.look(self._view, time.monotonic())
            self._pauses.after_heartbeats()

    def _decide(self, events: Sequence[Event], arrival: Arrival) -> None:
        assert self._view is not None  # noqa: S101  _take looked
        began_s = time.monotonic()
        decisions = decide_all(self._view, events, began_s)
        metrics.decided(self._view, events, decisions, time.monotonic() - began_s)
        for decision in decisions:
            self._carry_out(decision, arrival)

    def _carry_out(self, decision: Decision, arrival: Arrival) -> None:
        if isinstance(decision, Wake):
            self._at(decision.at_s, Timer(decision.kind, decision.key))
        elif isinstance(decision, LearnFrom):
            self._at(time.monotonic() + _TRACE_SETTLES_S, decision)
        elif self._leadership.is_held:  # hosts refuse an old epoch, but the registry would not
            self._effects.apply(decision, arrival)
            if isinstance(decision, StartGroup) and decision.plan.transport.kind != TransportKind.NONE:
                due_s = time.monotonic() + patience_s(self._settings.start_deadline_s)
                self._at(due_s, CredentialOverdue(decision.plan.group_id))

    def _learn(self, item: LearnFrom) -> None:
        if self._view is not None and item.action in self._view.actions:  # else it was deleted
            later = self._effects.learn(self._view.history, item)
            if later is not None and later.attempt < len(_RUN_SETTLES_S):
                self._at(time.monotonic() + _RUN_SETTLES_S[later.attempt], later)

    def _at(self, at_s: float, item: object) -> None:
        heapq.heappush(self._timers, (at_s, next(self._order), item))


class Process:
    """Leads, stands by, leads again, until SIGTERM."""

    def __init__(self, settings: SchedulerSettings, log: Log) -> None:
        """Raises OSError when nothing can listen at ``settings.bind``."""
        self._settings, self._log = settings, log
        self._client = redis_link.connect(settings.state_url)
        registry = Registry(self._client)
        self._port = MetricsPort(
            settings.bind, lambda: registry.host_token(secrets.token_urlsafe(32)), settings.metrics_token
        )
        self._stop = threading.Event()
        self._leader: Scheduler | None = None

    def stop(self) -> None:
        self._stop.set()
        if self._leader is not None:
            self._leader.stop()

    def run(self) -> None:
        self._log.event("standing_by", metrics=self._port.address)
        while not self._stop.is_set():
            lease = SchedulerLease(self._client, random_hex_id())
            term = wait_for_lease(lease, self._stop, self._log)
            if term is None:
                break
            self._leader = Scheduler(self._settings, lease, term, self._log)
            if self._stop.is_set():  # stop() was called between the lease and the leader
                self._leader.stop()
            self._leader.run()
        self._port.close()
        self._client.close()


def main() -> None:
    settings = thaw_settings.load(SchedulerSettings)
    # signals are waited for, not handled: a handler might run while a lock is held that it needs
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    log = Log("scheduler")
    lasting.guard(log)
    try:
        process = Process(settings, log)
    except OSError as e:
        sys.exit(f"thaw-scheduler: cannot listen at {settings.bind}: {e}; set THAW_SCHEDULER_BIND to a free host:port")
    worker = LastingThread(process.run, "scheduler")
    worker.start()
    signal.sigwait(signals)
    end_within(_LAST_WORDS_S, lambda: log.event("ends_unheard"))
    process.stop()
    worker.join()


if __name__ == "__main__":
    main()
