"""The scheduler's lease: how long a process may believe that it leads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import redis

from gateway.scheduler.decisions import CancelGroup
from gateway.scheduler.io import leading
from gateway.scheduler.io.effects import Arrival
from gateway.scheduler.io.leading import Leadership, Term, wait_for_lease
from gateway.scheduler.loop import Scheduler
from gateway.scheduler.settings import SchedulerSettings
from relay.state import keys, redis_link
from relay.state.lease import LEASE_MS, SchedulerLease
from tests.conftest import Clock
from thaw.errors import Unavailable
from thaw.ids import CommandId, GroupId, HostId
from thaw.logs import Log

LEASE_S = LEASE_MS / 1000
LOG = Log("test")


class _Slow(SchedulerLease):
    """The server grants the lease at once, but its answer only arrives when ``answer`` returns."""

    answer: Callable[[], None]

    def acquire(self) -> int | None:
        epoch = super().acquire()
        self.answer()
        return epoch

    def renew(self) -> bool:
        kept = super().renew()
        self.answer()
        return kept


class _Unreachable(SchedulerLease):
    """The server does not answer.  Each try releases ``tries``."""

    tries: threading.Semaphore

    def renew(self) -> bool:
        self.tries.release()
        raise Unavailable("away")


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis_link.connect(valkey_url) as connected:
        yield connected


def test_a_lease_is_valid_from_when_it_was_asked_for_and_not_from_the_answer(client: redis.Redis) -> None:
    clock, lease = Clock(), _Slow(client, "us")

    def late() -> None:
        clock.now_s += LEASE_S - 0.1

    lease.answer = late
    term = wait_for_lease(lease, threading.Event(), LOG, clock)
    leadership = Leadership(lease, term, lambda: None, LOG, clock)
    assert leadership.is_held
    clock.now_s += 0.2  # by now the server may have granted the lease to another process
    assert not leadership.is_held


def test_a_renewal_is_valid_from_when_it_was_asked_for_and_not_from_the_answer(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "RENEW_S", 0.001)
    clock, lease = Clock(), _Slow(client, "us")
    asked_again, go_on, lost = threading.Event(), threading.Event(), threading.Event()
    answers = iter([lambda: None, lambda: None])

    def late() -> None:
        if next(answers, None) is None:
            asked_again.set()
            go_on.wait(10)
        else:
            clock.now_s += 1.0

    lease.answer = lambda: None
    term = wait_for_lease(lease, threading.Event(), LOG, clock)
    lease.answer = late
    leadership = Leadership(lease, term, lost.set, LOG, clock)
    leadership.start()
    try:
        assert asked_again.wait(10)
        # two renewals were each answered a second late; the last of them was requested a second ago
        assert leadership.is_held
        clock.now_s += LEASE_S - 0.9
        assert not leadership.is_held
        client.set(keys.SCHEDULER_LEASE, "another")
    finally:
        go_on.set()
    assert lost.wait(10)
    assert not leadership.is_held


def test_a_lease_that_cannot_be_renewed_is_lost_when_its_time_is_over(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "RENEW_S", 0.001)
    clock, lost, lease = Clock(), threading.Event(), _Unreachable(client, "us")
    lease.tries = threading.Semaphore(0)
    leadership = Leadership(lease, Term(1, clock() + LEASE_S), lost.set, LOG, clock)
    leadership.start()
    for _ in range(3):
        assert lease.tries.acquire(timeout=10)
    assert leadership.is_held
    assert not lost.is_set()
    clock.now_s += LEASE_S
    assert not leadership.is_held
    assert lost.wait(10)


def test_a_lease_that_is_given_back_is_free_at_once_and_held_no_longer(client: redis.Redis) -> None:
    lease = SchedulerLease(client, "us")
    term = wait_for_lease(lease, threading.Event(), LOG)
    leadership = Leadership(lease, term, lambda: None, LOG)
    leadership.end()
    assert not leadership.is_held
    after = wait_for_lease(SchedulerLease(client, "them"), threading.Event(), LOG)
    assert after.epoch == term.epoch + 1


def test_a_standby_that_is_told_to_stop_waits_for_no_lease(client: redis.Redis) -> None:
    assert SchedulerLease(client, "them").acquire() is not None
    stop, waited = threading.Event(), threading.Event()

    def wait() -> None:
        if wait_for_lease(SchedulerLease(client, "us"), stop, LOG) is None:
            waited.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    stop.set()
    assert waited.wait(10)
    thread.join(10)


def test_nothing_is_sent_once_the_lease_is_over(client: redis.Redis, valkey_url: str) -> None:
    """A host refuses a command of an older epoch, but the registry would store anything."""
    host = HostId("h0")
    for valid_for_s, n_sent in ((-1.0, 0), (60.0, 1)):
        term = Term(1, time.monotonic() + valid_for_s)
        scheduler = Scheduler(SchedulerSettings(valkey_url), SchedulerLease(client, "us"), term, LOG)
        scheduler._carry_out(CancelGroup(host, GroupId("a" * 32), CommandId("c")), Arrival.now())
        assert client.xlen(keys.commands(host)) == n_sent
        scheduler._relay.close()
        scheduler._client.close()


def test_a_scheduler_whose_lease_is_over_by_its_own_clock_takes_no_further_event(
    client: redis.Redis, valkey_url: str
) -> None:
    """The scheduler notices this before its next renewal: it may have been stopped for longer than the lease."""
    lease = SchedulerLease(client, "us")
    assert lease.acquire() == 1
    scheduler = Scheduler(SchedulerSettings(valkey_url), lease, Term(1, time.monotonic()), LOG)
    thread = threading.Thread(target=scheduler.run, daemon=True)
    thread.start()
    try:
        thread.join(10)
        assert not thread.is_alive()
        assert scheduler._view is None, "it read the registry and would decide"
    finally:
        scheduler.stop()
        thread.join(10)
