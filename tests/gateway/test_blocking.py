"""A blocking call that became a 202, tested without a gateway process."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from gateway.serving.blocking import BlockingRuns
from gateway.serving.call import Call
from gateway.serving.execute import Steps
from gateway.serving.hangup import Hangup
from gateway.serving.recorder import Recorder
from gateway.serving.routing.invoker_pool import InvokerPool
from gateway.serving.routing.throttle import Place, Throttle
from gateway.serving.runs import Outcome
from relay.state import redis_link
from relay.state.api_keys import Subject
from relay.state.records import Pending, Records
from relay.state.registry import Registry
from tests.gateway.conftest import wait_for_record
from thaw.action import KIND_PYTHON, Action, Exec, Limits
from thaw.activation import ActivationStatus
from thaw.errors import Throttled
from thaw.ids import ActionName, ActivationId, GatewayId, Namespace
from thaw.logs import Log

OURS = GatewayId("ours")


class Noted(Records):
    """Notes whether the owner has a lease when the entry is written."""

    lives: bool

    def accept(self, pending: Pending, owner: str = "") -> bytes:
        self.lives = Registry(self._redis).is_gateway_alive(GatewayId(owner))
        return super().accept(pending, owner)


def test_the_owner_of_an_entry_has_a_lease_though_none_outlived_the_state_server(valkey_url: str) -> None:
    """Without a lease, another gateway that reads the entry would take the run in progress for a lost one."""
    ends = threading.Event()

    def steps(_: Call) -> Steps:
        yield "queued"
        ends.wait(60)
        return Outcome(ActivationStatus.SUCCESS, {"n": 1})

    with redis_link.connect(valkey_url) as client:
        records = Noted(client)
        recorder = Recorder(records, InvokerPool("token"), Log("gateway"))
        runs = BlockingRuns(steps, recorder, records, Registry(client), OURS, 1)
        action = Action(ActionName("guest/hello"), Namespace("guest"), "0.0.1", Exec(KIND_PYTHON), Limits())
        call = Call(ActivationId("a" * 32), action, Subject(Namespace("guest"), "x"), {}, Hangup())
        assert runs.run(call, 0.0, ExitStack(), Place(Throttle(9, 9), call.subject.namespace)) is None
        assert records.lives
        assert not records.mark_started(call.activation_id, "another"), "whoever claims its entry may run it again"
        ends.set()
        assert wait_for_record(valkey_url, call.activation_id).result == {"n": 1}
        runs.stop()


def test_a_run_that_outlasts_its_request_gives_the_place_of_its_thread_to_another_one(valkey_url: str) -> None:
    """The run counts as one of its namespace's invocations until it ends."""
    guest, other, ends = Namespace("guest"), Namespace("other"), threading.Event()

    def steps(_: Call) -> Steps:
        yield "queued"
        ends.wait(60)
        return Outcome(ActivationStatus.SUCCESS, {"n": 1})

    throttle = Throttle(1_000, 1, places=1)
    with redis_link.connect(valkey_url) as client:
        records = Records(client)
        recorder = Recorder(records, InvokerPool("token"), Log("gateway"))
        runs = BlockingRuns(steps, recorder, records, Registry(client), OURS, 2)
        action = Action(ActionName("guest/hello"), guest, "0.0.1", Exec(KIND_PYTHON), Limits())
        call = Call(ActivationId("a" * 32), action, Subject(guest, "x"), {}, Hangup())
        with ExitStack() as counted:
            place = counted.enter_context(throttle.counted(guest))
            with pytest.raises(Throttled, match="0 of this gateway's threads are free"):
                throttle.enter(other)
            assert runs.run(call, 0.0, counted, place) is None
        throttle.enter(other)
        throttle.leave(other)
        with pytest.raises(Throttled, match=r"count: 2, allowed: 1\)"):
            throttle.enter(guest)
        ends.set()
        assert wait_for_record(valkey_url, call.activation_id).result == {"n": 1}
        runs.stop()
        throttle.enter(guest)
        with pytest.raises(Throttled, match="0 of this gateway's threads are free"):
            throttle.enter(other)
