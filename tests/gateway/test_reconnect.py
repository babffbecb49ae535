"""Clients that lose their connection and go on where they were, through real gateway processes."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import openai
import pytest
import redis

from gateway.serving.answers.event_ids import EventIds
from relay.state import keys
from tests.conftest import ValkeyServer
from tests.gateway.conftest import KEY, LLM_CONFIG, OTHER_KEY, GatewayProcess, Patched, Start
from tests.gateway.event_client import Client
from tests.gateway.test_hangup import raw_post
from tests.gateway.waits import until
from thaw.ids import Namespace

PATIENT = "from gateway.serving import streams; streams._LEAVES_S = 30.0"
"""A replaced reader has as long as a busy machine needs to tell its client."""
ONE_IS_ABSENT, NONE_IS_ABSENT = (f"thaw_gateway_absent_streams {n}.0" for n in (1, 0))
TOLD_ELSEWHERE = "Another client goes on with this answer."


@pytest.fixture
def ready(gateway: GatewayProcess) -> GatewayProcess:
    return served(gateway)


@pytest.fixture
def two(start_gateway: Start) -> tuple[GatewayProcess, GatewayProcess]:
    first, second = served(start_gateway()), start_gateway()
    second.wait_for_routes()
    return first, second


def served(gateway: GatewayProcess, **instance: Any) -> GatewayProcess:
    gateway.serve_llm(**instance)
    return gateway


def reads(gateway: GatewayProcess, n_events: int, *, n_tokens: int = 2, **body: Any) -> Client:
    """A client that has so many events of an answer that pauses behind ``n_tokens``."""
    gateway.invoker.pace = threading.Semaphore(n_tokens)
    client = Client(**body)
    client.ask(gateway)
    client.read(n_events)
    return client


def left(gateway: GatewayProcess, n_events: int = 2, *, n_tokens: int = 2, **body: Any) -> Client:
    client = reads(gateway, n_events, n_tokens=n_tokens, **body)
    client.hang_up()
    return client


def reads_the_rest(client: Client, gateway: GatewayProcess, n_tokens: int = 6) -> None:
    """The answer goes on, and no event is missing and none comes twice."""
    gateway.invoker.pace = None
    client.read_all()
    assert client.has_whole_answer(n_tokens)


def goes_on(client: Client, gateway: GatewayProcess, n_tokens: int = 6) -> None:
    client.ask(gateway)
    reads_the_rest(client, gateway, n_tokens)


def run_ended(gateway: GatewayProcess) -> bool:
    """The gateway broke off a run."""
    return gateway.invoker.closed.acquire(timeout=60)


def activation_of(client: Client) -> str:
    return client.reply.headers["X-Openwhisk-Activation-Id"]


def resumed(gateway: GatewayProcess) -> list[int]:
    """Return the number of tokens with which each run began."""
    values = [run["value"] for run in gateway.invoker.runs]
    return [len((value["resume"] or {"output_token_ids": ()})["output_token_ids"]) for value in values]


def went_on(gateway: GatewayProcess, way: str) -> bool:
    return gateway.has_metric(f'thaw_gateway_reconnects_total{{way="{way}"}} 1.0')


def one_record(gateway: GatewayProcess, client: Client, n_tokens: int = 6) -> None:
    """The activation has one record, which counts each token once."""
    record = gateway.ended(activation_of(client))
    assert record.status.value == 0
    assert record.usage == {"prompt_tokens": 3, "completion_tokens": n_tokens, "total_tokens": 3 + n_tokens}
    with redis.Redis.from_url(gateway.state_url) as state:
        assert state.zcard(keys.activations("guest")) == 1


def noted(url: str, client: Client) -> None:
    """Wait until the gateway has noted that it keeps the client's stream."""
    with redis.Redis.from_url(url) as state:
        until(lambda: state.exists(keys.stream(activation_of(client))), "not noted", most_s=60)


def test_every_token_and_what_comes_after_the_last_has_an_id(ready: GatewayProcess, valkey_url: str) -> None:
    client = Client()
    goes_on(client, ready)
    assert client.last_id.startswith(activation_of(client))
    assert len({e.id.partition(":")[0] for e in client.events if e.id}) == 1
    with redis.Redis.from_url(valkey_url) as state:
        assert list(state.scan_iter("thaw:stream*")) == []


def test_the_openai_sdk_skips_ids_and_comments_between_them(ready: GatewayProcess) -> None:
    """The SDK keeps an id until the end of the stream, and then takes a comment with an empty line for an event."""
    ready.invoker.cut_after.append(2)
    with openai.OpenAI(api_key=KEY, base_url=f"{ready.url}/v1", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        stream = iter(client.chat.completions.create(model="chat", messages=messages, max_tokens=4, stream=True))
        chunks = [next(stream), next(stream)]
        ready.invoker.wait_for_demand()
        ready.invoker.ready("guest/chat", instance="i1")
        chunks += list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "w0 w1 w2 w3 "


@pytest.mark.parametrize("n_before", [2, 4, 7, 8, 9], ids="after {} events".format)
def test_a_client_goes_on_with_the_run_of_its_gateway(ready: GatewayProcess, n_before: int) -> None:
    """The first event is the role; those after the sixth token are the finish reason, the usage and [DONE]."""
    client = left(ready, n_before, n_tokens=n_before - 1)
    ready.wait_for_metric(ONE_IS_ABSENT)
    goes_on(client, ready)
    assert (resumed(ready), went_on(ready, "here")) == ([0], True)
    one_record(ready, client)


def test_a_client_reconnects_again_and_again(ready: GatewayProcess) -> None:
    client = Client()
    ready.invoker.pace = pace = threading.Semaphore(0)
    asking = client.ask_soon(ready)
    for n in range(5):
        pace.release()
        asking.join()
        client.read(2 if n == 0 else 1)
        client.hang_up()
        client.ask(ready)
    reads_the_rest(client, ready)
    assert resumed(ready) == [0]
    one_record(ready, client)


def test_who_does_not_ask_for_ids_reads_lines_of_data_alone(ready: GatewayProcess) -> None:
    reply = ready.call("POST", "/v1/chat/completions", json=Client().body)
    events = reply.text.split("\n\n")
    assert len(events) > 6
    assert all(event.startswith(("data: ", ": thaw")) and "\n" not in event for event in events if event)


def test_who_does_not_ask_for_it_hangs_up_to_cancel(ready: GatewayProcess) -> None:
    client = Client()
    ready.invoker.pace = threading.Semaphore(2)
    client.ask(ready, **{"X-Thaw-Resumable": "0"})
    client.read(2)
    client.hang_up()
    assert run_ended(ready)
    assert ready.ended(activation_of(client)).status.value == 1
    goes_on(client, ready)  # it has ids all the same: the answer is computed again
    assert resumed(ready) == [0, 0]
    assert len({run["value"]["seed"] for run in ready.invoker.runs}) == 1


def test_a_client_that_changes_its_mind_cancels_when_it_hangs_up_again(ready: GatewayProcess) -> None:
    client = left(ready)
    ready.wait_for_metric(ONE_IS_ABSENT)
    client.ask(ready, **{"X-Thaw-Resumable": "0"})
    client.read(1)
    client.hang_up()
    assert run_ended(ready)
    assert ready.ended(activation_of(client)).status.value == 1


def test_a_client_without_an_id_has_nothing_to_go_on_from(ready: GatewayProcess) -> None:
    ready.invoker.pace = threading.Semaphore(0)
    client = raw_post(ready, "/v1/chat/completions", Client().body, headers="X-Thaw-Resumable: 1\r\n")
    assert ready.invoker.entered.acquire(timeout=60)
    client.close()
    assert run_ended(ready)
    assert ready.ended(ready.invoker.runs[-1]["activation_id"]).status.value == 1


def test_a_stream_ends_when_its_client_stays_away(start_gateway: Start) -> None:
    gateway = served(start_gateway(THAW_RECONNECT_S="0.3"), slots=1)
    client = left(gateway)
    assert run_ended(gateway)
    assert gateway.ended(activation_of(client)).status.value == 1
    goes_on(client, gateway)
    assert (resumed(gateway), went_on(gateway, "computed_again")) == ([0, 0], True)


@pytest.mark.parametrize("setting", ["THAW_RECONNECT_S", "THAW_RECONNECT_STREAM_BYTES", "THAW_RECONNECT_BYTES"])
def test_a_bound_of_zero_ends_a_stream_with_its_client(start_gateway: Start, setting: str) -> None:
    gateway = served(start_gateway(**{setting: "0"}))
    left(gateway)
    assert run_ended(gateway)


def test_a_stream_that_grows_too_long_without_a_client_ends(start_gateway: Start) -> None:
    gateway = served(start_gateway(THAW_RECONNECT_STREAM_BYTES="900"))
    left(gateway, max_tokens=50)
    gateway.wait_for_metric(ONE_IS_ABSENT)
    assert gateway.invoker.running == 1
    gateway.invoker.pace.release(10)  # type: ignore[union-attr]
    assert run_ended(gateway)


def test_dropped_connections_buy_no_concurrency(start_gateway: Start) -> None:
    gateway = served(start_gateway(THAW_INVOCATIONS_CONCURRENT="1"))
    client = left(gateway)
    gateway.wait_for_metric(ONE_IS_ABSENT)
    assert gateway.chat(max_tokens=1).status_code == 429
    goes_on(client, gateway)
    assert gateway.chat(max_tokens=1).status_code == 200


def test_an_id_goes_with_its_tenant_and_its_request(ready: GatewayProcess) -> None:
    ready.invoker.ready("other/chat", instance="i1")
    stranger = Client(OTHER_KEY)
    assert ready.call("PUT", "/api/v1/namespaces/_/actions/chat", json={"config": LLM_CONFIG}, key=OTHER_KEY).ok
    client = left(ready, 3)
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


def test_an_id_is_of_use_while_its_stream_may_be_kept(gateway: GatewayProcess) -> None:
    gateway.put_llm(limits={"timeout": 100_000})
    gateway.serve("chat")
    client, ids, guest = left(gateway, 3), EventIds(gateway.invoker.token), Namespace("guest")
    given = ids.read(client.last_id, guest)

    def at(age_s: int) -> str:
        prefix = ids.prefix(guest, given.activation_id, given.started_s - age_s, given.digest)
        return f"{prefix}:{client.last_id.partition(':')[2]}"

    unknown, old = (client.ask(gateway, **{"Last-Event-ID": sent}) for sent in ("3", at(100 + 60 + 30)))
    assert unknown.status_code == old.status_code == 404
    assert unknown.json() == old.json()
    client.ask(gateway, **{"Last-Event-ID": at(100 + 60 - 30)})
    reads_the_rest(client, gateway)


def test_of_two_clients_the_last_one_goes_on(start_gateway: Start, patched: Patched) -> None:
    """A gateway does not see that a client's network has gone, so the first one may be a connection that is dead."""
    ready = served(start_gateway(**patched(PATIENT)))
    first, second = reads(ready, 3), Client()
    second.events = list(first.events)
    second.ask(ready)
    assert second.comments == []
    first.read_all()
    assert (first.error["message"], first.error["type"]) == (TOLD_ELSEWHERE, "invalid_request_error")
    reads_the_rest(second, ready)
    assert second.comments == [": thaw going on with the answer"]
    assert resumed(ready) == [0]
    one_record(ready, second)


def test_another_gateway_takes_the_stream_over(two: tuple[GatewayProcess, GatewayProcess]) -> None:
    first, second = two
    client = left(first, 3, n_tokens=4)  # the client lacks the last two tokens that its gateway has
    noted(first.state_url, client)
    client.ask(second)
    assert run_ended(first)
    reads_the_rest(client, second)
    assert resumed(first) in ([0, 3], [0, 4])
    assert went_on(second, "taken_over")
    assert first.has_metric(NONE_IS_ABSENT)
    one_record(first, client)
    client.hang_up()
    assert first.chat(max_tokens=1).status_code == 200


def test_a_client_that_goes_on_elsewhere_before_its_gateway_sees_it_leave_has_one_run(
    two: tuple[GatewayProcess, GatewayProcess],
) -> None:
    first, second = two
    lost, client = reads(first, 3), Client()
    client.events = list(lost.events)
    client.ask(second)
    assert went_on(second, "computed_again")
    lost.hang_up()
    assert run_ended(first)
    reads_the_rest(client, second)
    assert first.has_metric(NONE_IS_ABSENT)
    one_record(first, client)


def test_another_gateway_takes_over_what_has_ended(two: tuple[GatewayProcess, GatewayProcess]) -> None:
    first, second = two
    client = left(first, 3)
    noted(first.state_url, client)
    first.invoker.pace = None
    one_record(first, client)
    goes_on(client, second)
    assert resumed(first) == [0]


def test_a_killed_gateways_answer_is_computed_again(two: tuple[GatewayProcess, GatewayProcess]) -> None:
    first, second = two
    client = reads(first, 3, n_tokens=3)
    first.kill()
    client.read_all()
    first.invoker.pace = None
    goes_on(client, second)
    assert resumed(first) == [0, 0]
    assert len({run["value"]["seed"] for run in first.invoker.runs}) == 1
    one_record(first, client)


def test_a_gateway_that_hangs_loses_its_stream_to_the_one_that_computes_it_again(
    two: tuple[GatewayProcess, GatewayProcess],
) -> None:
    first, second = two
    client = left(first, 3, n_tokens=3)
    noted(first.state_url, client)
    os.killpg(first.process.pid, signal.SIGSTOP)
    try:
        first.invoker.pace = None
        goes_on(client, second)
    finally:
        os.killpg(first.process.pid, signal.SIGCONT)
    assert went_on(second, "computed_again")
    first.wait_for_metric(NONE_IS_ABSENT)  # it was asked, and finds that it is late
    one_record(first, client)


def test_a_stream_that_is_computed_again_moves_like_any_other(start_gateway: Start, patched: Patched) -> None:
    first, second, third = served(start_gateway()), start_gateway(**patched(PATIENT)), start_gateway()
    client, rival = reads(first, 3, n_tokens=3), Client()
    first.kill()
    assert run_ended(first)
    rival.events = list(client.events)
    client.ask(second)
    rival.ask(third)
    client.read_all()
    assert client.error["message"] == TOLD_ELSEWHERE
    assert run_ended(first)
    reads_the_rest(rival, third)
    assert went_on(third, "taken_over")
    one_record(first, rival)


def test_a_stream_without_a_client_ends_by_its_time_limit(gateway: GatewayProcess) -> None:
    gateway.put_llm(limits={"timeout": 1500})
    gateway.serve("chat")
    client = left(gateway)
    assert gateway.ended(activation_of(client)).timed_out
    client.ask(gateway)
    client.read_all()
    assert client.error["message"] == "The action exceeded its time limits of 1500 milliseconds."


def test_a_gateway_that_has_the_stream_needs_no_state_server(start_gateway: Start, own_valkey: ValkeyServer) -> None:
    first, second = served(start_gateway(own_valkey.url)), start_gateway(own_valkey.url)
    for gateway in (first, second):
        assert gateway.chat(max_tokens=1).status_code == 200  # both know the key and the action
    client = reads(first, 3)
    own_valkey.kill()
    client.hang_up()
    first.wait_for_event("stream_not_noted")
    assert client.ask(second).status_code == 503
    goes_on(client, first)


def test_an_answer_that_comes_out_otherwise_is_refused(two: tuple[GatewayProcess, GatewayProcess]) -> None:
    """Simulate a computation that is not repeatable: the client's checksum belongs to other tokens."""
    first, second = two
    client = left(first, 4, n_tokens=100)
    first.kill()
    place, _, checksum = client.last_id.rpartition(".")
    reply = client.ask(second, **{"Last-Event-ID": f"{place}.{int(checksum, 16) ^ 1:08x}"})
    assert reply.status_code == 200
    client.read_all()
    assert client.error["message"].startswith("The answer was computed again and does not continue")
    assert client.indexes == [0, 1, 2]


def test_every_index_comes_once_over_lost_workers_a_cold_start_and_a_killed_gateway(
    start_gateway: Start, two: tuple[GatewayProcess, GatewayProcess]
) -> None:
    first, second = two
    invoker = first.invoker
    client = reads(first, 4, n_tokens=3, max_tokens=12)
    invoker.drop_runs()  # the worker is lost, and the answer waits for a cold start
    assert run_ended(first)  # or the lost run would take the next run's turns
    (demand,) = invoker.wait_for_demand()
    client.hang_up()
    noted(first.state_url, client)
    client.ask(first)
    assert demand.activation_id == activation_of(client)
    invoker.ready("guest/chat", instance="i1")
    invoker.pace.release(3)  # type: ignore[union-attr]
    client.read(3)
    client.hang_up()
    first.wait_for_metric(ONE_IS_ABSENT)
    client.ask(second)
    assert run_ended(first)
    invoker.pace.release(2)  # type: ignore[union-attr]
    client.read(2)
    second.kill()
    client.read_all()
    third = start_gateway()
    third.wait_for_routes(2)
    goes_on(client, third, 12)
    assert resumed(first) == [0, 3, 6, 0]
    one_record(first, client, 12)
