"""From nothing to an answer with the real model, through every process."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI

from relay.state import redis_link
from relay.state.registry import Registry
from tests.api_examples import Shell, examples
from tests.e2e.machine import Machine, events, text_of
from tests.embedding_models import write_model
from thaw.dev.known_answers import FRANCE, OF_FRANCE
from thaw.dev.layout import Layout
from thaw.host import Device, HostReport
from thaw.ids import HostId

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.begins("platform")
def test_a_model_that_was_not_there_answers_and_its_trace_explains_the_start(platform: Machine) -> None:
    response = platform.chat("chat", FRANCE.prompt, stream=True, temperature=0)
    assert response.status_code == 200, response.text
    assert text_of(response) == FRANCE.text
    activation_id = response.headers["X-Openwhisk-Activation-Id"]

    record = platform.request("GET", f"/api/v1/namespaces/_/activations/{activation_id}").json()
    annotations = {a["key"]: a["value"] for a in record["annotations"]}
    assert record["response"]["success"]
    assert annotations["initTime"] > 0
    assert annotations["waitTime"] > 0

    explained = platform.thaw("activation", "explain", activation_id).stdout
    for phase in ("fetch", "container", "load", "first token", "bound", "longest gap"):
        assert phase in explained.lower(), explained

    trace = platform.request("GET", f"/api/v1/namespaces/_/activations/{activation_id}/trace").json()
    by_name = {e["name"]: e for e in trace["events"]}
    for name in (
        "received",
        "queued.begin",
        "planned.end",
        "fetch.first_byte",
        "fetch.end",
        "container.end",
        "load.end",
        "engine.end",
        "ready",
        "dispatched",
        "first_token",
        "finished",
    ):
        assert name in by_name, sorted(by_name)
    assert by_name["fetch.end"]["n_bytes"] == trace["plan"]["model"]["n_bytes"]


def test_a_warm_request_has_no_init_time(platform: Machine) -> None:
    platform.chat("chat", FRANCE.prompt)
    response = platform.chat("chat", "Name a colour.", temperature=0)
    record = platform.request(
        "GET", f"/api/v1/namespaces/_/activations/{response.headers['X-Openwhisk-Activation-Id']}"
    ).json()
    assert "initTime" not in {a["key"] for a in record["annotations"]}


def test_a_stream_has_the_text_and_the_usage_of_the_whole_answer(platform: Machine) -> None:
    whole = platform.chat("chat", FRANCE.prompt, temperature=0).json()
    streamed = platform.chat("chat", FRANCE.prompt, temperature=0, stream=True, stream_options={"include_usage": True})
    chunks = events(streamed)
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"] == whole["usage"]


def test_the_openai_sdk_streams_chats_completes_and_lists(platform: Machine) -> None:
    client = OpenAI(base_url=platform.url + "/v1", api_key=":".join(platform.auth()), max_retries=0)
    assert "smollm2" in [m.id for m in client.models.list()]
    stream = client.chat.completions.create(
        model="chat", messages=FRANCE.messages, stream=True, max_tokens=16, temperature=0
    )
    assert "".join(c.choices[0].delta.content or "" for c in stream) == FRANCE.text
    done = client.completions.create(model="chat", prompt=OF_FRANCE.prompt, max_tokens=2, temperature=0)
    assert done.choices[0].text == OF_FRANCE.text
    client.close()


def test_seeded_sampling_repeats(platform: Machine) -> None:
    first, second = (
        platform.chat("chat", "Tell me a story.", temperature=1.0, seed=7).json()["choices"][0]["message"]["content"]
        for _ in range(2)
    )
    assert first == second
    assert first.strip()


def test_many_requests_at_once_are_all_answered(platform: Machine) -> None:
    def ask(n: int) -> str:
        content: str = platform.chat("chat", f"What is {n} plus {n}?", max_tokens=8).json()["choices"][0]["message"][
            "content"
        ]
        return content

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(16)))


def test_a_python_action_answers_blocking_result_and_202(platform: Machine) -> None:
    path = "/api/v1/namespaces/_/actions/hello"
    assert platform.request("POST", path + "?blocking=true&result=true", json={"name": "Ada"}).json() == {
        "greeting": "Hello, Ada!"
    }
    accepted = platform.request("POST", path, json={"name": "Ida"})
    assert accepted.status_code == 202
    record = platform.thaw("activation", "get", accepted.json()["activationId"], "--wait", "60").stdout
    assert "Hello, Ida!" in record


def test_the_llm_answers_as_an_action_too(platform: Machine) -> None:
    body = {"prompt": OF_FRANCE.prompt, "max_tokens": 2, "temperature": 0}
    response = platform.request("POST", "/api/v1/namespaces/_/actions/chat?blocking=true&result=true", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == OF_FRANCE.text


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"n": 0}, 400, "n"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"max_tokens": 100_000}, 400, "max"),
        ({"messages": "hello"}, 400, "messages"),
        ({"model": "nobody"}, 404, "nobody"),
    ],
)
def test_a_bad_request_is_refused_with_its_reason_and_the_next_is_answered(
    platform: Machine, body: dict[str, object], status: int, message: str
) -> None:
    response = platform.chat("chat", FRANCE.prompt, **body)
    assert response.status_code == status, response.text
    assert message in response.json()["error"]["message"]
    assert platform.chat("chat", FRANCE.prompt, max_tokens=2).status_code == 200


def test_a_prompt_longer_than_the_context_says_so(platform: Machine) -> None:
    response = platform.chat("chat", "word " * 6000)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_stranger_gets_401_and_nothing_else(platform: Machine) -> None:
    import requests

    for path in ("/api/v1/namespaces", "/v1/models", "/api/v1/namespaces/_/actions/chat", "/api/v1/thaw/hosts"):
        assert requests.get(platform.url + path, auth=("a", "b"), timeout=10).status_code == 401
        assert requests.get(platform.url + path, timeout=10).status_code == 401


def test_explain_of_the_last_activation_prints_a_timeline_with_bytes(platform: Machine) -> None:
    platform.chat("chat", FRANCE.prompt, max_tokens=2)
    assert re.search(r"first token", platform.thaw("activation", "explain", "--last").stdout, re.I)


def _deploy_embeddings(platform: Machine, directory: Path) -> None:
    config = {"kind": "llm:vllm", "model": {"uri": "s3://models/embed"}, "resources": {"gpu_memory_mb": 256}}
    (directory / "embed.json").write_text(json.dumps({**config, "scaling": {"keep_alive_s": 0}}))
    platform.thaw("model", "push", str(write_model(directory / "bert", "bert")), "s3://models/embed")
    platform.thaw("action", "create", "embed", "--config", str(directory / "embed.json"))


def test_each_example_of_the_api_s_page_is_answered_as_it_says(platform: Machine, tmp_path: Path) -> None:
    """The host that is drained has no memory to start anything, so no other test notices."""
    known, spare = Layout(platform.state_dir).read_platform(), HostId("spare")
    assert known is not None
    report = HostReport(spare, "boot", "127.0.0.1:9", (Device("cpu", "cpu", 0, 0),), 1, 1.0, "none", "process", 0, 0)
    with redis_link.connect(known.state_url) as client:
        registry = Registry(client)
        registry.report_host(report)
        _deploy_embeddings(platform, tmp_path)
        shell = Shell(tmp_path, API=platform.url, KEY=":".join(platform.auth()), HOST=spare)
        try:
            for example in examples():
                assert shell.status(example, platform.env) == example.status, (
                    f"{example.command}\n{shell.body.read_text(errors='replace')[:2000]}"
                )
        finally:
            registry.drain_host(spare, drain=False)
            registry.forget_host(spare)
