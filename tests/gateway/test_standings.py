"""The standings of a namespace's models, for programs that show them elsewhere."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from tests.gateway.conftest import KEY, LLM_CONFIG, GatewayProcess, wait_for_record
from tests.gateway.fake_invoker import FakeInvoker
from tests.scheduler.world import report
from thaw.action import KIND_LLM, Action, Exec, Limits
from thaw.config import parse_llm_config
from thaw.errors import ModelNotFound, Unavailable, WorkerLost
from thaw.host import HostReport
from thaw.ids import ActionName, GroupId, Namespace
from thaw.instance import InstanceState
from thaw.standing import RESOURCE_MARK, ColdStart

ACTION = "/api/v1/namespaces/_/actions/chat"
STANDINGS = "/api/v1/namespaces/_/standings"
CHAT = ActionName("guest/chat")
GUEST = Namespace("guest")


def standings(gateway: GatewayProcess, known: str = "", wait_s: float = 0) -> dict[str, Any]:
    reply = gateway.call("GET", STANDINGS, params={"known": known, "wait_s": wait_s})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def chat(gateway: GatewayProcess, wanted: dict[str, Any] | None = None) -> dict[str, Any]:
    """Wait until the model's standing includes ``wanted``, and return it."""
    found = standings(gateway)
    while not (wanted or {}).items() <= found["actions"][0].items():
        before = found
        found = standings(gateway, found["mark"], 20)
        assert found != before, f"still {before}"
    return dict(found["actions"][0])


def cold_start(gateway: GatewayProcess) -> dict[str, Any]:
    found = standings(gateway)
    while (told := found["actions"][0]["cold_start"]) is None:
        before = found
        found = standings(gateway, found["mark"], 20)
        assert found != before, f"still {before}"
    return dict(told)


def test_a_model_stands_by_what_is_ready_and_what_starts(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_python()
    assert standings(gateway)["actions"] == []
    gateway.put_llm()
    found = chat(gateway)
    assert (found["name"], found["ready"], found["starting"], found["trouble"]) == ("chat", 0, 0, None)
    assert found["config"]["model"]["uri"] == "s3://models/tiny"
    record = invoker.ready("guest/chat")
    invoker.ready("guest/chat", instance="i1", group="b" * 32, n_stages=2)
    invoker.ready("guest/chat", instance="i2", group="b" * 32, n_stages=2, stage=1)
    chat(gateway, {"ready": 2, "starting": 0})
    invoker.registry.put_instance(replace(record, instance_id="i3", state=InstanceState.STARTING))  # type: ignore[arg-type]
    chat(gateway, {"ready": 2, "starting": 1})
    invoker.gone(record)
    chat(gateway, {"ready": 1, "starting": 1})


def test_functions_with_adapters_stand_by_the_instances_of_their_pool(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    model = {"base": "s3://models/tiny", "adapter": "s3://models/adapters/one"}
    gateway.put_llm(model=model)
    invoker.ready(Records(invoker.client).action(GUEST, CHAT).served_by)
    chat(gateway, {"ready": 1})
    gateway.call("PUT", ACTION, params={"overwrite": "true"}, json={"limits": {"timeout": 5000}})
    chat(gateway, {"ready": 1, "version": "0.0.2"})


def test_whoever_waits_hears_of_a_change_and_of_no_other_namespace(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm()
    mark = standings(gateway)["mark"]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(standings, gateway, mark, 30)
        invoker.ready("other/chat", instance="i7")
        threading.Event().wait(0.1)  # no event can announce that nothing happens
        assert not waits.done()
        invoker.ready("guest/chat")
        assert waits.result(20)["actions"][0]["ready"] == 1


def test_held_requests_leave_threads_to_others_and_end_with_their_clients(
    start_gateway: Callable[..., GatewayProcess],
) -> None:
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


def test_a_failed_start_is_told_until_one_succeeds_or_the_action_changes(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm()
    starting = replace(invoker.ready("guest/chat"), state=InstanceState.STARTING, instance_id="i9")  # type: ignore[arg-type]
    error = ModelNotFound("s3://models/tiny is not there", hint="push it")
    error.printed = "a traceback"
    told = {"code": "ModelNotFound", "message": "s3://models/tiny is not there", "hint": "push it"}
    told |= {"printed": "", "printed_out": ""}
    invoker.registry.put_instance(starting)
    invoker.gone(starting, error)
    chat(gateway, {"trouble": told})
    record = invoker.ready("guest/chat", instance="i1")
    chat(gateway, {"trouble": None, "ready": 2})
    invoker.gone(record, WorkerLost("it served, and was killed"))  # its requests went elsewhere
    assert chat(gateway, {"ready": 1})["trouble"] is None
    starts.start_failed(invoker.client, StartFailed(CHAT, (), error.info(), GroupId("")))
    chat(gateway, {"trouble": told})
    invoker.registry.put_instance(starting)
    gateway.call("PUT", ACTION, params={"overwrite": "true"}, json={"config": LLM_CONFIG})
    chat(gateway, {"trouble": None, "version": "0.0.2"})
    invoker.gone(starting, error)
    assert chat(gateway)["trouble"] is None, "it was a start of the version before"


def trouble(gateway: GatewayProcess) -> str | None:
    """Return the code of the model's trouble, or None, after all earlier reports."""
    told = chat(gateway)["trouble"]
    return None if told is None else str(told["code"])


def test_what_a_ready_instance_reports_says_nothing_of_another_start(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm()
    serves = invoker.ready("guest/chat")
    late = invoker.starting("guest/chat", instance="late")
    gateway.call("PUT", ACTION, params={"overwrite": "true"}, json={"config": LLM_CONFIG})
    fails = replace(late, instance_id="i9", action_version="0.0.2")  # type: ignore[arg-type]
    invoker.registry.put_instance(fails)
    invoker.gone(fails, ModelNotFound("it is not there"))
    assert trouble(gateway) == "ModelNotFound"
    invoker.registry.put_instance(replace(serves, idle_since_wall_ms=5))
    assert trouble(gateway) == "ModelNotFound", "it has become idle"
    invoker.registry.put_instance(replace(late, state=InstanceState.READY))
    assert trouble(gateway) == "ModelNotFound", "it is of the version before"
    starting = replace(fails, instance_id="i2")  # type: ignore[arg-type]
    invoker.registry.put_instance(starting)
    assert trouble(gateway) == "ModelNotFound"
    invoker.registry.put_instance(replace(starting, state=InstanceState.READY))
    assert trouble(gateway) is None


def test_an_end_that_is_said_twice_is_no_failed_start(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    """The first report was received, but its answer was lost."""
    gateway.put_llm()
    record = invoker.ready("guest/chat")
    for _ in range(2):
        invoker.gone(record, WorkerLost("it served, and was killed"))
    assert trouble(gateway) is None


def test_a_function_with_an_adapter_has_no_start_from_before_it_was_there(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm(model={"base": "s3://models/tiny", "adapter": "s3://models/adapters/one"})
    action = Records(invoker.client).action(GUEST, CHAT)
    starts.cold_started(invoker.client, action.served_by, ColdStart(action.updated_ms - 1, 30))
    assert chat(gateway)["cold_start"] is None
    starts.cold_started(invoker.client, action.served_by, ColdStart(action.updated_ms, 40))
    assert cold_start(gateway)["ttft_ms"] == 40


def test_all_gateways_say_the_same_and_one_that_is_new_forgets_nothing(
    start_gateway: Callable[..., GatewayProcess], invoker: FakeInvoker
) -> None:
    one = start_gateway()
    one.put_llm()
    starts.start_failed(invoker.client, StartFailed(CHAT, (), ModelNotFound("it is not there").info(), GroupId("")))
    starts.cold_started(invoker.client, CHAT, ColdStart(2000, 30))
    two = start_gateway()
    assert standings(one) == standings(two)
    found = chat(two)
    assert (found["trouble"]["code"], found["cold_start"]["at_wall_ms"]) == ("ModelNotFound", 2000)


def test_what_is_known_of_starts_goes_with_the_action(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_llm()
    failed = StartFailed(CHAT, (), ModelNotFound("it is not there").info(), GroupId(""))
    starts.start_failed(invoker.client, failed)
    starts.cold_started(invoker.client, CHAT, ColdStart(2000, 30))
    assert gateway.call("DELETE", ACTION).status_code == 200
    starts.start_failed(invoker.client, failed)
    starts.cold_started(invoker.client, CHAT, ColdStart(3000, 30))
    assert invoker.client.keys("thaw:starts:*") == []
    gateway.put_llm()
    assert (chat(gateway)["trouble"], chat(gateway)["cold_start"]) == (None, None)


def test_the_latest_start_is_told_and_not_the_last_that_was_answered(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm()
    starts.cold_started(invoker.client, CHAT, ColdStart(2000, 30))
    starts.cold_started(invoker.client, CHAT, ColdStart(1000, 40))
    assert chat(gateway)["cold_start"]["at_wall_ms"] == 2000


def test_a_minimum_without_room_says_what_is_missing_and_not_what_others_have(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm(scaling={"min_instances": 1}, resources={"gpu_memory_mb": 1 << 20})
    assert "no host" in chat(gateway)["trouble"]["message"]
    invoker.registry.report_host(report("h0"))
    before = standings(gateway)
    trouble = before["actions"][0]["trouble"]
    assert trouble["code"] == "NoCapacity"
    assert "needs 1048576 MiB" in trouble["message"]
    device = report("h0").devices[0]
    less = replace(report("h0"), devices=(replace(device, free_bytes=device.free_bytes - (1 << 24)),))
    invoker.registry.report_host(less)
    assert standings(gateway)["mark"] == before["mark"], "it lacks room as before"


def test_hosts_are_read_once_however_many_models_lack_room(valkey_url: str) -> None:
    config = parse_llm_config({**LLM_CONFIG, "scaling": {"min_instances": 1}})
    names = [ActionName(f"guest/m{i}") for i in range(3)]
    lacking = [Action(name, GUEST, "0.0.1", Exec(KIND_LLM), Limits(), config=config) for name in names]

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


def test_that_no_host_takes_a_start_is_told_apart_from_a_start_that_failed(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm()
    error = Unavailable("the API server is away").info()
    starts.start_failed(invoker.client, StartFailed(CHAT, (), error, GroupId("a" * 32)))
    assert chat(gateway)["trouble"]["code"] == "Unavailable"
    starts.start_failed(invoker.client, StartFailed(CHAT, (), error, GroupId("")))
    assert chat(gateway)["trouble"]["code"] == "NoCapacity"


def test_the_answer_to_a_cold_request_is_told_with_its_time_to_the_first_token(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(gateway.chat)
        invoker.wait_for_demand()
        invoker.ready("guest/chat")
        assert answer.result(20).status_code == 200
    told = cold_start(gateway)
    assert told["start_mode"] == "cold"
    assert 0 <= told["ttft_ms"] < 60_000
    gateway.chat()  # a warm one says nothing
    assert chat(gateway)["cold_start"] == told


def test_the_answer_to_a_202_is_told_too(gateway: GatewayProcess, invoker: FakeInvoker, valkey_url: str) -> None:
    gateway.put_llm()
    body = {"messages": [{"role": "user", "content": "hi"}]}
    accepted = gateway.call("POST", ACTION, json=body)
    assert accepted.status_code == 202
    invoker.wait_for_demand()
    invoker.ready("guest/chat")
    assert wait_for_record(valkey_url, accepted.json()["activationId"]).start_mode == "cold"
    assert cold_start(gateway)["start_mode"] == "cold"


def test_a_first_token_of_before_the_start_is_not_its_own(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    """A request that began warm, lost its worker, and went on at an instance that it waited for."""
    gateway.put_llm()
    record = invoker.ready("guest/chat")
    gateway.wait_for_routes()
    invoker.cut_after.append(1)
    invoker.pace = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(gateway.chat)
        invoker.entered.acquire(timeout=20)
        invoker.gone(record)
        gateway.wait_for_routes(0)
        invoker.pace.release(1000)
        invoker.wait_for_demand()
        record = invoker.ready("guest/chat", instance="i1", group="b" * 32)
        assert answer.result(20).status_code == 200
        invoker.gone(record)
        gateway.wait_for_routes(0)
        answer = pool.submit(gateway.chat)
        invoker.wait_for_demand()
        invoker.ready("guest/chat", instance="i2", group="c" * 32)
        assert answer.result(20).status_code == 200
    cold_start(gateway)
    events = [bus.unpack(fields[b"f"]) for _, fields in invoker.client.xrange("thaw:events")]
    assert [e for e in events if isinstance(e, ColdStarted)] == [ColdStarted(CHAT)], "of the second request"


def test_an_action_that_a_resource_made_is_told_of_whatever_it_has_become(gateway: GatewayProcess) -> None:
    mark = {"key": RESOURCE_MARK, "value": {"name": "chat"}}
    gateway.call("PUT", ACTION, json={"config": LLM_CONFIG, "annotations": [mark]})
    code = {"exec": {"kind": "python:3.11", "code": "def main(args):\n    return args\n"}}
    gateway.call("PUT", ACTION, params={"overwrite": "true"}, json=code)
    found = chat(gateway)
    assert (found["version"], found["config"]) == ("0.0.2", None)
    assert found["annotations"][RESOURCE_MARK] == mark["value"]


def test_reports_that_say_nothing_new_of_a_model_are_no_news_and_the_actions_are_listed_once(
    valkey_url: str, invoker: FakeInvoker
) -> None:
    model = Action(CHAT, GUEST, "0.0.1", Exec(KIND_LLM), Limits(), config=parse_llm_config(LLM_CONFIG))
    n_lists = 0

    def listed(_: Namespace) -> list[Action]:
        nonlocal n_lists
        n_lists += 1
        return [model]

    with redis.Redis.from_url(valkey_url) as client:
        registry = Registry(client)
        standings = StandingsOf(client, registry, WorkBook(client, registry), listed)
        with standings.listening(GUEST) as bell:
            standings.look(GUEST, time.monotonic())
            before = n_lists
            since_s, rung = time.monotonic(), threading.Event()
            bell.listen(rung, since_s)
            for i in range(300):
                standings.instance_changed(invoker.starting("guest/hello", instance=f"f{i}"))
            assert not rung.is_set()
            record = invoker.starting("guest/chat", instance="m")
            standings.instance_changed(record)
            assert rung.is_set()
            standings.look(GUEST, since_s - 60)
            assert n_lists == before, "what is listed has not changed"
            rung.clear()
            bell.listen(rung, time.monotonic())
            standings.instance_changed(replace(record, idle_since_wall_ms=5))
            assert not rung.is_set(), "an idle instance is what it was"
            stage = replace(record, stage=1, n_stages=2, state=InstanceState.READY)
            standings.instance_changed(stage)
            rung.clear()
            bell.listen(rung, time.monotonic())
            standings.instance_changed(replace(stage, stage=0, n_stages=1))
            assert rung.is_set(), "the stage has become a worker of its own"
            rung.clear()
            bell.listen(rung, time.monotonic())
            standings.look(GUEST, time.monotonic())
            before = n_lists
            standings.action_changed(CHAT)
            assert rung.is_set()
            standings.look(GUEST, time.monotonic())
            assert n_lists == before + 1
