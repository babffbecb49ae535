"""A blocking call that became a 202, tested without a gateway process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gateway.serving.blocking import BlockingRuns
from gateway.serving.call import Call
from gateway.serving.execute import Steps
from gateway.serving.recorder import Recorder
from gateway.serving.routing.invoker_pool import InvokerPool
from gateway.serving.routing.throttle import Place, Throttle
from gateway.serving.runs import Outcome
from relay.state import redis_link
from relay.state.records import Pending, Records
from relay.state.registry import Registry
from tests.gateway.calls import GUEST, call_of
from tests.gateway.conftest import wait_for_record
from thaw.activation import ActivationStatus
from thaw.errors import Throttled
from thaw.ids import GatewayId, Namespace
from thaw.logs import Log

OURS = GatewayId("ours")


class Noted(Records):
    """Notes whether the owner has a lease when the entry is written."""

    lives: bool

    def accept(self, pending: Pending, owner: str = "") -> bytes:
        self.lives = Registry(self._redis).is_gateway_alive(GatewayId(owner))
        return super().accept(pending, owner)


OTHER = Namespace("other")


@pytest.fixture
def records(valkey_url: str) -> Iterator[Noted]:
    with redis_link.connect(valkey_url) as client:
        yield Noted(client)


def runs_of(records: Records, n_threads: int) -> tuple[BlockingRuns, threading.Event]:
    """Runs of a function that ends when the event is set."""
    ends = threading.Event()

    def steps(_: Call) -> Steps:
        yield "queued"
        ends.wait(60)
        return Outcome(ActivationStatus.SUCCESS, {"n": 1})

    recorder = Recorder(records, InvokerPool("token"), Log("gateway"))
    return BlockingRuns(steps, recorder, records, Registry(records._redis), OURS, n_threads), ends


def test_the_owner_of_an_entry_has_a_lease_though_none_outlived_the_state_server(
    records: Noted, valkey_url: str
) -> None:
    """Without a lease, another gateway that reads the entry would take the run in progress for a lost one."""
    runs, ends = runs_of(records, 1)
    call = call_of()
    assert runs.run(call, 0.0, ExitStack(), Place(Throttle(9, 9), GUEST)) is None
    assert records.lives
    assert not records.mark_started(call.activation_id, "another"), "whoever claims its entry may run it again"
    ends.set()
    assert wait_for_record(valkey_url, call.activation_id).result == {"n": 1}
    runs.stop()


def test_a_run_that_outlasts_its_request_gives_the_place_of_its_thread_to_another_one(
    records: Noted, valkey_url: str
) -> None:
    """The run counts as one of its namespace's invocations until it ends."""
    throttle, call = Throttle(1_000, 1, places=1), call_of()
    runs, ends = runs_of(records, 2)
    with ExitStack() as counted:
        place = counted.enter_context(throttle.counted(GUEST))
        with pytest.raises(Throttled, match="0 of this gateway's threads are free"):
            throttle.enter(OTHER)
        assert runs.run(call, 0.0, counted, place) is None
    throttle.enter(OTHER)
    throttle.leave(OTHER)
    with pytest.raises(Throttled, match=r"count: 2, allowed: 1\)"):
        throttle.enter(GUEST)
    ends.set()
    assert wait_for_record(valkey_url, call.activation_id).result == {"n": 1}
    runs.stop()
    throttle.enter(GUEST)
    with pytest.raises(Throttled, match="0 of this gateway's threads are free"):
        throttle.enter(OTHER)
