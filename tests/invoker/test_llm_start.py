"""The start of an LLM instance step by step, with each step failing once, and its stream through the invoker."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from invoker.containers.call import ContainerCall
from invoker.drivers.base import Handle, Spec
from relay.protocol.messages import HostChanged, InspectModel, ModelInspected
from tests.invoker.llm_host import URI, LlmHost, fake_engine, host
from tests.invoker.platform import HOST, WAIT_S, opened, until
from thaw.action import KIND_LLM
from thaw.errors import ErrorInfo, ModelCorrupt, Unavailable
from thaw.host import HeldSegment, PoolReport
from thaw.ids import InstanceId
from thaw.tracing.trace import Phase

__all__ = ["fake_engine", "host"]

UNSUPPORTED = {"code": "ModelUnsupported", "message": "no such architecture", "hint": "take another"}


def test_bytes_are_asked_for_before_anything_else(host: LlmHost) -> None:
    record = host.ready_llm()
    assert host.fetchd.calls[:3] == ["start", "open_descriptor_socket", "grant segment-1"]
    assert record.slots == 3
    assert record.reserve_bytes == 1 << 30
    assert record.model_version == "00"


def test_fetchd_is_asked_to_keep_to_the_pace_of_the_plan(host: LlmHost) -> None:
    host.deploy_llm()
    plan = host.llm_plan()
    host.launch(replace(plan, stages=(replace(plan.stages[0], pace_bytes_per_s=12_500_000),)))
    until(lambda: host.fetchd.requests)
    assert [r.pace_bytes_per_s for r in host.fetchd.requests] == [12_500_000]


def test_the_trace_has_fetchds_events_too(host: LlmHost) -> None:
    record = host.ready_llm()
    host.release(record.instance_id)
    host.gone(record.instance_id)
    expected = {Phase.COMMAND, Phase.FETCH_END, Phase.CONTAINER_END, Phase.READY}
    until(lambda: expected <= {e.name for e in host.records.trace(record.group_id)})
    assert all(e.group_id == record.group_id for e in host.records.trace(record.group_id))


def test_a_fetch_that_fails_ends_the_start_at_once_with_its_error(host: LlmHost) -> None:
    instance_id = host.launch_llm()
    host.fetchd.failure = ModelCorrupt("chunk 3 failed its checksum")
    host.fetchd.ended.set()
    error = host.failed(instance_id)
    assert (error.code, error.message) == ("ModelCorrupt", "chunk 3 failed its checksum")


def test_an_engine_that_refuses_ends_the_start_with_its_error_and_says_where_its_words_are(
    host: LlmHost, capfd: pytest.CaptureFixture[str]
) -> None:
    """An activation of kind llm has no logs, and the container's output is deleted with the container."""
    error = host.fails_in_init(status=502, error="x", info={**UNSUPPORTED, "hint": ""})
    assert error.code == "ModelUnsupported"
    assert error.hint == "thaw activation logs has what the engine printed"
    assert '"POST /init' in error.printed
    logged = [json.loads(line) for line in capfd.readouterr().err.splitlines() if '"start_failed"' in line]
    assert '"POST /init' in logged[0]["printed"]


def test_a_refusal_counts_though_the_end_of_its_container_is_seen_first(
    host: LlmHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that has refused a model ends, and its container with it."""
    seen, ask = threading.Event(), ContainerCall.ask
    driver = host.agent.driver
    monkeypatch.setattr(driver, "_callbacks", [*driver._callbacks, lambda _: seen.set()])  # type: ignore[attr-defined]

    def ask_late(call: ContainerCall, *args: str) -> tuple[int, dict[str, object]]:
        answer = ask(call, *args)
        (live,) = host.agent.fleet.all()
        assert live.handle is not None
        os.kill(live.handle.pid, signal.SIGKILL)
        assert seen.wait(WAIT_S)
        live.exited.wait(0.5)  # the time in which the invoker could draw conclusions from the end
        return answer

    monkeypatch.setattr(ContainerCall, "ask", ask_late)
    error = host.fails_in_init(status=502, error="x", info=UNSUPPORTED)
    assert replace(error, printed="") == ErrorInfo(**UNSUPPORTED)


def test_a_container_killed_while_it_starts_may_be_started_again_elsewhere(host: LlmHost) -> None:
    instance_id = host.launch_llm()
    with opened(host.pipe(instance_id, "init")):  # the container is up and waits in /init
        os.kill(host.pid(instance_id), signal.SIGKILL)
    assert host.failed(instance_id).code == "WorkerLost"


def test_an_engine_killed_while_it_starts_is_what_its_container_says_and_no_developers_error(host: LlmHost) -> None:
    info = {"code": "WorkerLost", "message": "the engine process was killed by SIGKILL", "hint": "out of memory"}
    error = host.fails_in_init(status=500, error="x", info=info)
    assert replace(error, printed="") == ErrorInfo(**info)


def test_a_container_that_ends_by_the_signal_of_its_engine_was_killed(host: LlmHost) -> None:
    """The container may end before it can answer /init."""
    error = host.fails_in_init(exit=128 + signal.SIGKILL)
    said = "the container was killed while it started (status -9)"
    assert (error.code, error.message) == ("WorkerLost", said)


def test_a_stem_cell_that_cannot_be_given_its_model_is_ended(host: LlmHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_grant(*_: object) -> None:
        raise Unavailable("fetchd does not answer")

    monkeypatch.setattr(host.fetchd, "grant_segment", no_grant)
    monkeypatch.setattr(host.agent.driver, "zygote", None)  # so each cell is a container of its own
    cells = host.agent.cells
    cells.set_target(KIND_LLM, 1)
    until(lambda: bool(cells.view()))
    cell = cells._waiting[0]
    host.deploy_llm()
    assert host.failed(host.launch(host.llm_plan())).message == "fetchd does not answer"
    assert not Path(f"/proc/{cell.pid}").exists()
    assert cell.container_id not in host.fetchd.open


def test_a_cancelled_group_gives_its_fetch_up(host: LlmHost) -> None:
    host.deploy_llm()
    plan = host.llm_plan()
    instance_id = host.launch(plan)
    host.in_init(instance_id)
    host.cancel(plan.group_id)
    host.gone(instance_id)
    until(lambda: "cancel" in host.fetchd.calls)  # the end is announced first


def test_an_invoker_that_ends_waits_for_a_start_that_was_given_up(
    host: LlmHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start removes the container that it makes.  The fixture's end finds what is left."""
    host.deploy_llm()
    driver, cells, making, ending = host.agent.driver, host.agent.cells, threading.Event(), threading.Event()
    start, close = driver.start, cells.close

    def started_late(handle: Handle, spec: Spec) -> Handle:
        making.set()
        assert ending.wait(WAIT_S)
        return start(handle, spec)

    def closed() -> None:
        close()
        ending.set()

    monkeypatch.setattr(driver, "start", started_late)
    monkeypatch.setattr(cells, "close", closed)
    plan = host.llm_plan()
    instance_id = host.launch(plan)
    assert making.wait(WAIT_S)
    host.cancel(plan.group_id)
    host.gone(instance_id)


def test_a_fetch_that_begins_when_its_start_has_ended_is_given_up(host: LlmHost) -> None:
    host.deploy_llm()
    host.fetchd.is_up.clear()  # fetchd is coming up, and the start waits for it
    plan = host.llm_plan()
    instance_id = host.launch(plan)
    until(lambda: host.fetchd.calls == ["start"])
    host.cancel(plan.group_id)
    host.gone(instance_id)
    users = host.agent.fleet.pool_users
    assert users.names() == (instance_id,), "its question may still take a part of the pool"
    host.fetchd.is_up.set()
    until(lambda: users.names() == ())
    assert host.fetchd.holders == set(), "a cancel before the fetch began found nothing, so another one followed"


def test_a_start_that_ends_between_its_last_byte_and_its_descriptor_socket_leaves_nothing_in_the_pool(
    host: LlmHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_socket(instance_id: InstanceId, **_: object) -> str:
        until(lambda: not host.live(instance_id).fetching)  # all bytes have arrived
        raise Unavailable("fetchd makes no descriptor sockets")

    monkeypatch.setattr(host.fetchd, "open_descriptor_socket", no_socket)
    host.deploy_llm()
    host.fetchd.ended.set()
    host.gone(host.launch(host.llm_plan()))
    until(lambda: host.fetchd.holders == set())


def test_the_host_says_at_once_that_there_is_room_in_its_pool(host: LlmHost) -> None:
    record = host.ready_llm()
    mine = (record.instance_id,)

    def pool() -> PoolReport:
        report = host.registry.live_host(HOST)
        assert report is not None
        assert report.pool is not None
        return report.pool

    until(lambda: pool().users == mine and pool().held == (HeldSegment("its key", 2, True, mine),))
    assert (pool().slab_bytes, pool().n_slabs) == (1 << 26, 16)
    host.events.seen.clear()  # the start may have changed the pool, too
    host.release(record.instance_id)
    with_room = HostChanged(HOST, True)
    host.events.wait(lambda m: m == with_room and (pool().held, pool().users) == ((), ()), "word of the room")
    assert pool().seen_wall_ms > record.created_wall_ms


def test_each_token_passes_when_it_is_made(host: LlmHost) -> None:
    record = host.ready_llm()
    connection, response = host.open_run(record.instance_id)
    assert response.headers["Content-Type"] == "application/x-thaw-stream"
    with host.feed(record.instance_id) as feed:
        for word in ("one", "two", "three"):
            feed.write(word + "\n")
            n_bytes = int.from_bytes(response.read(4), "little")  # the next word is only written after this one arrived
            assert json.loads(response.read(n_bytes))["text"] == word
    assert response.read() == b""
    connection.close()


def test_of_an_llms_runs_no_lines_are_kept(host: LlmHost) -> None:
    """A container may answer a million runs, and their logs are never requested."""
    record = host.ready_llm()
    connection, response = host.open_run(record.instance_id)
    host.pipe(record.instance_id, "feed").write_text("one\n")
    assert response.read()
    assert host.logs(record.instance_id, "a" * 32) is None
    connection.close()


def test_a_container_that_dies_in_a_stream_leaves_it_without_an_end(host: LlmHost) -> None:
    record = host.ready_llm()
    connection, response = host.open_run(record.instance_id)
    with host.feed(record.instance_id) as feed:
        feed.write("one\n")
        response.read(4)
        os.kill(host.pid(record.instance_id), signal.SIGKILL)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
    connection.close()
    assert host.failed(record.instance_id).code == "WorkerLost"


def test_a_caller_that_hangs_up_closes_the_containers_connection_only(host: LlmHost) -> None:
    record = host.ready_llm()
    connection, response = host.open_run(record.instance_id)
    with host.feed(record.instance_id) as feed:
        feed.write("one\n")
        response.read(4)
        live = host.agent.fleet.all()[0]
        response.close()
        connection.close()
        assert live.idle.wait(WAIT_S)
        feed.write("two\n")
    host.release(record.instance_id)
    assert host.gone(record.instance_id).error is None


def test_what_a_model_is_goes_to_the_registry_and_to_whoever_asked(host: LlmHost) -> None:
    began = time.monotonic()
    asked = host.send(InspectModel(URI))
    inspected = host.events.wait(lambda m: isinstance(m, ModelInspected))
    assert inspected.command_id == asked
    assert 0 < inspected.took_s <= time.monotonic() - began + 1e-4  # it is rounded
    assert inspected.facts == host.registry.model(URI)
    assert inspected.error is None


def test_a_model_that_is_as_the_scheduler_knows_it_is_not_described_again(host: LlmHost) -> None:
    asked = host.send(InspectModel(URI, URI, "00"))
    unchanged = host.events.wait(lambda m: isinstance(m, ModelInspected))
    assert unchanged.command_id == asked
    assert (unchanged.facts, unchanged.error, unchanged.unchanged_version) == (None, None, "00")
    host.send(InspectModel(URI, f"{URI}@other", "00"))
    host.events.wait(lambda m: isinstance(m, ModelInspected) and m.facts is not None)
