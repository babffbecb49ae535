"""/v1/responses: the object, its events, and OpenAI's SDK against a real gateway process."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import openai
import pytest
from openai.types.responses import Response as SdkResponse

from gateway.serving.answers.responses_format import ResponseEvents, repeated
from relay.protocol.messages import CallDelta, RunFinished, RunToken, TokenLogprob
from tests.gateway.calls import call_of
from tests.gateway.conftest import KEY, GatewayProcess, events_of
from thaw.errors import BadParameter, BadRequest, StoreUnavailable


def response(body: dict[str, Any]) -> ResponseEvents:
    return ResponseEvents(call_of(body={"model": "m"}, endpoint="chat"), repeated(body))


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [e["type"].removeprefix("response.") for e in events]


def test_text_and_calls_become_items_and_each_event_says_what_changed() -> None:
    made = response({"tools": [], "temperature": 0})
    held_back = TokenLogprob("<tool", -0.1)
    events = [
        *made.of_token(RunToken(0, 1, "I ", TokenLogprob("I ", -0.5))),
        *made.of_token(RunToken(1, 2, "add.")),
        *made.of_token(RunToken(2, 3, "", held_back)),
        *made.of_token(RunToken(3, 4, "", None, (CallDelta(0, "add"), CallDelta(0, "", '{"a":')))),
        *made.of_end(RunFinished("tool_calls", 5, 4, "", (), (CallDelta(0, "", "1}"), CallDelta(1, "now")))),
    ]
    message = ["output_item.added", "content_part.added", "output_text.delta", "output_text.delta"]
    ended = ["output_text.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"]
    done = ["function_call_arguments.done", "output_item.done"]
    assert kinds(events) == [
        *("created", "in_progress", *message, *ended, *call, *done),
        *("output_item.added", *done, "completed"),
    ]
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert events[0]["response"]["output"] == []
    whole = events[-1]["response"]
    assert whole == made.whole()
    text, add, now = whole["output"]
    assert text["content"][0]["text"] == "I add."
    assert [p["token"] for p in text["content"][0]["logprobs"]] == ["I "]
    assert (add["name"], add["arguments"], add["status"]) == ("add", '{"a":1}', "completed")
    assert add["call_id"] != now["call_id"]
    assert whole["usage"]["total_tokens"] == 9
    assert (whole["store"], whole["temperature"], whole["tool_choice"]) == (False, 0, "auto")
    SdkResponse.model_validate(whole, strict=False)


def test_text_that_comes_with_the_end_of_a_call_stands_behind_it_and_before_the_next() -> None:
    """One piece may have all of them: text that could begin a stop string is held back, and then comes at once."""
    made = response({})
    made.of_token(RunToken(0, 1, "", None, (CallDelta(0, "add"), CallDelta(0, "", '{"a":'))))
    made.of_token(
        RunToken(1, 2, " Then: ", None, (CallDelta(0, "", "1}"), CallDelta(1, "now"), CallDelta(1, "", "{}")))
    )
    made.of_end(RunFinished("tool_calls", 5, 2))
    add, text, now = made.whole()["output"]
    assert (add["arguments"], text["content"][0]["text"], now["arguments"]) == ('{"a":1}', " Then: ", "{}")


def test_a_response_that_fails_has_what_came_of_it() -> None:
    made = response({})
    made.of_token(RunToken(0, 1, "I "))
    made.of_token(RunToken(1, 2, "add."))
    made.failed({"error": {"message": "no", "type": "server_error", "param": None, "code": None}})
    (item,) = made.whole()["output"]
    assert (item["status"], item["content"][0]["text"]) == ("in_progress", "I add.")


def test_a_token_costs_the_same_however_long_its_answer_is() -> None:
    """The test counts copies of earlier output by the size of the objects that a token makes."""
    made = response({})
    logprob = TokenLogprob("x", -0.5)
    for i in range(2000):
        made.of_token(RunToken(i, 1, "x" * 50, logprob))
    tracemalloc.start()
    try:
        made.of_token(RunToken(2000, 1, "x", logprob))
        assert tracemalloc.get_traced_memory()[1] < 20_000
    finally:
        tracemalloc.stop()


def test_an_answer_that_is_cut_off_is_incomplete_and_one_without_text_is_an_empty_message() -> None:
    cut = response({})
    cut.of_token(RunToken(0, 1, "I "))
    assert kinds(cut.of_end(RunFinished("length", 5, 1)))[-1] == "incomplete"
    assert cut.whole()["output"][0]["status"] == "incomplete"
    assert cut.whole()["incomplete_details"] == {"reason": "max_output_tokens"}
    empty = response({})
    empty.of_end(RunFinished("stop", 5, 1))
    assert empty.whole()["output"][0]["content"][0]["text"] == ""


def test_a_failure_is_the_last_event_of_a_stream() -> None:
    said = response({}).failed({"error": {"message": "no", "type": "server_error", "param": None, "code": None}})
    events = [json.loads(line.removeprefix("data: ")) for line in said.splitlines() if line.startswith("data: ")]
    assert kinds(events) == ["created", "in_progress", "failed"]
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "no"}


def test_openais_sdk_gets_a_response_whole_and_streamed(gateway: GatewayProcess) -> None:
    gateway.serve_llm()
    with openai.OpenAI(api_key=KEY, base_url=f"{gateway.url}/v1", max_retries=0) as client:
        asked: Any = {"model": "chat", "input": "hi", "max_output_tokens": 3, "instructions": "Be brief."}
        whole = client.responses.create(**asked)
        assert (whole.output_text, whole.status) == ("w0 w1 w2 ", "incomplete")
        assert gateway.invoker.runs[-1]["value"]["body"]["messages"][0] == {"role": "system", "content": "Be brief."}
        with client.responses.stream(**asked) as stream:
            events = list(stream)
        assert [e.delta for e in events if e.type == "response.output_text.delta"] == ["w0 ", "w1 ", "w2 "]
        assert events[-1].type == "response.incomplete"
        final = events[-1].response
        assert final.output_text == whole.output_text
        assert final.usage == whole.usage
        with pytest.raises(openai.BadRequestError) as kept:
            client.responses.create(model="chat", input="hi", previous_response_id="resp_1")
        assert kept.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="nope", input="hi")
    record = gateway.record(whole.id.removeprefix("resp_"))
    assert record["response"]["result"]["choices"][0]["message"]["content"] == "w0 w1 w2 "


def ask(gateway: GatewayProcess, stream: bool = False, headers: Any = None, **body: Any) -> Any:
    plain = {"model": "chat", "input": "hi", "stream": stream, **body}
    return gateway.call("POST", "/v1/responses", json=plain, stream=stream, headers=headers)


@pytest.mark.parametrize("stream", [True, False])
def test_what_the_container_refuses_has_the_names_of_a_response(gateway: GatewayProcess, stream: bool) -> None:
    gateway.serve_llm()
    gateway.invoker.failures.append(BadParameter("response_format", "this schema cannot be followed"))
    gateway.invoker.failures.append(BadRequest("too long", hint="context_length_exceeded"))
    reply, other = ask(gateway, stream=stream), ask(gateway, stream=stream)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "text.format")
    assert reply.json()["error"]["message"].startswith("text.format: ")
    of_the_whole_body = other.json()["error"]
    assert (of_the_whole_body["param"], of_the_whole_body["code"]) == (None, "context_length_exceeded")


def test_a_start_that_fails_while_a_stream_waits_is_a_failed_response(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    gateway.invoker.failures.append(StoreUnavailable("the store is gone"))
    with ask(gateway, stream=True) as reply:
        lines = reply.iter_lines()
        assert next(lines) == b": thaw queued"
        gateway.invoker.wait_for_demand()
        gateway.invoker.ready("guest/chat")
        events = list(events_of(lines))
    assert events[-1]["type"] == "response.failed"
    assert "the store is gone" in events[-1]["response"]["error"]["message"]


@pytest.mark.parametrize("name", ["Last-Event-ID", "X-Thaw-Resumable"])
def test_a_response_that_asks_to_be_gone_on_with_is_refused(shared_gateway: GatewayProcess, name: str) -> None:
    reply = ask(shared_gateway, stream=True, headers={name: "1"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)


def test_a_worker_lost_in_the_middle_of_a_response_costs_no_token_and_no_event(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    gateway.serve("chat", "chat")
    gateway.invoker.cut_after.append(2)
    with ask(gateway, stream=True, max_output_tokens=4) as reply:
        events = list(events_of(reply.iter_lines()))
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert [e["delta"] for e in events if "delta" in e] == ["w0 ", "w1 ", "w2 ", "w3 "]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "w0 w1 w2 w3 "
