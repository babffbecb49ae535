"""What the relay must do for a group, off the loop: one thread issues and revokes credentials, in order.

A relay that is dead or hangs delays the groups that need it and nobody else.  Everything the loop must know comes back
as an item of its queue; in order, because a group's credential is never issued after it was revoked.

::

    decided ──▶ plan written ──▶ issue ──CredentialIssued──▶ commands sent
                                   ├──StartRefused────────▶ policy: a start that failed by ours
    loop's timer: CredentialOverdue┘   (given up: if it is still in line, it is not issued any more)
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.scheduler.events import StartRefused
from gateway.scheduler.group_credentials import GroupCredentials
from thaw.errors import PlatformError, Unavailable
from thaw.ids import GroupId
from thaw.lasting import LastingThread
from thaw.logs import Log

ISSUE_DEADLINE_S: Final = 3.0
"""A relay answers in a millisecond; a start that waits longer for it is better planned anew."""
_END_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class CredentialIssued:
    """The relay lets the group in: its commands may be sent."""

    group_id: GroupId


@dataclass(frozen=True, slots=True)
class CredentialOverdue:
    """A timer of the loop: should it still be awaited, it is given up."""

    group_id: GroupId


@dataclass(frozen=True, slots=True)
class CredentialNotRevoked:
    """To be tried again; a successor would find it too."""

    group_id: GroupId


class RelayWork:
    """``done`` is called from the thread with one of the above, or StartRefused."""

    def __init__(self, credentials: GroupCredentials, done: Callable[[object], None], log: Log) -> None:
        self._credentials, self._done, self._log = credentials, done, log
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._wanted: set[GroupId] = set()
        self._thread = LastingThread(self._run, "relay-work")

    def issue(self, group_id: GroupId) -> None:
        self._wanted.add(group_id)
        self._begin(lambda: self._issue(group_id))

    def give_up(self, group_id: GroupId) -> None:
        """Nobody waits for it any more: what is still in line is not issued."""
        self._wanted.discard(group_id)

    def revoke(self, group_id: GroupId) -> None:
        self.give_up(group_id)
        self._begin(lambda: self._revoke(group_id))

    def close(self) -> None:
        """What is left undone a successor finds in the state server."""
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
        if group_id not in self._wanted:
            return
        try:
            self._credentials.issue(group_id)
        except PlatformError as e:
            self._log.event("credential_not_issued", group_id=group_id, error=e.message)
            self._done(StartRefused(group_id, e.info()))
            return
        self._done(CredentialIssued(group_id))

    def _revoke(self, group_id: GroupId) -> None:
        try:
            self._credentials.revoke(group_id)
        except PlatformError as e:
            self._log.event("credential_not_revoked", group_id=group_id, error=e.message)
            self._done(CredentialNotRevoked(group_id))


def overdue(group_id: GroupId) -> StartRefused:
    error = Unavailable(f"the relay did not let the group in within {ISSUE_DEADLINE_S:g} s",
                        hint="look at the relay of THAW_RELAY_URL")  # fmt: skip
    return StartRefused(group_id, error.info())
