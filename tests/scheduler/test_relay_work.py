"""A group's access to a relay that is away, that refuses, or for which the group no longer waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gateway.scheduler.events import StartRefused
from gateway.scheduler.io.group_admission import CredentialIssued, RelayWork
from thaw.errors import PlatformError, Unavailable
from thaw.ids import GroupId
from thaw.logs import Log

GROUP, OTHER = GroupId("a" * 32), GroupId("b" * 32)
AWAY = Unavailable("let a group into the relay: the relay does not answer")
WAIT_S = 20.0


class Credentials:
    """Raises the given errors, one per call.  ``asked`` counts the calls."""

    def __init__(self, *errors: PlatformError, always: PlatformError | None = None) -> None:
        self._errors, self._always = list(errors), always
        self.asked = threading.Semaphore(0)

    def issue(self, group_id: GroupId) -> None:
        self.asked.release()
        error = self._errors.pop(0) if self._errors else self._always
        if error is not None and group_id == GROUP:
            raise error

    def close(self) -> None: ...


@contextmanager
def working(credentials: Any) -> Iterator[tuple[RelayWork, queue.SimpleQueue[object]]]:
    said: queue.SimpleQueue[object] = queue.SimpleQueue()
    work = RelayWork(credentials, said.put, Log("test"))
    yield work, said
    work.close()


def test_a_relay_that_is_away_is_waited_for_and_the_group_let_in_when_it_is_back() -> None:
    """Each refusal used to count as a failed start, and the third ended the request."""
    with working(Credentials(AWAY, AWAY, AWAY, AWAY)) as (work, said):
        work.issue(GROUP)
        assert said.get(timeout=WAIT_S) == CredentialIssued(GROUP)


def test_a_relay_that_says_no_is_not_asked_again() -> None:
    no = PlatformError("let a group into the relay: the relay refused: unknown command ACL")
    with working(Credentials(no)) as (work, said):
        work.issue(GROUP)
        assert said.get(timeout=WAIT_S) == StartRefused(GROUP, no.info())


def test_who_is_given_up_while_the_relay_is_away_waits_no_longer_and_holds_nobody_up() -> None:
    credentials = Credentials(always=AWAY)
    with working(credentials) as (work, said):
        work.issue(GROUP)
        assert credentials.asked.acquire(timeout=WAIT_S)
        work.give_up(GROUP)
        work.issue(OTHER)
        assert said.get(timeout=WAIT_S) == CredentialIssued(OTHER)
