"""Which process schedules: the lease, its renewal in a thread, and how a standby waits for it.

A standby reads how long the lease still runs and sleeps on an Event until then.  It therefore tries once in each lease
time while the holder lives, and at the right moment when the holder has died.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from relay.state.lease import LEASE_MS, SchedulerLease
from thaw.errors import PlatformError
from thaw.logs import Log
from thaw.process.lasting import LastingThread

RENEW_S: Final = 0.6
"""Three tries in a lease time."""
_MARGIN_S: Final = 0.01  # the server expires a key at its next check, up to a few milliseconds late
_RETRY_S: Final = 0.3  # between tries while the state server does not answer


@dataclass(frozen=True, slots=True)
class Term:
    """One leadership.  ``valid_until_s`` is of this process's monotonic clock.

    It counts from the moment at which the lease was asked for, because the server starts the lease at some moment after
    that.
    """

    epoch: int
    valid_until_s: float


def wait_for_lease(
    lease: SchedulerLease, stop: threading.Event, log: Log, now_s: Callable[[], float] = time.monotonic
) -> Term | None:
    """Block until this process leads.  Returns None when it is to stop."""
    while not stop.is_set():
        asked_s = now_s()
        try:
            if (epoch := lease.acquire()) is not None:
                return Term(epoch, asked_s + LEASE_MS / 1000)
            pause_s = lease.remaining_s() + _MARGIN_S
        except PlatformError as e:
            log.event("lease_unavailable", error=e.message)
            pause_s = _RETRY_S
        stop.wait(pause_s)
    return None


class Leadership:
    """Keeps the lease.  ``on_lost`` is called once, from the renewal's thread, when the lease is lost.

    ``is_held`` must be true before anything is sent.  A process that was stopped for longer than the lease sees the
    loss by its own clock, before the renewal has found out.
    """

    def __init__(
        self,
        lease: SchedulerLease,
        term: Term,
        on_lost: Callable[[], None],
        log: Log,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lease, self._on_lost, self._log, self._now_s = lease, on_lost, log, now_s
        self._stop = threading.Event()
        self._valid_until_s = term.valid_until_s
        self._thread = LastingThread(self._run, "lease")

    def start(self) -> None:
        self._thread.start()

    @property
    def is_held(self) -> bool:
        return not self._stop.is_set() and self._now_s() < self._valid_until_s

    def end(self) -> None:
        """Give the lease back, so that a standby need not wait for its expiry."""
        self._stop.set()
        try:
            self._lease.release()
        except PlatformError as e:
            self._log.event("lease_not_released", error=e.message)

    def _run(self) -> None:
        while not self._stop.wait(RENEW_S):
            asked_s = self._now_s()
            try:
                kept = self._lease.renew()
            except PlatformError as e:
                self._log.event("lease_not_renewed", error=e.message)
                kept = asked_s < self._valid_until_s
                if kept:
                    continue
            if not kept:
                self._stop.set()
                self._on_lost()
                return
            self._valid_until_s = asked_s + LEASE_MS / 1000
