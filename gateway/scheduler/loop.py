"""The scheduler process: the one place with a queue, a clock and a connection.

One thread takes events (from the stream, from timers) one at a time, asks the policy, and carries out what it decided.
Others only feed the queue: the stream's reader, and the lease's renewal.  It blocks until the next event or the next
timer, whichever is first.
"""

from __future__ import annotations

import heapq
import itertools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import redis

from gateway.scheduler.decisions import Decision, LearnFrom, RevokeCredential, Wake
from gateway.scheduler.effects import Arrival, Effects, load_history
from gateway.scheduler.events import Event, Timer
from gateway.scheduler.group_credentials import GroupCredentials
from gateway.scheduler.leading import Leadership, wait_for_lease
from gateway.scheduler.pauses import Pauses
from gateway.scheduler.policy import decide
from gateway.scheduler.reading import Reading
from gateway.scheduler.settings import SchedulerSettings
from gateway.scheduler.view import ClusterView
from relay import redis_link
from relay.bus import EventReader
from relay.lease import SchedulerLease
from relay.messages import DemandAdded, DemandRemoved
from thaw import settings as thaw_settings
from thaw.errors import PlatformError
from thaw.ids import random_hex_id
from thaw.logs import Log

_TRACE_SETTLES_S = 2.0
"""Hosts write the last events of a start's trace about when they announce it ready."""
_RUN_SETTLES_S = (_TRACE_SETTLES_S, 8.0, 50.0)
"""A request's own trace comes with its end; after a minute the next start may teach the same."""
_RELOAD_RETRY_S = 0.3
_REVOKE_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Reload:
    """The event stream is up (again): what happened meanwhile is in the registry."""


@dataclass(frozen=True, slots=True)
class Refresh:
    """Read heartbeats and leases."""


@dataclass(frozen=True, slots=True)
class Stop:
    pass


class Scheduler:
    """One leadership: from taking the lease to losing it."""

    def __init__(self, settings: SchedulerSettings, lease: SchedulerLease, epoch: int, log: Log) -> None:
        self._settings, self._epoch, self._log = settings, epoch, log.bind(epoch=epoch)
        self._client = redis_link.connect(settings.state_url)
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, object]] = []
        self._order = itertools.count()
        self._credentials = GroupCredentials(self._client, settings.relay_url)
        self._effects = Effects(self._client, epoch, self._log, self._credentials)
        self._leadership = Leadership(lease, lambda: self._queue.put(Stop()), self._log)
        self._reader = EventReader(settings.state_url, self._queue.put, lambda: self._queue.put(Reload()), self._log)
        self._view: ClusterView | None = None  # None: nothing is decided before the registry was read
        self._reading = Reading(self._client, self._credentials)
        self._pauses = Pauses()

    def stop(self) -> None:
        """From any thread."""
        self._queue.put(Stop())

    def run(self) -> None:
        """Until stopped or the lease is lost."""
        self._log.event("leading")
        self._leadership.start()
        self._reader.start()
        self._at(time.monotonic() + self._settings.hosts_refresh_s, Refresh())
        try:
            for item in self._items():
                if isinstance(item, Stop) or not self._leadership.is_held:
                    break
                self._take(item)
        finally:
            self._reader.stop()
            self._leadership.end()
            self._credentials.close()
            self._client.close()
            self._log.event("leading_ended")

    def _items(self) -> Iterator[object]:
        while True:
            due_s = self._timers[0][0]  # never empty: a refresh is always planned
            try:
                yield self._queue.get(timeout=max(0.0, due_s - time.monotonic()))
            except queue.Empty:
                yield heapq.heappop(self._timers)[2]

    def _take(self, item: object) -> None:
        arrival = Arrival.now()
        try:
            if isinstance(item, Reload):
                self._reload(arrival)
            elif isinstance(item, Refresh):
                self._refresh(arrival)
            elif isinstance(item, LearnFrom):
                self._learn(item)
            elif isinstance(item, RevokeCredential):
                self._carry_out(item, arrival)
            elif self._view is not None:
                self._note_demand(item, arrival)
                for event in self._reading.events_of(item, self._view):
                    self._decide(event, arrival)
        except PlatformError as e:
            # a decision may be half carried out: the registry and the hosts say what is, so begin from them
            self._log.event("state_server_lost", error=e.message)
            self._view = None
            self._at(time.monotonic() + _RELOAD_RETRY_S, Reload())

    def _note_demand(self, item: object, arrival: Arrival) -> None:
        if isinstance(item, DemandAdded):
            self._effects.seen(item.activation_id, arrival)
        elif isinstance(item, DemandRemoved):
            self._effects.gone(item.activation_id)

    def _reload(self, arrival: Arrival) -> None:
        history = load_history(self._client, self._log)
        rebuilt = self._reading.rebuilt()
        self._timers = [t for t in self._timers if not isinstance(t[2], (Timer, Reload))]
        heapq.heapify(self._timers)
        self._view = ClusterView(self._epoch, self._settings, random_hex_id, history)
        self._decide(rebuilt, arrival)
        self._pauses.after_rebuild()
        self._log.event("view_rebuilt", hosts=len(rebuilt.hosts), instances=len(rebuilt.instances),
                        demand=len(rebuilt.demand), actions=len(rebuilt.actions))  # fmt: skip

    def _refresh(self, arrival: Arrival) -> None:
        self._at(time.monotonic() + self._settings.hosts_refresh_s, Refresh())
        if self._view is not None:
            for event in self._reading.heartbeats(self._view):
                self._decide(event, arrival)
            self._pauses.after_heartbeats()

    def _decide(self, event: Event, arrival: Arrival) -> None:
        assert self._view is not None  # noqa: S101  _take looked
        for decision in decide(self._view, event, time.monotonic()):
            self._carry_out(decision, arrival)

    def _carry_out(self, decision: Decision, arrival: Arrival) -> None:
        if isinstance(decision, Wake):
            self._at(decision.at_s, Timer(decision.kind, decision.key))
        elif isinstance(decision, LearnFrom):
            self._at(time.monotonic() + _TRACE_SETTLES_S, decision)
        elif self._leadership.is_held:  # hosts refuse an old epoch, but the registry would not
            self._apply(decision, arrival)

    def _apply(self, decision: Decision, arrival: Arrival) -> None:
        try:
            refused = self._effects.apply(decision, arrival)
        except PlatformError:
            if not isinstance(decision, RevokeCredential):
                raise
            self._at(time.monotonic() + _REVOKE_RETRY_S, decision)  # the relay is away; a successor finds it too
            return
        if refused is not None:
            self._queue.put(refused)

    def _learn(self, item: LearnFrom) -> None:
        if self._view is not None:
            later = self._effects.learn(self._view.history, item)
            if later is not None and later.attempt < len(_RUN_SETTLES_S):
                self._at(time.monotonic() + _RUN_SETTLES_S[later.attempt], later)

    def _at(self, at_s: float, item: object) -> None:
        heapq.heappush(self._timers, (at_s, next(self._order), item))


class Process:
    """Leads, stands by, leads again, until SIGTERM."""

    def __init__(self, settings: SchedulerSettings, log: Log) -> None:
        self._settings, self._log = settings, log
        self._stop = threading.Event()
        self._leader: Scheduler | None = None
        self.ended_well = False

    def stop(self) -> None:
        self._stop.set()
        if self._leader is not None:
            self._leader.stop()

    def run(self) -> None:
        client: redis.Redis = redis_link.connect(self._settings.state_url)
        self._log.event("standing_by")
        while not self._stop.is_set():
            lease = SchedulerLease(client, random_hex_id())
            epoch = wait_for_lease(lease, self._stop, self._log)
            if epoch is None:
                break
            self._leader = Scheduler(self._settings, lease, epoch, self._log)
            if self._stop.is_set():  # it came between the lease and the leader
                self._leader.stop()
            self._leader.run()
        client.close()
        self.ended_well = True


def main() -> None:
    settings = thaw_settings.load(SchedulerSettings)
    # signals are waited for, not handled: a handler would run inside a lock that it needs
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    process = Process(settings, Log("scheduler"))
    worker = threading.Thread(target=_run_then_signal, args=(process,), name="scheduler")
    worker.start()
    signal.sigwait(signals)
    process.stop()
    worker.join()
    if not process.ended_well:
        sys.exit(1)


def _run_then_signal(process: Process) -> None:
    """A crash must end the process too, so that its supervisor starts another."""
    try:
        process.run()
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
