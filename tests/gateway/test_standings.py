"""The standings of a namespace's models, for programs that show them elsewhere."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import redis

from gateway.serving.held.standings import StandingsOf
from gateway.serving.held.work import WorkBook
from relay.protocol.messages import ColdStarted, StartFailed
from relay.state import bus, starts
from relay.state.records import Records
from relay.state.registry import Registry
from tests.gateway.calls import CHAT, GUEST, action_of
from tests.gateway.conftest import CODE, KEY, LLM_CONFIG, GatewayProcess, Start
from tests.gateway.fake_invoker import FakeInvoker
from tests.scheduler.world import report
from thaw.action import KIND_LLM, Action
from thaw.config import parse_llm_config
from thaw.errors import ModelNotFound, ThawError, Unavailable, WorkerLost
from thaw.host import HostReport
from thaw.ids import ActionName, GroupId, Namespace
from thaw.instance import InstanceRecord, InstanceState
from thaw.standing import RESOURCE_MARK, ColdStart

ACTION = "/api/v1/namespaces/_/actions/chat"
STANDINGS = "/api/v1/namespaces/_/standings"


def standings(gateway: GatewayProcess, known: str = "", wait_s: float = 0) -> dict[str, Any]:
    return dict(gateway.read("standings", params={"known": known, "wait_s": wait_s}))


def until(gateway: GatewayProcess, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait until this is so of the model's standing, and return it."""
    found = standings(gateway)
    while not is_so(found["actions"][0]):
        before = found
        found = standings(gateway, found["mark"], 20)
        assert found != before, f"still {before}"
    return dict(found["actions"][0])


def chat(gateway: GatewayProcess, **wanted: Any) -> dict[str, Any]:
    """Wait until the model's standing includes ``wanted``, and return it."""
    return until(gateway, lambda chat: wanted.items() <= chat.items())


def cold_start(gateway: GatewayProcess) -> dict[str, Any]:
    return dict(until(gateway, lambda chat: chat["cold_start"] is not None)["cold_start"])


NOT_THERE = ModelNotFound("it is not there")


def start_fails(gateway: GatewayProcess, error: ThawError = NOT_THERE, group: str = "") -> None:
    starts.start_failed(gateway.invoker.client, StartFailed(CHAT, (), error.info(), GroupId(group)))


def cold(gateway: GatewayProcess, at_wall_ms: int, ttft_ms: int = 30, action: ActionName = CHAT) -> None:
    """A cold start of the model was answered."""
    starts.cold_started(gateway.invoker.client, action, ColdStart(at_wall_ms, ttft_ms))


def update(gateway: GatewayProcess, **body: Any) -> None:
    gateway.put("actions/chat?overwrite=true", **body)


def test_a_model_stands_by_what_is_ready_and_what_starts(gateway: GatewayProcess) -> None:
    gateway.put_python()
    assert standings(gateway)["actions"] == []
    gateway.put_llm()
    found = chat(gateway)
    assert (found["name"], found["ready"], found["starting"], found["trouble"]) == ("chat", 0, 0, None)
    assert found["config"]["model"]["uri"] == "s3://models/tiny"
    record = gateway.invoker.ready("guest/chat")
    gateway.invoker.ready("guest/chat", instance="i1", group="b" * 32, n_stages=2)
    gateway.invoker.ready("guest/chat", instance="i2", group="b" * 32, n_stages=2, stage=1)
    chat(gateway, ready=2, starting=0)
    gateway.invoker.registry.put_instance(replace(record, instance_id="i3", state=InstanceState.STARTING))  # type: ignore[arg-type]
    chat(gateway, ready=2, starting=1)
    gateway.invoker.gone(record)
    chat(gateway, ready=1, starting=1)


def test_functions_with_adapters_stand_by_the_instances_of_their_pool(gateway: GatewayProcess) -> None:
    model = {"base": "s3://models/tiny", "adapter": "s3://models/adapters/one"}
    gateway.put_llm(model=model)
    gateway.invoker.ready(Records(gateway.invoker.client).action(GUEST, CHAT).served_by)
    chat(gateway, ready=1)
    update(gateway, limits={"timeout": 5000})
    chat(gateway, ready=1, version="0.0.2")


def test_whoever_waits_hears_of_a_change_and_of_no_other_namespace(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    mark = standings(gateway)["mark"]
    waits = gateway.soon(standings, gateway, mark, 30)
    gateway.invoker.ready("other/chat", instance="i7")
    threading.Event().wait(0.1)  # no event can announce that nothing happens
    assert not waits.done()
    gateway.invoker.ready("guest/chat")
    assert waits.result(20)["actions"][0]["ready"] == 1


def test_held_requests_leave_threads_to_others_and_end_with_their_clients(start_gateway: Start) -> None:
    gateway = start_gateway(THAW_GATEWAY_THREADS="4")
    gateway.put_llm()
    mark = standings(gateway)["mark"]

    def is_full() -> bool:
        query = {"known": mark, "wait_s": 0.01}
        return gateway.call("GET", STANDINGS, params=query).status_code == 429

    basic = base64.b64encode(KEY.encode()).decode()
    line = f"GET {STANDINGS}?known={mark}&wait_s=30 HTTP/1.1\r\nHost: x\r\nAuthorization: Basic {basic}\r\n\r\n"
    end_s = time.monotonic() + 120
    with ExitStack() as clients:
        while not is_full():  # this question may itself have taken a client's place
            client = clients.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
            client.sendall(line.encode())
            assert time.monotonic() < end_s
        assert gateway.call("GET", ACTION).status_code == 200
    while is_full():
        assert time.monotonic() < end_s


def test_a_gateway_that_ends_answers_those_who_wait(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    mark = standings(gateway)["mark"]
    waits = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    with closing(waits):
        waits.request("GET", f"{STANDINGS}?known={mark}&wait_s=30", headers={"Authorization": f"Bearer {KEY}"})
        gateway.wait_for_routes(0)  # later requests are answered, so this one has arrived
        gateway.stop()  # this kills the process if the end takes too long
        assert json.load(waits.getresponse())["mark"] == mark


def test_a_failed_start_is_told_until_one_succeeds_or_the_action_changes(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    starting = replace(gateway.invoker.ready("guest/chat"), state=InstanceState.STARTING, instance_id="i9")  # type: ignore[arg-type]
    error = ModelNotFound("s3://models/tiny is not there", hint="push it")
    error.printed = "a traceback"
    told = {"code": "ModelNotFound", "message": "s3://models/tiny is not there", "hint": "push it"}
    told |= {"printed": "", "printed_out": ""}
    gateway.invoker.registry.put_instance(starting)
    gateway.invoker.gone(starting, error)
    chat(gateway, trouble=told)
    record = gateway.invoker.ready("guest/chat", instance="i1")
    chat(gateway, trouble=None, ready=2)
    for _ in range(2):  # the first report was received, but its answer was lost
        gateway.invoker.gone(record, WorkerLost("it served, and was killed"))  # its requests went elsewhere
    assert chat(gateway, ready=1)["trouble"] is None
    start_fails(gateway, error)
    chat(gateway, trouble=told)
    gateway.invoker.registry.put_instance(starting)
    update(gateway, config=LLM_CONFIG)
    chat(gateway, trouble=None, version="0.0.2")
    gateway.invoker.gone(starting, error)
    assert chat(gateway)["trouble"] is None, "it was a start of the version before"


def trouble(gateway: GatewayProcess) -> str | None:
    """Return the code of the model's trouble, or None, after all earlier reports."""
    told = chat(gateway)["trouble"]
    return None if told is None else str(told["code"])


def test_what_a_ready_instance_reports_says_nothing_of_another_start(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    serves = gateway.invoker.ready("guest/chat")
    late = gateway.invoker.starting("guest/chat", instance="late")
    update(gateway, config=LLM_CONFIG)
    fails = replace(late, instance_id="i9", action_version="0.0.2")  # type: ignore[arg-type]
    gateway.invoker.registry.put_instance(fails)
    gateway.invoker.gone(fails, NOT_THERE)
    assert trouble(gateway) == "ModelNotFound"
    gateway.invoker.registry.put_instance(replace(serves, idle_since_wall_ms=5))
    assert trouble(gateway) == "ModelNotFound", "it has become idle"
    gateway.invoker.registry.put_instance(replace(late, state=InstanceState.READY))
    assert trouble(gateway) == "ModelNotFound", "it is of the version before"
    starting = replace(fails, instance_id="i2")  # type: ignore[arg-type]
    gateway.invoker.registry.put_instance(starting)
    assert trouble(gateway) == "ModelNotFound"
    gateway.invoker.registry.put_instance(replace(starting, state=InstanceState.READY))
    assert trouble(gateway) is None


def test_a_function_with_an_adapter_has_no_start_from_before_it_was_there(gateway: GatewayProcess) -> None:
    gateway.put_llm(model={"base": "s3://models/tiny", "adapter": "s3://models/adapters/one"})
    action = Records(gateway.invoker.client).action(GUEST, CHAT)
    cold(gateway, action.updated_ms - 1, action=action.served_by)
    assert chat(gateway)["cold_start"] is None
    cold(gateway, action.updated_ms, 40, action=action.served_by)
    assert cold_start(gateway)["ttft_ms"] == 40


def test_all_gateways_say_the_same_and_one_that_is_new_forgets_nothing(start_gateway: Start) -> None:
    one = start_gateway()
    one.put_llm()
    start_fails(one)
    cold(one, 2000)
    cold(one, 1000, 40)  # the latest start is told, and not the one that was answered last
    two = start_gateway()
    assert standings(one) == standings(two)
    found = chat(two)
    assert (found["trouble"]["code"], found["cold_start"]["at_wall_ms"]) == ("ModelNotFound", 2000)


def test_what_is_known_of_starts_goes_with_the_action(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    start_fails(gateway)
    cold(gateway, 2000)
    assert gateway.call("DELETE", ACTION).status_code == 200
    start_fails(gateway)
    cold(gateway, 3000)
    assert gateway.invoker.client.keys("thaw:starts:*") == []
    gateway.put_llm()
    assert (chat(gateway)["trouble"], chat(gateway)["cold_start"]) == (None, None)


def test_a_minimum_without_room_says_what_is_missing_and_not_what_others_have(gateway: GatewayProcess) -> None:
    gateway.put_llm(scaling={"min_instances": 1}, resources={"gpu_memory_mb": 1 << 20})
    assert "no host" in chat(gateway)["trouble"]["message"]
    gateway.invoker.registry.report_host(report("h0"))
    before = standings(gateway)
    trouble = before["actions"][0]["trouble"]
    assert trouble["code"] == "NoCapacity"
    assert "needs 1048576 MiB" in trouble["message"]
    device = report("h0").devices[0]
    less = replace(report("h0"), devices=(replace(device, free_bytes=device.free_bytes - (1 << 24)),))
    gateway.invoker.registry.report_host(less)
    assert standings(gateway)["mark"] == before["mark"], "it lacks room as before"


def test_hosts_are_read_once_however_many_models_lack_room(valkey_url: str) -> None:
    config = parse_llm_config({**LLM_CONFIG, "scaling": {"min_instances": 1}})
    lacking = [action_of(f"guest/m{i}", KIND_LLM, config=config) for i in range(3)]

    class Counting(Registry):
        n_reads = 0

        def live_hosts(self) -> list[HostReport]:
            self.n_reads += 1
            return super().live_hosts()

    with redis.Redis.from_url(valkey_url) as client:
        registry = Counting(client)
        standings = StandingsOf(client, registry, WorkBook(client, registry), lambda _: lacking)
        _, found = standings.look(GUEST, time.monotonic())
    assert [s.trouble.code for s in found.actions if s.trouble] == ["NoCapacity"] * 3
    assert registry.n_reads == 1


def test_that_no_host_takes_a_start_is_told_apart_from_a_start_that_failed(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    error = Unavailable("the API server is away")
    start_fails(gateway, error, "a" * 32)
    assert chat(gateway)["trouble"]["code"] == "Unavailable"
    start_fails(gateway, error)
    assert chat(gateway)["trouble"]["code"] == "NoCapacity"


def test_the_answer_to_a_cold_request_is_told_with_its_time_to_the_first_token(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    gateway.cold_chat()
    told = cold_start(gateway)
    assert told["start_mode"] == "cold"
    assert 0 <= told["ttft_ms"] < 60_000
    gateway.chat()  # a warm one says nothing
    assert chat(gateway)["cold_start"] == told


def test_the_answer_to_a_202_is_told_too(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    body = {"messages": [{"role": "user", "content": "hi"}]}
    accepted = gateway.call("POST", ACTION, json=body)
    assert accepted.status_code == 202
    gateway.invoker.wait_for_demand()
    gateway.invoker.ready("guest/chat")
    assert gateway.ended(accepted.json()["activationId"]).start_mode == "cold"
    assert cold_start(gateway)["start_mode"] == "cold"


def test_a_first_token_of_before_the_start_is_not_its_own(gateway: GatewayProcess) -> None:
    """A request that began warm, lost its worker, and went on at an instance that it waited for."""
    gateway.put_llm()
    record = gateway.invoker.ready("guest/chat")
    gateway.wait_for_routes()
    gateway.invoker.cut_after.append(1)
    gateway.invoker.pace = threading.Semaphore(0)
    answer = gateway.soon(gateway.chat)
    gateway.invoker.entered.acquire(timeout=20)
    gateway.invoker.gone(record)
    gateway.wait_for_routes(0)
    gateway.invoker.pace.release(1000)
    gateway.invoker.wait_for_demand()
    record = gateway.invoker.ready("guest/chat", instance="i1", group="b" * 32)
    assert answer.result(20).status_code == 200
    gateway.invoker.gone(record)
    gateway.wait_for_routes(0)
    gateway.cold_chat(instance="i2", group="c" * 32)
    cold_start(gateway)
    events = [bus.unpack(fields[b"f"]) for _, fields in gateway.invoker.client.xrange("thaw:events")]
    assert [e for e in events if isinstance(e, ColdStarted)] == [ColdStarted(CHAT)], "of the second request"


def test_an_action_that_a_resource_made_is_told_of_whatever_it_has_become(gateway: GatewayProcess) -> None:
    mark = {"key": RESOURCE_MARK, "value": {"name": "chat"}}
    gateway.call("PUT", ACTION, json={"config": LLM_CONFIG, "annotations": [mark]})
    update(gateway, exec=CODE)
    found = chat(gateway)
    assert (found["version"], found["config"]) == ("0.0.2", None)
    assert found["annotations"][RESOURCE_MARK] == mark["value"]


def test_reports_that_say_nothing_new_of_a_model_are_no_news_and_the_actions_are_listed_once(
    valkey_url: str, invoker: FakeInvoker
) -> None:
    model = action_of(CHAT, KIND_LLM, config=parse_llm_config(LLM_CONFIG))
    n_lists = 0

    def listed(_: Namespace) -> list[Action]:
        nonlocal n_lists
        n_lists += 1
        return [model]

    with redis.Redis.from_url(valkey_url) as client:
        registry = Registry(client)
        standings = StandingsOf(client, registry, WorkBook(client, registry), listed)
        with standings.listening(GUEST) as bell:

            def is_news(change: Callable[[], None]) -> bool:
                rung = threading.Event()
                bell.listen(rung, time.monotonic())
                change()
                return rung.is_set()

            def is_told(record: InstanceRecord) -> bool:
                return is_news(lambda: standings.instance_changed(record))

            since_s = time.monotonic()
            standings.look(GUEST, since_s)
            before = n_lists
            assert not any(is_told(invoker.starting("guest/hello", instance=f"f{i}")) for i in range(300))
            record = invoker.starting("guest/chat", instance="m")
            assert is_told(record)
            standings.look(GUEST, since_s - 60)
            assert n_lists == before, "what is listed has not changed"
            assert not is_told(replace(record, idle_since_wall_ms=5)), "an idle instance is what it was"
            stage = replace(record, stage=1, n_stages=2, state=InstanceState.READY)
            standings.instance_changed(stage)
            assert is_told(replace(stage, stage=0, n_stages=1)), "the stage has become a worker of its own"
            standings.look(GUEST, time.monotonic())
            before = n_lists
            assert is_news(lambda: standings.action_changed(CHAT))
            standings.look(GUEST, time.monotonic())
            assert n_lists == before + 1
