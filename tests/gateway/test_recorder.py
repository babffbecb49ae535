"""The events for which records wait, and the records that survive a state server's long absence."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import cast

import pytest
import redis

from gateway.serving import recorder
from gateway.serving.call import Call
from gateway.serving.hangup import Hangup
from gateway.serving.outcome import outcome_of
from gateway.serving.recorder import Recorder
from gateway.serving.routing.invoker_pool import InvokerPool
from gateway.serving.runs import Outcome
from relay.protocol.data_port_messages import LogsFound, LogsWanted
from relay.state import redis_link
from relay.state.api_keys import Subject
from relay.state.records import Ended, Records
from relay.state.storage import Storage
from thaw.action import KIND_LLM, KIND_PYTHON, Action, Exec, Limits
from thaw.activation import Activation, ActivationStatus
from thaw.errors import ErrorInfo, StorageFull, Unavailable, from_info
from thaw.ids import ActionName, ActivationId, GroupId, HostId, InstanceId, Namespace
from thaw.instance import InstanceRecord, InstanceState, StartMode
from thaw.logs import Log
from thaw.quotas import Quotas


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis_link.connect(valkey_url) as connected:
        yield connected


class Away:
    """A state server that fails twice and then answers again."""

    def __init__(self) -> None:
        self.failures = 2
        self.written: list[str] = []
        self.records: list[Activation] = []

    def end_all(self, ended: Sequence[Ended], told: object = None) -> list[bool]:
        if self.failures:
            self.failures -= 1
            raise Unavailable("away")
        self.written += [one.record.activation_id for one in ended]
        self.records += [one.record for one in ended]
        return [True for _ in ended]


class Hosts:
    """Two hosts.  Each answers only when the other has been asked too."""

    def __init__(self) -> None:
        self.asked = threading.Barrier(2)

    def logs(self, address: str, wanted: LogsWanted, *, timeout_s: float) -> LogsFound:
        self.asked.wait(60)
        return LogsFound(tuple((f"line of {address}",) for _ in wanted.runs))


def test_the_logs_of_one_host_do_not_wait_for_those_of_another() -> None:
    records = Away()
    records.failures = 0
    writing = Recorder(cast(Records, records), cast(InvokerPool, Hosts()), Log("gateway"))
    action = Action(ActionName("guest/hello"), Namespace("guest"), "0.0.1", Exec(KIND_PYTHON), Limits())
    for n in range(4):
        call = Call(ActivationId(str(n)), action, Subject(Namespace("guest"), "x"), {}, Hangup())
        call.dispatched_ms = 1
        call.instance = InstanceRecord(
            InstanceId("i"),
            HostId("h"),
            action.name,
            "0.0.1",
            GroupId("g"),
            InstanceState.READY,
            f"h{n % 2}",
            1,
            0,
            "cpu",
            StartMode.COLD,
        )
        writing.submit(call, Outcome(ActivationStatus.SUCCESS, {}))
    writing.start()
    writing.settle(20.0)
    writing.stop(1.0)
    assert [(one.activation_id, one.logs) for one in records.records] == [
        (str(n), (f"line of h{n % 2}",)) for n in range(4)
    ]


def test_the_record_of_a_202_is_never_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_KEPT_S", -1.0)
    monkeypatch.setattr(recorder, "_RETRY_S", 0.0)
    monkeypatch.setattr(recorder, "_BATCH", 1)
    records = Away()
    writing = Recorder(cast(Records, records), InvokerPool("token"), Log("gateway"))
    action = Action(ActionName("guest/hello"), Namespace("guest"), "0.0.1", Exec(KIND_PYTHON), Limits())
    for name, entry in (("accepted", b"1-0"), ("held", None)):
        call = Call(ActivationId(name), action, Subject(Namespace("guest"), "x"), {}, Hangup())
        writing.submit(call, Outcome(ActivationStatus.SUCCESS, {}), entry)
    writing.start()
    writing.settle(10.0)
    writing.stop(1.0)
    assert records.written == ["accepted"]


def test_the_record_of_a_202_is_held_beyond_those_that_may_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_BACKLOG", 2)
    records = Away()
    records.failures = 0
    writing = Recorder(cast(Records, records), cast(InvokerPool, None), Log("gateway"))
    action = Action(ActionName("guest/hello"), Namespace("guest"), "0.0.1", Exec(KIND_PYTHON), Limits())
    for n, entry in enumerate((None, None, None, b"1-0", b"2-0", None)):
        call = Call(ActivationId(str(n)), action, Subject(Namespace("guest"), "x"), {}, Hangup())
        writing.submit(call, Outcome(ActivationStatus.SUCCESS, {}), entry)
    writing.start()
    writing.settle(20.0)
    writing.stop(1.0)
    assert records.written == ["0", "1", "3", "4"]


def test_a_namespace_with_many_records_keeps_no_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It delays them neither by its place in the queue nor by the room that it takes."""
    monkeypatch.setattr(recorder, "_BACKLOG", 80)
    records = Away()
    records.failures = 0
    weights = {"flood": 1.0, "honest": 2.0}
    writing = Recorder(cast(Records, records), cast(InvokerPool, None), Log("gateway"), weights.__getitem__)
    for name, n in (("flood", 500), ("honest", 4)):
        action = Action(ActionName(f"{name}/f"), Namespace(name), "0.0.1", Exec(KIND_PYTHON), Limits())
        for i in range(n):
            call = Call(ActivationId(f"{name}{i}"), action, Subject(Namespace(name), "x"), {}, Hangup())
            writing.submit(call, Outcome(ActivationStatus.SUCCESS, {}))
    writing.start()
    writing.settle(20.0)
    writing.stop(1.0)
    assert records.written[:6] == ["flood0", "honest0", "honest1", "flood1", "honest2", "honest3"]
    assert len(records.written) == 70 + 4


def test_what_a_container_printed_before_its_start_failed_is_in_the_logs_and_not_in_the_answer() -> None:
    records = Away()
    records.failures = 0
    writing = Recorder(cast(Records, records), cast(InvokerPool, Hosts()), Log("gateway"))
    action = Action(ActionName("guest/chat"), Namespace("guest"), "0.0.1", Exec(KIND_LLM), Limits())
    call = Call(ActivationId("a"), action, Subject(Namespace("guest"), "guest"), {}, Hangup())
    error = from_info(ErrorInfo("InitFailed", "the engine failed", "", "Traceback:\n  line 1"))
    writing.start()
    try:
        writing.submit(call, outcome_of(error))
        writing.settle(10)
    finally:
        writing.stop(10)
    (record,) = records.records
    assert [line.partition(" ")[2] for line in record.logs] == ["stderr: Traceback:", "stderr:   line 1"]
    assert record.result == {"error": "the engine failed"}


def test_what_a_failed_start_printed_on_both_streams_is_in_the_logs() -> None:
    error = from_info(ErrorInfo("InitFailed", "it did not load", printed="Traceback\nSyntaxError", printed_out="hi"))
    lines = recorder._of_failed_start(outcome_of(error))
    assert [line.partition("Z ")[2] for line in lines] == ["stdout: hi", "stderr: Traceback", "stderr: SyntaxError"]


def test_results_that_wait_to_be_written_count_for_the_quota_of_records(client: redis.Redis) -> None:
    quotas = Quotas(1, 1, 40_000, 1, 1, 1)
    storage = Storage(client, lambda _: quotas)
    records = Away()
    writing = Recorder(cast(Records, records), cast(InvokerPool, None), Log("gateway"), expect=storage.expect)
    guest = Namespace("guest")
    action = Action(ActionName("guest/hello"), guest, "0.0.1", Exec(KIND_LLM), Limits())
    storage.check(guest)
    for n in range(30):
        call = Call(ActivationId(str(n)), action, Subject(guest, "x"), {}, Hangup())
        writing.submit(call, Outcome(ActivationStatus.SUCCESS, {"x": "y" * 992}, n_bytes=1_000))
    with pytest.raises(StorageFull, match="no room for more records"):
        storage.check(guest)
    storage.check(Namespace("other"))
    records.failures = 0
    writing.start()
    writing.settle(20.0)
    writing.stop(1.0)
    storage.check(guest)  # the server says what it has, and this one was not told of any record


GUEST = Namespace("guest")


def call_of(name: str, namespace: Namespace = GUEST) -> Call:
    action = Action(ActionName(f"{namespace}/f"), namespace, "0.0.1", Exec(KIND_PYTHON), Limits())
    return Call(ActivationId(name), action, Subject(namespace, "x"), {}, Hangup())


def test_a_list_waits_for_the_records_that_its_namespace_had_queued_and_for_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not wait for later records of its namespace, which may never end, nor for those of another namespace."""
    monkeypatch.setattr(recorder, "_BATCH", 1)
    done, flood = threading.Event(), Namespace("flood")

    class Endless(Away):
        def end_all(self, ended: Sequence[Ended], told: object = None) -> list[bool]:
            for one in ended:
                if not done.is_set():
                    name = f"{one.record.activation_id}."
                    writing.submit(call_of(name, one.record.namespace), Outcome(ActivationStatus.SUCCESS, {}))
            return super().end_all(ended)

    records = Endless()
    records.failures = 0
    writing = Recorder(cast(Records, records), cast(InvokerPool, None), Log("gateway"))
    for namespace in (flood, GUEST):
        writing.submit(call_of(namespace, namespace), Outcome(ActivationStatus.SUCCESS, {}))
    writing.start()
    try:
        assert writing.settle(10.0, GUEST)
        assert "guest" in records.written
        assert writing.settle(10.0, Namespace("nobody"))
    finally:
        done.set()
        writing.stop(10.0)


def test_what_is_written_is_expected_no_more_when_its_bytes_count(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.state.records._TRANSACTION_BYTES", 1)
    storage = Storage(client, lambda _: Quotas(1, 1, 10**9, 1, 1, 1))
    seen: list[int] = []
    learn = storage.learn

    def learned(namespace: Namespace, *has: int) -> None:
        seen.append(storage._expected.get(namespace, 0))
        learn(namespace, *has)

    monkeypatch.setattr(storage, "learn", learned)
    records = Records(client, storage=storage)
    writing = Recorder(records, cast(InvokerPool, None), Log("gateway"), expect=storage.expect)
    for n in range(3):
        writing.submit(call_of(str(n)), Outcome(ActivationStatus.SUCCESS, {}, n_bytes=488))
    writing.start()
    assert writing.settle(20.0)
    writing.stop(1.0)
    assert seen == [2_000, 1_000, 0]


def test_what_is_lost_is_expected_no_more() -> None:
    expected: list[int] = []

    class Broken(Away):
        def end_all(self, ended: Sequence[Ended], told: object = None) -> list[bool]:
            raise ValueError("a record that cannot be written")

    writing = Recorder(
        cast(Records, Broken()), cast(InvokerPool, None), Log("gateway"), expect=lambda _, n: expected.append(n)
    )
    writing.submit(call_of("a"), Outcome(ActivationStatus.SUCCESS, {}, n_bytes=488))
    writing.start()
    assert writing.settle(20.0)
    writing.stop(1.0)
    assert expected == [1_000, -1_000]
