"""The events for which records wait, and the records that survive a state server's long absence."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import redis

from gateway.serving import recorder
from gateway.serving.outcome import outcome_of
from gateway.serving.recorder import Recorder
from gateway.serving.routing.invoker_pool import InvokerPool
from gateway.serving.runs import Outcome
from relay.protocol.data_port_messages import LogsFound, LogsWanted
from relay.state import redis_link
from relay.state.api_keys import Subject
from relay.state.records import Ended, Records
from relay.state.storage import Storage
from tests.gateway.calls import CHAT, GUEST, action_of, call_of, instance_of
from thaw.action import KIND_LLM, Limits
from thaw.activation import Activation, ActivationStatus
from thaw.errors import ErrorInfo, StorageFull, Unavailable, from_info
from thaw.ids import Namespace
from thaw.logs import Log
from thaw.quotas import Quotas


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis_link.connect(valkey_url) as connected:
        yield connected


class Away:
    """A state server that fails so many times and then answers again."""

    def __init__(self, failures: int = 2) -> None:
        self.failures = failures
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


OK = Outcome(ActivationStatus.SUCCESS, {})
OF_1000_BYTES = Outcome(ActivationStatus.SUCCESS, {"x": "y" * 992}, n_bytes=1_000)


def recorder_of(records: object, hosts: object = None, **more: Any) -> Recorder:
    return Recorder(cast(Records, records), cast(InvokerPool, hosts), Log("gateway"), **more)


def write(recording: Recorder) -> None:
    """Let it write everything, and end it."""
    recording.start()
    assert recording.settle(20.0)
    recording.stop(1.0)


def test_the_logs_of_one_host_do_not_wait_for_those_of_another() -> None:
    records = Away(failures=0)
    writing = recorder_of(records, Hosts())
    for n in range(4):
        writing.submit(call_of(str(n), dispatched_ms=1, instance=instance_of(address=f"h{n % 2}")), OK)
    write(writing)
    assert [(one.activation_id, one.logs) for one in records.records] == [
        (str(n), (f"line of h{n % 2}",)) for n in range(4)
    ]


class Host:
    def logs(self, address: str, wanted: LogsWanted, *, timeout_s: float) -> LogsFound:
        return LogsFound(tuple((f"line of {run.activation_id}",) for run in wanted.runs))


def test_who_calls_somebody_elses_function_that_runs_at_the_same_time_for_others_gets_no_lines() -> None:
    records = Away(failures=0)
    writing = recorder_of(records, Host())
    own, other = Subject(GUEST, "x"), Subject(Namespace("other"), "y")
    for name, concurrency, subject in (("own", 8, own), ("one", 1, other), ("many", 8, other)):
        action = action_of(limits=Limits(concurrency=concurrency))
        made = call_of(name, action=action, subject=subject, dispatched_ms=1, instance=instance_of(address="h"))
        writing.submit(made, OK)
    write(writing)
    assert {one.activation_id: one.logs for one in records.records} == {
        "own": ("line of own",),
        "one": ("line of one",),
        "many": (),
    }


def test_the_record_of_a_202_is_never_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_KEPT_S", -1.0)
    monkeypatch.setattr(recorder, "_RETRY_S", 0.0)
    monkeypatch.setattr(recorder, "_BATCH", 1)
    records = Away()
    writing = recorder_of(records)
    for name, entry in (("accepted", b"1-0"), ("held", None)):
        writing.submit(call_of(name), OK, entry)
    write(writing)
    assert records.written == ["accepted"]


def test_the_record_of_a_202_is_held_beyond_those_that_may_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_BACKLOG", 2)
    records = Away(failures=0)
    writing = recorder_of(records)
    for n, entry in enumerate((None, None, None, b"1-0", b"2-0", None)):
        writing.submit(call_of(str(n)), OK, entry)
    write(writing)
    assert records.written == ["0", "1", "3", "4"]


def test_a_namespace_with_many_records_keeps_no_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It delays them neither by its place in the queue nor by the room that it takes."""
    monkeypatch.setattr(recorder, "_BACKLOG", 80)
    records = Away(failures=0)
    writing = recorder_of(records, weight_of={"flood": 1.0, "honest": 2.0}.__getitem__)
    for name, n in (("flood", 500), ("honest", 4)):
        for i in range(n):
            writing.submit(call_of(f"{name}{i}", action_of(f"{name}/f")), OK)
    write(writing)
    assert records.written[:6] == ["flood0", "honest0", "honest1", "flood1", "honest2", "honest3"]
    assert len(records.written) == 70 + 4


def test_what_a_container_printed_before_its_start_failed_is_in_the_logs_and_not_in_the_answer() -> None:
    records = Away(failures=0)
    writing = recorder_of(records, Hosts())
    printed = "Traceback:\n  line 1"
    writing.submit(
        call_of("a", action_of(CHAT, KIND_LLM)),
        outcome_of(from_info(ErrorInfo("InitFailed", "the engine failed", printed=printed))),
    )
    write(writing)
    (record,) = records.records
    assert [line.partition(" ")[2] for line in record.logs] == ["stderr: Traceback:", "stderr:   line 1"]
    assert record.result == {"error": "the engine failed"}


def test_what_a_failed_start_printed_on_both_streams_is_in_the_logs() -> None:
    error = from_info(ErrorInfo("InitFailed", "it did not load", printed="Traceback\nSyntaxError", printed_out="hi"))
    lines = recorder._of_failed_start(outcome_of(error))
    assert [line.partition("Z ")[2] for line in lines] == ["stdout: hi", "stderr: Traceback", "stderr: SyntaxError"]


def test_results_that_wait_to_be_written_count_for_the_quota_of_records(client: redis.Redis) -> None:
    storage = Storage(client, lambda _: Quotas(1, 1, 40_000, 1, 1, 1))
    writing = recorder_of(Away(failures=0), expect=storage.expect)
    storage.check(GUEST)
    for n in range(30):
        writing.submit(call_of(str(n)), OF_1000_BYTES)
    with pytest.raises(StorageFull, match="no room for more records"):
        storage.check(GUEST)
    storage.check(Namespace("other"))
    write(writing)
    storage.check(GUEST)  # the server says what it has, and this one was not told of any record


def test_a_list_waits_for_the_records_that_its_namespace_had_queued_and_for_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not wait for later records of its namespace, which may never end, nor for those of another namespace."""
    monkeypatch.setattr(recorder, "_BATCH", 1)
    done = threading.Event()

    class Endless(Away):
        def end_all(self, ended: Sequence[Ended], told: object = None) -> list[bool]:
            for one in ended:
                if not done.is_set():
                    name = f"{one.record.activation_id}."
                    writing.submit(call_of(name, action_of(f"{one.record.namespace}/f")), OK)
            return super().end_all(ended)

    records = Endless(failures=0)
    writing = recorder_of(records)
    for namespace in ("flood", "guest"):
        writing.submit(call_of(namespace, action_of(f"{namespace}/f")), OK)
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
    writing = recorder_of(Records(client, storage=storage), expect=storage.expect)
    for n in range(3):
        writing.submit(call_of(str(n)), replace(OK, n_bytes=488))
    write(writing)
    assert seen == [2_000, 1_000, 0]


def test_what_is_lost_is_expected_no_more() -> None:
    expected: list[int] = []

    class Broken(Away):
        def end_all(self, ended: Sequence[Ended], told: object = None) -> list[bool]:
            raise ValueError("a record that cannot be written")

    writing = recorder_of(Broken(), expect=lambda _, n: expected.append(n))
    writing.submit(call_of(), replace(OK, n_bytes=488))
    write(writing)
    assert expected == [1_000, -1_000]
