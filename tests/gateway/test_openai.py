"""/v1 against a real gateway process."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import requests

from gateway.api.bounded_json import MAX_DEPTH
from tests.gateway.conftest import KEY, GatewayProcess, Patched, Start, events_of, notes, text_of
from thaw.errors import InstanceBusy, InstanceGone
from thaw.host import FetchReport


def test_a_chat_is_answered_whole_with_usage_and_an_activation(gateway: GatewayProcess) -> None:
    gateway.serve_llm()
    reply = gateway.chat(max_tokens=3, seed=7)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    message = {"role": "assistant", "content": "w0 w1 w2 "}
    assert body["choices"] == [{"index": 0, "finish_reason": "length", "logprobs": None, "message": message}]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    activation_id = reply.headers["X-Openwhisk-Activation-Id"]
    assert body["id"] == f"chatcmpl-{activation_id}"
    record = gateway.record(activation_id)
    assert record["response"]["result"] == body
    assert (notes(record)["seed"], notes(record)["startMode"]) == (7, "warm")
    assert gateway.invoker.runs[0]["value"]["seed"] == 7


def test_the_first_token_reaches_the_client_before_the_second_is_made(gateway: GatewayProcess) -> None:
    gateway.serve_llm()
    gateway.invoker.pace = threading.Semaphore(1)
    with gateway.chat(stream=True, max_tokens=3) as reply:
        lines = reply.iter_lines()
        events = events_of(lines)
        assert next(events)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert next(events)["choices"][0]["delta"] == {"content": "w0 "}
        gateway.invoker.pace.release(2)
        rest = list(lines)
    assert text_of(events_of(rest)) == "w1 w2 "
    assert b"data: [DONE]" in rest


def test_a_client_that_waits_for_a_cold_start_is_told_what_happens(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    with gateway.chat(stream=True, max_tokens=2) as reply:
        lines = reply.iter_lines()
        assert next(lines) == b": thaw queued"
        (demand,) = gateway.invoker.wait_for_demand()
        assert demand.activation_id == reply.headers["X-Openwhisk-Activation-Id"]
        gateway.invoker.ready("guest/chat")
        assert text_of(events_of(lines)) == "w0 w1 "
    gateway.invoker.wait_for_demand(0)
    activation_id = reply.headers["X-Openwhisk-Activation-Id"]
    told = notes(gateway.record(activation_id))
    assert (told["startMode"], told["initTime"], told["groupId"]) == ("cold", 40, "a" * 32)
    trace = gateway.read(f"activations/{activation_id}/trace")
    names = [e["name"] for e in trace["events"]]
    assert names == ["received", "queued.begin", "queued.end", "clock", "dispatched", "first_token", "finished"]
    assert trace["group_id"] == "a" * 32


def test_a_client_that_waits_reads_how_far_the_start_is(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    with gateway.chat(stream=True, max_tokens=2) as reply:
        assert reply.headers["X-Thaw-Start"] == "cold"
        lines = (line.decode() for line in reply.iter_lines() if line.startswith(b":"))
        assert next(lines) == ": thaw queued"
        gateway.invoker.report(FetchReport("a" * 32, 1000, 437, 100.0))
        gateway.invoker.starting("guest/chat")
        assert next(lines) == ": thaw starting on h0"
        assert next(lines) == ": thaw fetching 43 % eta 5.6 s"
        gateway.invoker.report()
        assert next(lines) == ": thaw loading"
        gateway.invoker.ready("guest/chat")
        assert list(lines) == []


def test_an_answer_says_whether_its_request_waited_for_a_start(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    assert re.fullmatch(r"cold; ttft=\d+\.\d{3}", gateway.cold_chat().headers["X-Thaw-Start"])
    assert gateway.chat(max_tokens=2).headers["X-Thaw-Start"] == "warm"
    with gateway.chat(stream=True, max_tokens=2) as stream:
        assert stream.headers["X-Thaw-Start"] == "warm"
        assert not any(line.startswith(b":") for line in stream.iter_lines())


def test_models_are_listed_by_the_names_that_lead_to_them(gateway: GatewayProcess) -> None:
    gateway.put_llm("first", model={"uri": "s3://models/tiny", "served_name": "tiny"})
    gateway.put_llm("second", model={"uri": "s3://models/tiny", "served_name": "first"})
    gateway.put_llm("third", model={"uri": "s3://models/tiny"})
    listed = gateway.call("GET", "/v1/models").json()["data"]
    assert {m["id"]: m["root"] for m in listed} == {"tiny": "first", "second": "second", "third": "third"}
    for name, root in {"tiny": "first", "first": "first", "second": "second", "third": "third"}.items():
        found = gateway.call("GET", f"/v1/models/{name}").json()
        assert (found["id"], found["root"]) == (name, root)


@pytest.mark.parametrize("error", [InstanceGone("left"), InstanceBusy("full")])
def test_a_refused_request_is_routed_again(gateway: GatewayProcess, error: InstanceGone | InstanceBusy) -> None:
    gateway.serve_llm()
    gateway.invoker.refusals.append(error)
    reply = gateway.soon(gateway.chat, max_tokens=2)
    if isinstance(error, InstanceGone):
        gateway.invoker.wait_for_demand()
        gateway.invoker.ready("guest/chat", instance="i1")
    assert reply.result().json()["choices"][0]["message"]["content"] == "w0 w1 "


def test_a_worker_lost_in_mid_stream_costs_no_token_and_doubles_none(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    gateway.invoker.ready("guest/chat", instance="i0", model_version="v1")
    gateway.invoker.cut_after.append(2)
    with gateway.chat(stream=True, max_tokens=6) as reply:
        events = events_of(reply.iter_lines())
        assert next(events)
        gateway.invoker.wait_for_demand()
        gateway.invoker.ready("guest/chat", instance="i1", model_version="v1")
        rest = list(events)
    assert text_of(rest) == "w0 w1 w2 w3 w4 w5 "
    assert [r["value"]["resume"] for r in gateway.invoker.runs] == [
        None,
        {"output_token_ids": [100, 101], "model_version": "v1", "adapter": ""},
    ]
    assert {r["value"]["seed"] for r in gateway.invoker.runs} == {gateway.invoker.runs[0]["value"]["seed"]}


def test_the_openai_sdk_works_unmodified(gateway: GatewayProcess) -> None:
    gateway.serve_llm()
    with openai.OpenAI(api_key=KEY, base_url=f"{gateway.url}/v1", max_retries=0) as client:
        assert [m.id for m in client.models.list()] == ["tiny"]
        messages: Any = [{"role": "user", "content": "hi"}]
        whole = client.chat.completions.create(model="chat", messages=messages, max_tokens=2, logprobs=True)
        assert whole.choices[0].message.content == "w0 w1 "
        assert [t.token for t in whole.choices[0].logprobs.content or []] == ["w0 ", "w1 "]
        stream = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "w0 w1 "
        assert chunks[-1].usage.completion_tokens == 2
        text = client.completions.create(model="chat", prompt="once", max_tokens=2, logprobs=1)
        assert text.choices[0].text == "w0 w1 "
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="nope", messages=messages)
        assert missing.value.code == "model_not_found"
    with (
        openai.OpenAI(api_key="wrong", base_url=f"{gateway.url}/v1", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"n": 17}, "n", "n must be a whole number from 1 to 16, not 17."),
        ({"messages": []}, "messages", "messages must be a non-empty list of {role, content}."),
        ({"temperature": 3}, "temperature", "temperature must be a number from 0 to 2, not 3."),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be a whole number of at least 1, not 0."),
        ({"stream_options": {}}, "stream_options", "stream_options is only allowed when stream is true."),
        ({"tools": [{}]}, "tools[0]", 'tools[0] must be {"type": "function", "function": {"name", …}}.'),
        ({"model": 3}, "model", "model must be the name of a deployed action."),
    ],
)
def test_a_body_that_cannot_be_run_names_its_parameter(
    shared_gateway: GatewayProcess, change: dict[str, Any], param: str, message: str
) -> None:
    reply = shared_gateway.chat(**change)
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    assert (reply.status_code, reply.json()) == (400, {"error": error})


BROKEN = """
from gateway.serving.routing import sending
run_body = sending.run_body
def broken(call, deadline_s, tokens, **more):
    return run_body(call, deadline_s, tokens, **more) if call.payload.get("stop") != "unlucky" else {}["nothing"]
sending.run_body = broken
"""


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_meets_an_error_of_ours_is_recorded_and_counted_out(
    start_gateway: Start, patched: Patched, stream: bool
) -> None:
    gateway = start_gateway(THAW_INVOCATIONS_CONCURRENT="1", **patched(BROKEN))
    gateway.serve_llm()
    for _ in range(2):
        reply = gateway.chat(stream=stream, stop="unlucky")
        assert reply.status_code == 500
        assert reply.json()["error"]["message"] == "There was an internal server error."
        assert gateway.record(reply)["statusCode"] == 3
    assert gateway.chat(max_tokens=1).status_code == 200


@pytest.mark.parametrize("resumable", ["0", "1"])
def test_a_body_that_is_nested_too_deep_is_refused_and_counts_for_nothing(start_gateway: Start, resumable: str) -> None:
    gateway = start_gateway(THAW_INVOCATIONS_CONCURRENT="1")
    gateway.serve_llm()

    def ask(depth: int) -> requests.Response:
        """The list is in an object, in an object."""
        metadata = f'{{"more": {"[" * (depth - 2) + "]" * (depth - 2)}}}'
        message = '{"role": "user", "content": "x"}'
        body = f'{{"model": "chat", "stream": true, "messages": [{message}], "metadata": {metadata}}}'
        headers = {"X-Thaw-Resumable": resumable}
        return gateway.call("POST", "/v1/chat/completions", data=body.encode(), headers=headers)

    for depth in (MAX_DEPTH + 1, 980, 5000):
        reply = ask(depth)
        assert reply.status_code == 400
        assert reply.json()["error"]["message"].endswith("it is nested deeper than 128 levels.")
    assert ask(MAX_DEPTH).status_code == 200
    assert gateway.chat(max_tokens=1).status_code == 200


def test_half_a_surrogate_pair_is_refused(gateway: GatewayProcess) -> None:
    gateway.serve_llm()

    def status(content: bytes) -> int:
        body = b'{"model": "chat", "stream": true, "messages": [{"role": "user", "content": "' + content + b'"}]}'
        return gateway.call("POST", "/v1/chat/completions", data=body).status_code

    assert (status(rb"\ud800"), status(b"\xed\xa0\x80")) == (400, 400)
    assert status(rb"\ud83d\ude00 \\ud800") == 200


def test_a_thousand_held_requests_are_all_answered_when_the_instance_comes(start_gateway: Start) -> None:
    gateway = start_gateway()
    gateway.put_llm()
    count = 1000

    def ask(_: int) -> str:
        body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        headers = {"Authorization": f"Bearer {KEY}"}
        reply = requests.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=240)
        return str(reply.json()["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(count) as pool:
        answers = pool.map(ask, range(count))
        gateway.invoker.wait_for_demand(count, timeout_s=180)
        gateway.invoker.ready("guest/chat", slots=64)
        assert list(answers) == ["w0 w1 "] * count
    assert len({r["activation_id"] for r in gateway.invoker.runs}) == count
