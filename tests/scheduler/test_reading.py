"""The messages of the event stream that reach the policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from gateway.scheduler.events import QuotasSeen
from gateway.scheduler.io.group_credentials import GroupCredentials
from gateway.scheduler.io.reading import Reading
from gateway.scheduler.settings import SchedulerSettings
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.history import History
from relay.protocol.messages import CommandRefused, ConsolidationFailed, InstanceChanged, StartFailed
from relay.state import bus, keys, redis_link
from relay.state.clock import StateClock
from relay.state.quotas import NamespaceQuotas
from tests.relay.samples import GROUP, INSTANCE
from thaw.errors import ErrorInfo
from thaw.ids import CommandId, Namespace
from thaw.logs import Log
from thaw.model_uri import policy_of
from thaw.quotas import OwnQuotas

ERROR = ErrorInfo("Unavailable", "not now")


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis_link.connect(valkey_url) as connected:
        yield connected


@pytest.fixture
def reading(client: redis.Redis) -> Reading:
    return Reading(client, GroupCredentials(client, ""), Log("test"), StateClock(), policy_of("file://"))


@pytest.fixture
def view() -> ClusterView:
    return ClusterView(1, SchedulerSettings("redis://"), lambda: "id", History())


@pytest.mark.parametrize(
    ("message", "is_told"),
    [
        (InstanceChanged(INSTANCE), True),
        (CommandRefused(CommandId("c"), INSTANCE.host_id, GROUP, ERROR), True),
        (ConsolidationFailed(INSTANCE.instance_id, INSTANCE.host_id, GROUP, ERROR), True),
        (StartFailed(INSTANCE.action, (), ERROR, GROUP), False),  # its own word
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_policy_is_told_what_hosts_say(reading: Reading, view: ClusterView, message: Any, is_told: bool) -> None:
    assert list(reading.events_of([message], view)) == ([message] if is_told else [])


def test_the_policy_learns_of_quotas_when_they_change_and_when_it_begins(
    client: redis.Redis, reading: Reading, view: ClusterView
) -> None:
    quotas, guest = NamespaceQuotas(client), Namespace("guest")
    quotas.change(guest, {"weight": 3.0})
    quotas.change(guest, {"starts": 2})
    rows: Any = client.xrange(keys.EVENTS)
    told = [bus.unpack(fields[b"f"]) for _, fields in rows]
    seen = QuotasSeen(guest, OwnQuotas(starts=2, weight=3.0))
    assert list(reading.events_of(told, view)) == [seen, seen]
    assert reading.rebuilt().quotas == (seen,)


def test_who_schedules_puts_counts_right_when_it_begins_and_now_and_then(
    client: redis.Redis, reading: Reading, view: ClusterView, monkeypatch: pytest.MonkeyPatch
) -> None:

    def is_right_after(step: Callable[[], object]) -> bool:
        client.hset(keys.HELD, "guest", 5)
        step()
        return not client.exists(keys.HELD)

    assert is_right_after(reading.rebuilt)
    assert not is_right_after(lambda: list(reading.heartbeats(view)))
    later_s = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert is_right_after(lambda: list(reading.heartbeats(view)))
