"""Credentials at the relay server: one thread beside the loop issues and revokes them, in order.

A server that is dead or hangs delays only the groups that need it.  A group waits for the server as a start waits for
the model store: for as long as a start may go without progress.  Everything that the loop must know comes back as an
item of the loop's queue.  The order matters, because a group's credential must not be issued after it was revoked.

::

    decided ──▶ plan written ──▶ issue ──CredentialIssued──▶ commands sent
                                 │ ▲ └───StartRefused──────▶ policy: the start failed by our fault (a refusal)
          the relay server is away ┘
    loop's timer: CredentialOverdue ▶ given up: it is not issued any more, and the start has failed by our fault
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.scheduler.events import StartRefused
from gateway.scheduler.io.group_credentials import GroupCredentials
from thaw.errors import PlatformError, Unavailable
from thaw.ids import GroupId
from thaw.logs import Log
from thaw.process.lasting import LastingThread

_AWAY_S: Final = 0.25
"""The pause between two attempts to reach a relay server that is away.  Nothing announces that it is back, and an
attempt is one call."""
_END_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class CredentialIssued:
    """The relay server lets the group in: its commands may be sent."""

    group_id: GroupId


@dataclass(frozen=True, slots=True)
class CredentialOverdue:
    """A timer of the loop: if the credential is still awaited, it is given up."""

    group_id: GroupId


@dataclass(frozen=True, slots=True)
class CredentialNotRevoked:
    """The loop tries again; a successor scheduler would find the credential, too."""

    group_id: GroupId


class RelayWork:
    """``done`` is called from the thread with one of the above, or StartRefused."""

    def __init__(self, credentials: GroupCredentials, done: Callable[[object], None], log: Log) -> None:
        self._credentials, self._done, self._log = credentials, done, log
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._wanted: set[GroupId] = set()
        self._given_up = threading.Condition()
        self._closing = False
        self._thread = LastingThread(self._run, "relay-work")

    def issue(self, group_id: GroupId) -> None:
        with self._given_up:
            self._wanted.add(group_id)
        self._begin(lambda: self._issue(group_id))

    def give_up(self, group_id: GroupId) -> None:
        """No start waits for the group any more: if its credential is still in line, it is not issued."""
        with self._given_up:
            self._wanted.discard(group_id)
            self._given_up.notify_all()

    def revoke(self, group_id: GroupId) -> None:
        self.give_up(group_id)
        self._begin(lambda: self._revoke(group_id))

    def close(self) -> None:
        """Stop the thread.  A successor scheduler finds the remaining work in the state server."""
        with self._given_up:
            self._closing = True
            self._given_up.notify_all()
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(_END_S)
        self._credentials.close()

    def _begin(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if not self._thread.is_alive():
            self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _issue(self, group_id: GroupId) -> None:
        was_away = False
        while self._awaits(group_id):
            try:
                self._credentials.issue(group_id)
            except Unavailable as e:
                if not was_away:
                    self._log.event("relay_away", group_id=group_id, error=e.message)
                was_away = True
                with self._given_up:
                    self._given_up.wait_for(lambda: not self._awaits(group_id), _AWAY_S)
            except PlatformError as e:
                self._log.event("credential_not_issued", group_id=group_id, error=e.message)
                self._done(StartRefused(group_id, e.info()))
                return
            else:
                self._done(CredentialIssued(group_id))
                return

    def _awaits(self, group_id: GroupId) -> bool:
        return group_id in self._wanted and not self._closing

    def _revoke(self, group_id: GroupId) -> None:
        try:
            self._credentials.revoke(group_id)
        except PlatformError as e:
            self._log.event("credential_not_revoked", group_id=group_id, error=e.message)
            self._done(CredentialNotRevoked(group_id))


def patience_s(start_deadline_s: float) -> float:
    """How long a group waits for the relay server: a little less than for any progress, so that the error names it."""
    return 0.9 * start_deadline_s


def overdue(group_id: GroupId) -> StartRefused:
    error = Unavailable(
        "the relay server stayed away for as long as a start may wait", hint="look at the server of THAW_RELAY_URL"
    )
    return StartRefused(group_id, error.info())
