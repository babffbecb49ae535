"""Clients that lose their connection and go on where they were, through real gateway processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import redis

from gateway.serving.answers.event_ids import EventIds
from relay.state import keys
from tests.conftest import ValkeyServer
from tests.gateway.conftest import KEY, OTHER_KEY, ROOT, GatewayProcess, add_key, wait_for_record
from tests.gateway.event_client import Client
from tests.gateway.fake_invoker import FakeInvoker
from tests.gateway.test_hangup import raw_post
from thaw.ids import Namespace

Start = Callable[..., GatewayProcess]


PATIENT = """
from gateway.serving import streams
streams._LEAVES_S = 30.0
"""


@pytest.fixture
def patient(tmp_path: Path) -> dict[str, str]:
    """The environment of a gateway that gives a replaced reader as long as a busy machine needs to tell its client."""
    (tmp_path / "sitecustomize.py").write_text(PATIENT)
    return {"PYTHONPATH": f"{tmp_path}:{ROOT}"}


@pytest.fixture
def ready(gateway: GatewayProcess, invoker: FakeInvoker) -> GatewayProcess:
    return served(gateway, invoker)


def served(gateway: GatewayProcess, invoker: FakeInvoker, **instance: Any) -> GatewayProcess:
    gateway.put_llm()
    invoker.ready("guest/chat", **instance)
    gateway.wait_for_routes()
    return gateway


def activation_of(client: Client) -> str:
    return client.reply.headers["X-Openwhisk-Activation-Id"]


def resumed(invoker: FakeInvoker) -> list[int]:
    """Return the number of tokens with which each run began."""
    return [len((run["value"]["resume"] or {"output_token_ids": ()})["output_token_ids"]) for run in invoker.runs]


def metric(gateway: GatewayProcess, line: str) -> bool:
    return f"\n{line}\n" in gateway.call("GET", "/metrics").text


def wait_for_metric(gateway: GatewayProcess, line: str) -> None:
    tick, until_s = threading.Event(), time.monotonic() + 60
    while not metric(gateway, line):
        assert time.monotonic() < until_s, gateway.call("GET", "/metrics").text
        tick.wait(0.01)


def one_record(url: str, client: Client, n_tokens: int) -> None:
    """The activation has one record, which counts each token once."""
    record = wait_for_record(url, activation_of(client))
    assert record.status.value == 0
    assert record.usage == {"prompt_tokens": 3, "completion_tokens": n_tokens, "total_tokens": 3 + n_tokens}
    with redis.Redis.from_url(url) as state:
        assert state.zcard(keys.activations("guest")) == 1


def test_every_token_and_what_comes_after_the_last_has_an_id(ready: GatewayProcess, valkey_url: str) -> None:
    client = Client()
    client.ask(ready)
    client.read_all()
    assert client.has_whole_answer(6)
    assert client.last_id.startswith(activation_of(client))
    assert len({e.id.partition(":")[0] for e in client.events if e.id}) == 1
    with redis.Redis.from_url(valkey_url) as state:
        assert list(state.scan_iter("thaw:stream*")) == []


def test_the_openai_sdk_skips_ids_and_comments_between_them(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    """The SDK keeps an id until the end of the stream, and then takes a comment with an empty line for an event."""
    served(gateway, invoker)
    invoker.cut_after.append(2)
    with openai.OpenAI(api_key=KEY, base_url=f"{gateway.url}/v1", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        stream = iter(client.chat.completions.create(model="chat", messages=messages, max_tokens=4, stream=True))
        chunks = [next(stream), next(stream)]
        invoker.wait_for_demand()
        invoker.ready("guest/chat", instance="i1")
        chunks += list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "w0 w1 w2 w3 "


@pytest.mark.parametrize("n_before", [2, 4, 7, 8, 9], ids="after {} events".format)
def test_a_client_goes_on_with_the_run_of_its_gateway(
    ready: GatewayProcess, invoker: FakeInvoker, valkey_url: str, n_before: int
) -> None:
    """The first event is the role; those after the sixth token are the finish reason, the usage and [DONE]."""
    client = Client()
    invoker.pace = threading.Semaphore(n_before - 1)
    client.ask(ready)
    client.read(n_before)
    client.hang_up()
    wait_for_metric(ready, "thaw_gateway_absent_streams 1.0")
    invoker.pace.release(100)
    client.ask(ready)
    client.read_all()
    assert client.has_whole_answer(6)
    assert resumed(invoker) == [0]
    assert metric(ready, 'thaw_gateway_reconnects_total{way="here"} 1.0')
    one_record(valkey_url, client, 6)


def test_a_client_that_has_everything_but_done_reads_only_that(ready: GatewayProcess, invoker: FakeInvoker) -> None:
    client = Client()
    client.ask(ready)
    client.read(9)
    client.hang_up()
    client.ask(ready)
    client.read(1)
    assert [e.data for e in client.events[9:]] == ["[DONE]"]
    client.hang_up()


def test_a_client_reconnects_again_and_again(ready: GatewayProcess, invoker: FakeInvoker, valkey_url: str) -> None:
    client = Client()
    invoker.pace = threading.Semaphore(0)
    asking = client.ask_soon(ready)
    for n in range(5):
        invoker.pace.release()
        asking.join()
        client.read(2 if n == 0 else 1)
        client.hang_up()
        client.ask(ready)
    invoker.pace.release(10)
    client.read_all()
    assert client.has_whole_answer(6)
    assert resumed(invoker) == [0]
    one_record(valkey_url, client, 6)


def test_who_does_not_ask_for_it_hangs_up_to_cancel(
    ready: GatewayProcess, invoker: FakeInvoker, valkey_url: str
) -> None:
    client = Client()
    invoker.pace = threading.Semaphore(2)
    client.ask(ready, **{"X-Thaw-Resumable": "0"})
    client.read(2)
    client.hang_up()
    assert invoker.closed.acquire(timeout=60)
    assert wait_for_record(valkey_url, activation_of(client)).status.value == 1
    invoker.pace = None
    client.ask(ready)  # it has ids all the same: the answer is computed again
    client.read_all()
    assert client.has_whole_answer(6)
    assert resumed(invoker) == [0, 0]
    assert len({run["value"]["seed"] for run in invoker.runs}) == 1


def test_a_client_that_changes_its_mind_cancels_when_it_hangs_up_again(
    ready: GatewayProcess, invoker: FakeInvoker, valkey_url: str
) -> None:
    client = Client()
    invoker.pace = threading.Semaphore(2)
    client.ask(ready)
    client.read(2)
    client.hang_up()
    wait_for_metric(ready, "thaw_gateway_absent_streams 1.0")
    client.ask(ready, **{"X-Thaw-Resumable": "0"})
    client.read(1)
    client.hang_up()
    assert invoker.closed.acquire(timeout=60)
    assert wait_for_record(valkey_url, activation_of(client)).status.value == 1


def test_a_client_without_an_id_has_nothing_to_go_on_from(
    ready: GatewayProcess, invoker: FakeInvoker, valkey_url: str
) -> None:
    invoker.pace = threading.Semaphore(0)
    client = raw_post(ready, "/v1/chat/completions", Client().body, headers="X-Thaw-Resumable: 1\r\n")
    assert invoker.entered.acquire(timeout=60)
    client.close()
    assert invoker.closed.acquire(timeout=60)
    assert wait_for_record(valkey_url, invoker.runs[-1]["activation_id"]).status.value == 1


def test_a_stream_ends_when_its_client_stays_away(start_gateway: Start, invoker: FakeInvoker, valkey_url: str) -> None:
    gateway = served(start_gateway(THAW_RECONNECT_S="0.3"), invoker, slots=1)
    client = Client()
    invoker.pace = threading.Semaphore(2)
    client.ask(gateway)
    client.read(2)
    client.hang_up()
    assert invoker.closed.acquire(timeout=60)
    assert wait_for_record(valkey_url, activation_of(client)).status.value == 1
    invoker.pace = None
    client.ask(gateway)
    client.read_all()
    assert client.has_whole_answer(6)
    assert resumed(invoker) == [0, 0]
    assert metric(gateway, 'thaw_gateway_reconnects_total{way="computed_again"} 1.0')


@pytest.mark.parametrize("setting", ["THAW_RECONNECT_S", "THAW_RECONNECT_STREAM_BYTES", "THAW_RECONNECT_BYTES"])
def test_a_bound_of_zero_ends_a_stream_with_its_client(
    start_gateway: Start, invoker: FakeInvoker, setting: str
) -> None:
    gateway = served(start_gateway(**{setting: "0"}), invoker)
    client = Client()
    invoker.pace = threading.Semaphore(2)
    client.ask(gateway)
    client.read(2)
    client.hang_up()
    assert invoker.closed.acquire(timeout=60)


def test_a_stream_that_grows_too_long_without_a_client_ends(start_gateway: Start, invoker: FakeInvoker) -> None:
    gateway = served(start_gateway(THAW_RECONNECT_STREAM_BYTES="900"), invoker)
    client = Client(max_tokens=50)
    invoker.pace = threading.Semaphore(2)
    client.ask(gateway)
    client.read(2)
    client.hang_up()
    wait_for_metric(gateway, "thaw_gateway_absent_streams 1.0")
    assert invoker.running == 1
    invoker.pace.release(10)
    assert invoker.closed.acquire(timeout=60)


def test_dropped_connections_buy_no_concurrency(start_gateway: Start, invoker: FakeInvoker) -> None:
    gateway = served(start_gateway(THAW_INVOCATIONS_CONCURRENT="1"), invoker)
    client = Client()
    invoker.pace = threading.Semaphore(2)
    client.ask(gateway)
    client.read(2)
    client.hang_up()
    wait_for_metric(gateway, "thaw_gateway_absent_streams 1.0")
    assert gateway.chat(max_tokens=1).status_code == 429
    invoker.pace.release(10)
    client.ask(gateway)
    client.read_all()
    assert client.has_whole_answer(6)
    assert gateway.chat(max_tokens=1).status_code == 200


def test_an_id_goes_with_its_tenant_and_its_request(ready: GatewayProcess, invoker: FakeInvoker) -> None:
    invoker.ready("other/chat", instance="i1")
    client, stranger = Client(), Client(OTHER_KEY)
    put = {"config": {"kind": "llm:vllm", "model": {"uri": "s3://models/tiny"}}}
    auth = {"Authorization": f"Bearer {OTHER_KEY}"}
    assert ready.call("PUT", "/api/v1/namespaces/_/actions/chat", json=put, headers=auth, auth=lambda r: r).ok
    client.ask(ready)
    client.read(3)
    client.hang_up()
    client.body["temperature"] = 0.5
    other = client.ask(ready)
    assert (other.status_code, other.json()["error"]["param"]) == (400, "Last-Event-ID")
    assert "Send the same body" in other.json()["error"]["message"]
    unknown = stranger.ask(ready, **{"Last-Event-ID": f"{'0' * 32}.{'0' * 8}.{'A' * 20}:3.00000000"})
    known = stranger.ask(ready, **{"Last-Event-ID": client.last_id})
    garbage = stranger.ask(ready, **{"Last-Event-ID": "3"})
    assert unknown.status_code == known.status_code == 404
    assert unknown.json() == known.json() == garbage.json()
    del client.body["temperature"], client.body["stream"], client.body["stream_options"]
    whole = client.ask(ready)
    assert whole.json()["error"]["message"] == "Last-Event-ID is only allowed when stream is true."


def test_an_id_is_of_use_while_its_stream_may_be_kept(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_llm(limits={"timeout": 100_000})
    invoker.ready("guest/chat")
    gateway.wait_for_routes()
    client, ids, guest = Client(), EventIds(invoker.token), Namespace("guest")
    client.ask(gateway)
    client.read(3)
    client.hang_up()
    given = ids.read(client.last_id, guest)

    def at(age_s: int) -> str:
        prefix = ids.prefix(guest, given.activation_id, given.started_s - age_s, given.digest)
        return f"{prefix}:{client.last_id.partition(':')[2]}"

    unknown, old = (client.ask(gateway, **{"Last-Event-ID": sent}) for sent in ("3", at(100 + 60 + 30)))
    assert unknown.status_code == old.status_code == 404
    assert unknown.json() == old.json()
    client.ask(gateway, **{"Last-Event-ID": at(100 + 60 - 30)})
    client.read_all()
    assert client.has_whole_answer(6)


def test_a_body_with_its_keys_in_another_order_is_the_same(ready: GatewayProcess) -> None:
    client = Client()
    client.ask(ready)
    client.read(3)
    client.hang_up()
    client.body = dict(reversed(client.body.items()))
    client.ask(ready)
    client.read_all()
    assert client.has_whole_answer(6)


def test_of_two_clients_the_last_one_goes_on(
    start_gateway: Start, invoker: FakeInvoker, valkey_url: str, patient: dict[str, str]
) -> None:
    """A gateway does not see that a client's network has gone, so the first one may be a connection that is dead."""
    ready = served(start_gateway(**patient), invoker)
    first, second = Client(), Client()
    invoker.pace = threading.Semaphore(2)
    first.ask(ready)
    first.read(3)
    second.events = list(first.events)
    second.ask(ready)
    assert second.comments == []
    first.read_all()
    assert first.error["message"] == "Another client goes on with this answer."
    assert first.error["type"] == "invalid_request_error"
    invoker.pace.release(10)
    second.read_all()
    assert second.comments == [": thaw going on with the answer"]
    assert second.has_whole_answer(6)
    assert resumed(invoker) == [0]
    one_record(valkey_url, second, 6)


def test_another_gateway_takes_the_stream_over(start_gateway: Start, invoker: FakeInvoker, valkey_url: str) -> None:
    first, second = served(start_gateway(), invoker), start_gateway()
    second.wait_for_routes()
    client = Client()
    invoker.pace = threading.Semaphore(4)
    client.ask(first)
    client.read(3)  # the client lacks the last two tokens that its gateway has
    client.hang_up()
    noted(valkey_url, client)
    client.ask(second)
    assert invoker.closed.acquire(timeout=60)  # the first gateway's run
    invoker.pace.release(10)
    client.read_all()
    assert client.has_whole_answer(6)
    assert resumed(invoker) in ([0, 3], [0, 4])
    assert metric(second, 'thaw_gateway_reconnects_total{way="taken_over"} 1.0')
    assert metric(first, "thaw_gateway_absent_streams 0.0")
    one_record(valkey_url, client, 6)
    client.hang_up()
    assert first.chat(max_tokens=1).status_code == 200


def test_a_client_that_goes_on_elsewhere_before_its_gateway_sees_it_leave_has_one_run(
    start_gateway: Start, invoker: FakeInvoker, valkey_url: str
) -> None:
    first, second = served(start_gateway(), invoker), start_gateway()
    second.wait_for_routes()
    lost, client = Client(), Client()
    invoker.pace = threading.Semaphore(2)
    lost.ask(first)
    lost.read(3)
    client.events = list(lost.events)
    client.ask(second)
    assert metric(second, 'thaw_gateway_reconnects_total{way="computed_again"} 1.0')
    lost.hang_up()
    assert invoker.closed.acquire(timeout=60)  # the first gateway's run
    invoker.pace.release(100)
    client.read_all()
    assert client.has_whole_answer(6)
    assert metric(first, "thaw_gateway_absent_streams 0.0")
    one_record(valkey_url, client, 6)


def test_another_gateway_takes_over_what_has_ended(start_gateway: Start, invoker: FakeInvoker, valkey_url: str) -> None:
    first, second = served(start_gateway(), invoker), start_gateway()
    client = Client()
    invoker.pace = threading.Semaphore(2)
    client.ask(first)
    client.read(3)
    client.hang_up()
    noted(valkey_url, client)
    invoker.pace.release(10)
    one_record(valkey_url, client, 6)
    client.ask(second)
    client.read_all()
    assert client.has_whole_answer(6)
    assert resumed(invoker) == [0]


def test_a_killed_gateways_answer_is_computed_again(
    start_gateway: Start, invoker: FakeInvoker, valkey_url: str
) -> None:
    first, second = served(start_gateway(), invoker), start_gateway()
    second.wait_for_routes()
    client = Client()
    invoker.pace = threading.Semaphore(3)
    client.ask(first)
    client.read(3)
    first.kill()
    client.read_all()
    invoker.pace = None
    client.ask(second)
    client.read_all()
    assert client.has_whole_answer(6)
    assert resumed(invoker) == [0, 0]
    assert len({run["value"]["seed"] for run in invoker.runs}) == 1
    one_record(valkey_url, client, 6)


def test_a_gateway_that_hangs_loses_its_stream_to_the_one_that_computes_it_again(
    start_gateway: Start, invoker: FakeInvoker, valkey_url: str
) -> None:
    first, second = served(start_gateway(), invoker), start_gateway()
    second.wait_for_routes()
    client = Client()
    invoker.pace = threading.Semaphore(3)
    client.ask(first)
    client.read(3)
    client.hang_up()
    noted(valkey_url, client)
    os.killpg(first.process.pid, signal.SIGSTOP)
    try:
        invoker.pace.release(100)
        client.ask(second)
        client.read_all()
    finally:
        os.killpg(first.process.pid, signal.SIGCONT)
    assert client.has_whole_answer(6)
    assert metric(second, 'thaw_gateway_reconnects_total{way="computed_again"} 1.0')
    wait_for_metric(first, "thaw_gateway_absent_streams 0.0")  # it was asked, and finds that it is late
    one_record(valkey_url, client, 6)


def test_a_stream_that_is_computed_again_moves_like_any_other(
    start_gateway: Start, invoker: FakeInvoker, valkey_url: str, patient: dict[str, str]
) -> None:
    first, second, third = served(start_gateway(), invoker), start_gateway(**patient), start_gateway()
    client, rival = Client(), Client()
    invoker.pace = threading.Semaphore(3)
    client.ask(first)
    client.read(3)
    first.kill()
    assert invoker.closed.acquire(timeout=60)
    rival.events = list(client.events)
    client.ask(second)
    rival.ask(third)
    client.read_all()
    assert client.error["message"] == "Another client goes on with this answer."
    assert invoker.closed.acquire(timeout=60)
    invoker.pace.release(100)
    rival.read_all()
    assert rival.has_whole_answer(6)
    assert metric(third, 'thaw_gateway_reconnects_total{way="taken_over"} 1.0')
    one_record(valkey_url, rival, 6)


def test_a_stream_without_a_client_ends_by_its_time_limit(
    gateway: GatewayProcess, invoker: FakeInvoker, valkey_url: str
) -> None:
    gateway.put_llm(limits={"timeout": 1500})
    invoker.ready("guest/chat")
    gateway.wait_for_routes()
    client = Client()
    invoker.pace = threading.Semaphore(2)
    client.ask(gateway)
    client.read(2)
    client.hang_up()
    assert wait_for_record(valkey_url, activation_of(client)).timed_out
    client.ask(gateway)
    client.read_all()
    assert client.error["message"] == "The action exceeded its time limits of 1500 milliseconds."


def test_a_gateway_that_has_the_stream_needs_no_state_server(own_valkey: ValkeyServer) -> None:
    add_key(own_valkey.url, KEY, "guest")
    first, second = GatewayProcess(own_valkey.url), GatewayProcess(own_valkey.url)
    invoker = FakeInvoker(own_valkey.url)
    try:
        for gateway in (served(first, invoker), second):
            assert gateway.chat(max_tokens=1).status_code == 200  # both know the key and the action
        client = Client()
        invoker.pace = threading.Semaphore(2)
        client.ask(first)
        client.read(3)
        own_valkey.kill()
        client.hang_up()
        first.wait_for_event("stream_not_noted")
        assert client.ask(second).status_code == 503
        invoker.pace.release(100)
        client.ask(first)
        client.read_all()
        assert client.has_whole_answer(6)
    finally:
        invoker.stop()
        for gateway in (first, second):
            gateway.end()


def test_an_answer_that_comes_out_otherwise_is_refused(
    start_gateway: Start, invoker: FakeInvoker, valkey_url: str
) -> None:
    """Simulate a computation that is not repeatable: the client's checksum belongs to other tokens."""
    first, second = served(start_gateway(), invoker), start_gateway()
    second.wait_for_routes()
    client = Client()
    client.ask(first)
    client.read(4)
    client.hang_up()
    first.kill()
    place, _, checksum = client.last_id.rpartition(".")
    reply = client.ask(second, **{"Last-Event-ID": f"{place}.{int(checksum, 16) ^ 1:08x}"})
    assert reply.status_code == 200
    client.read_all()
    assert client.error["message"].startswith("The answer was computed again and does not continue")
    assert client.indexes == [0, 1, 2]


def test_every_index_comes_once_over_lost_workers_a_cold_start_and_a_killed_gateway(
    start_gateway: Start, invoker: FakeInvoker, valkey_url: str
) -> None:
    first, second = served(start_gateway(), invoker), start_gateway()
    second.wait_for_routes()
    client = Client(max_tokens=12)
    invoker.pace = threading.Semaphore(3)
    client.ask(first)
    client.read(4)
    invoker.drop_runs()  # the worker is lost, and the answer waits for a cold start
    assert invoker.closed.acquire(timeout=60)  # or the lost run would take the next run's turns
    (demand,) = invoker.wait_for_demand()
    client.hang_up()
    noted(valkey_url, client)
    client.ask(first)
    assert demand.activation_id == activation_of(client)
    invoker.ready("guest/chat", instance="i1")
    invoker.pace.release(3)
    client.read(3)
    client.hang_up()
    wait_for_metric(first, "thaw_gateway_absent_streams 1.0")
    client.ask(second)
    assert invoker.closed.acquire(timeout=60)  # the first gateway's run
    invoker.pace.release(2)
    client.read(2)
    second.kill()
    client.read_all()
    third = start_gateway()
    third.wait_for_routes(2)
    invoker.pace = None
    client.ask(third)
    client.read_all()
    assert client.has_whole_answer(12)
    assert resumed(invoker) == [0, 3, 6, 0]
    one_record(valkey_url, client, 12)


def noted(url: str, client: Client) -> None:
    """Wait until the gateway has noted that it keeps the client's stream."""
    with redis.Redis.from_url(url) as state:
        tick, until_s = threading.Event(), time.monotonic() + 60
        while not state.exists(keys.stream(activation_of(client))):
            assert time.monotonic() < until_s, "not noted"
            tick.wait(0.01)


@pytest.fixture(autouse=True)
def _nothing_runs_on(invoker: FakeInvoker) -> Iterator[None]:
    yield
    if invoker.pace is not None:
        invoker.pace.release(1000)
