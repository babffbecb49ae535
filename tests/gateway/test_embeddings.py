"""/v1/embeddings with a real gateway: valid requests, answers, and the vectors of a lost worker."""

from __future__ import annotations

import base64
import json
import struct
import threading
from dataclasses import replace
from typing import Any

import openai
import pytest
import requests

from gateway.api.bad_field import BadField
from gateway.api.embeddings_body import MOST_INPUTS, check_embeddings
from tests.gateway.conftest import KEY, LLM_CONFIG, GatewayProcess, Start, pairs
from tests.gateway.test_hangup import raw_post
from tests.scheduler.world import report
from thaw.errors import BadParameter


def embed(gateway: GatewayProcess, given: Any, **more: Any) -> requests.Response:
    return gateway.call("POST", "/v1/embeddings", json={"model": "chat", "input": given, **more})


def whole(model: str, *vectors: object) -> dict[str, Any]:
    usage = {"prompt_tokens": 3 * len(vectors), "total_tokens": 3 * len(vectors)}
    data = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(vectors)]
    return {"object": "list", "data": data, "model": model, "usage": usage}


@pytest.mark.parametrize("given", ["a", ["a"], ["a", "b"], [1, 2], [[1], [2, 3]], ["a", [1]]])
def test_every_form_of_input_is_taken(given: Any) -> None:
    check_embeddings({"model": "m", "input": given, "encoding_format": "base64", "dimensions": 8, "user": "u"})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", []]}, "input[1]"),
        ({"input": [1, "a"]}, "input[0]"),
        ({"input": [[1], [True]]}, "input[1]"),
        ({"input": [["a"]]}, "input[0]"),
        ({"input": ["a"] * (MOST_INPUTS + 1)}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": True}, "dimensions"),
        ({"input": "a", "user": 1}, "user"),
        ({"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"input": "a", "model": 3}, "model"),
    ],
)
def test_what_is_wrong_or_unknown_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadField) as refused:
        check_embeddings({"model": "m", **body})
    assert refused.value.param == param


def test_vectors_come_in_the_order_of_the_texts_in_both_encodings(gateway: GatewayProcess) -> None:
    gateway.serve_llm()
    reply = embed(gateway, ["a", "b", "c"])
    assert reply.headers["X-Thaw-Start"] == "warm"
    assert reply.json() == whole("chat", *([float(i), 1.0] for i in range(3)))
    coded = embed(gateway, ["a", "b"], encoding_format="base64").json()["data"]
    assert [struct.unpack("<2f", base64.b64decode(one["embedding"])) for one in coded] == [(0.0, 1.0), (1.0, 1.0)]
    kept = {"object": "list", "n_embeddings": 3, "model": "chat", "usage": {"prompt_tokens": 9, "total_tokens": 9}}
    assert gateway.record(reply)["response"]["result"] == kept


def test_the_openai_sdk_reads_embeddings(gateway: GatewayProcess) -> None:
    gateway.serve_llm()
    with openai.OpenAI(api_key=KEY, base_url=f"{gateway.url}/v1", max_retries=0) as client:
        found = client.embeddings.create(model="chat", input=["a", "b"])  # it asks for base64
        assert [one.embedding for one in found.data] == [[0.0, 1.0], [1.0, 1.0]]
        assert found.usage.total_tokens == 6
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="other", input="a")


def test_no_answer_mixes_the_vectors_of_two_workers(gateway: GatewayProcess) -> None:
    """The second one may have another version of the model."""
    gateway.put_llm()
    gateway.invoker.ready("guest/chat", instance="i0", model_version="v1")
    gateway.invoker.cut_after.append(2)
    reply = gateway.soon(embed, gateway, ["a", "b", "c"])
    gateway.invoker.wait_for_demand()
    gateway.invoker.version = 2.0
    gateway.invoker.ready("guest/chat", instance="i1", model_version="v2")
    data = reply.result().json()["data"]
    assert [one["embedding"] for one in data] == [[0.0, 2.0], [1.0, 2.0], [2.0, 2.0]]
    assert [run["value"]["resume"] for run in gateway.invoker.runs] == [None, None]
    record = gateway.record(reply.result().headers["X-Openwhisk-Activation-Id"])
    assert {a["key"]: a["value"] for a in record["annotations"]}["modelVersion"] == "v2"


def test_a_request_waits_for_a_start_and_one_that_is_left_ends_its_run(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    reply = gateway.soon(embed, gateway, "a")
    gateway.invoker.wait_for_demand()
    gateway.invoker.ready("guest/chat")
    assert reply.result().headers["X-Thaw-Start"].startswith("cold; ttft=")
    assert gateway.invoker.entered.acquire(timeout=60)
    gateway.invoker.pace = threading.Semaphore(0)
    leaves = raw_post(gateway, "/v1/embeddings", {"model": "chat", "input": "a"})
    assert gateway.invoker.entered.acquire(timeout=60)
    leaves.close()
    assert gateway.invoker.closed.acquire(timeout=60)


def test_an_error_of_the_model_names_the_parameter(gateway: GatewayProcess) -> None:
    gateway.serve_llm()
    gateway.invoker.failures.append(BadParameter("dimensions", "leave it out"))
    reply = embed(gateway, "a", dimensions=3)
    assert reply.status_code == 400
    assert json.loads(reply.text)["error"]["message"] == "dimensions: leave it out"
    assert embed(gateway, "a", stop="x").json()["error"]["param"] == "stop"


# ── invoked as an action ──────────────────────────────────────────────────────────────────────────────────────────

ACTION = "/api/v1/namespaces/_/actions/chat"


def test_an_invocation_is_answered_with_the_vectors_as_a_chat_is_with_its_text(gateway: GatewayProcess) -> None:
    gateway.serve_llm()
    reply = gateway.call("POST", f"{ACTION}?blocking=true&result=true", json={"input": ["a", "b"]})
    assert (reply.status_code, reply.json()) == (200, whole("chat", [0.0, 1.0], [1.0, 1.0]))
    run = gateway.invoker.runs[0]["value"]
    assert (run["endpoint"], run["body"]["input"]) == ("embeddings", ["a", "b"])
    coded = {"input": "a", "encoding_format": "base64", "model": "mine"}
    vector = base64.b64encode(struct.pack("<2f", 0.0, 1.0)).decode()
    record = gateway.call("POST", f"{ACTION}?blocking=true", json=coded).json()
    assert record["response"]["result"] == whole("mine", vector)
    assert gateway.record(record["activationId"])["response"]["result"] == whole("mine", vector)


def test_the_record_of_an_accepted_invocation_has_the_vectors(gateway: GatewayProcess) -> None:
    """Nobody else has them."""
    gateway.serve_llm()
    reply = gateway.call("POST", ACTION, json={"input": "a"})
    assert reply.status_code == 202
    activation_id = reply.json()["activationId"]
    gateway.record(activation_id)
    assert gateway.read(f"activations/{activation_id}/result")["result"] == whole("chat", [0.0, 1.0])


def test_an_invocation_s_vectors_are_no_longer_than_a_result_may_be(start_gateway: Start) -> None:
    """/v1/embeddings has no such limit, because no record has its vectors."""
    gateway = start_gateway(THAW_RESULT_BYTES="560")
    gateway.serve_llm()
    longest, longer = (gateway.invoke("chat", "blocking=true&result=true", input=["a"] * n) for n in (8, 9))
    assert (longest.status_code, len(longest.json()["data"])) == (200, 8), longest.text
    error = "The action produced a response that exceeded the allowed length: its vectors take more than 560 bytes."
    hint = "send fewer texts at once, or use /v1/embeddings"
    assert (longer.status_code, longer.json()) == (502, {"error": error, "hint": hint})
    assert embed(gateway, ["a"] * 9).status_code == 200


def test_an_invocation_s_arguments_are_checked_as_those_of_a_request(shared_gateway: GatewayProcess) -> None:
    for body, says in (({"input": []}, "input must not be an empty list."), ({"input": "a", "stop": "b"}, "stop")):
        reply = shared_gateway.invoke("chat", **body)
        assert (reply.status_code, says in reply.json()["error"]) == (400, True), reply.text


# ── a request of the other kind ───────────────────────────────────────────────────────────────────────────────────

NO_TEXT = "model: this model computes embeddings and generates no text: use /v1/embeddings. "
NO_VECTORS = "model: this model generates text and computes no embeddings: use /v1/chat/completions. "
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
FOUND = {"uri": "s3://models/m@1", "model_version": "1", "engine": "toy 1.0", "max_model_len": 512}


def deploy(gateway: GatewayProcess, **found: Any) -> None:
    """Deploy the function, whose check ends with what is ``found``."""
    gateway.invoker.registry.report_host(replace(report("h0"), address=gateway.invoker.address))
    gateway.invoker.preflight = lambda: (200, {**FOUND, **found})
    gateway.put("actions/chat?overwrite=true", config=LLM_CONFIG)


OF_TEXT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/chat/completions", {**CHAT, "n": 2}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/responses", {"input": "a"}),
    (ACTION, CHAT),
    (f"{ACTION}?blocking=true", {"prompt": "a"}),
]
OF_VECTORS = [("/v1/embeddings", {"input": "a"}), (f"{ACTION}?blocking=true", {"input": "a"})]


def test_a_request_of_the_other_kind_is_refused_and_starts_nothing(gateway: GatewayProcess) -> None:
    for embeds, refused, message in ((True, OF_TEXT, NO_TEXT), (False, OF_VECTORS, NO_VECTORS)):
        deploy(gateway, embeds=embeds)
        for path, body in refused:
            reply = gateway.call("POST", path, json={"model": "chat", **body})
            said = reply.json()["error"]
            text, param = (said["message"], said["param"]) if path.startswith("/v1") else (said, "model")
            assert (reply.status_code, param, text.startswith(message)) == (400, "model", True), reply.text
            assert "update the function" in text
    assert gateway.invoker.registry.demand() == []


@pytest.mark.parametrize("found", [{}, {"unchecked": "no cell now", "engine": ""}])
def test_what_no_deploy_found_out_is_left_to_the_container(gateway: GatewayProcess, found: dict[str, Any]) -> None:
    """Nothing is known of a model that was deployed anyway, nor from a host that does not say."""
    deploy(gateway, **found)
    gateway.invoker.ready("guest/chat")
    assert embed(gateway, "a").status_code == 200
    assert gateway.chat().status_code == 200


def test_what_a_model_does_is_kept_with_the_function_until_its_model_changes(gateway: GatewayProcess) -> None:
    deploy(gateway, embeds=False)
    gateway.put("actions/chat?overwrite=true", annotations=pairs(a=1))
    assert embed(gateway, "a").status_code == 400
    deploy(gateway, embeds=True)
    gateway.invoker.ready("guest/chat", version="0.0.3")
    assert embed(gateway, "a").status_code == 200
    assert gateway.chat().status_code == 400
    deploy(gateway)
    gateway.invoker.ready("guest/chat", instance="i1", version="0.0.4")
    assert gateway.chat().status_code == 200


def test_tokens_are_counted_by_models_of_both_kinds(gateway: GatewayProcess) -> None:
    for i, embeds in enumerate((True, False)):
        deploy(gateway, embeds=embeds)
        gateway.invoker.ready("guest/chat", instance=f"i{i}", version=f"0.0.{i + 1}")
        assert gateway.call("POST", "/tokenize", json={"model": "chat", "prompt": "a"}).status_code == 200
