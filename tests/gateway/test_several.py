"""Several choices of one request: each is an activation, and the answer puts them together."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from gateway.serving.answers.merging import Merging
from gateway.serving.answers.several import merged, several
from gateway.serving.hangup import Hangup
from relay.protocol.messages import RankedToken, RunPrompt
from tests.gateway.calls import CHAT, action_of, call_of
from tests.gateway.conftest import GatewayProcess, Start, events_of
from thaw.action import KIND_LLM, Limits
from thaw.errors import MemoryTooSmall, TimeLimitExceeded, Unavailable


def complete(gateway: GatewayProcess, **body: Any) -> requests.Response:
    plain = {"model": "chat", "prompt": "Once", "max_tokens": 2, **body}
    return gateway.call("POST", "/v1/completions", json=plain, stream=bool(body.get("stream")))


def test_each_choice_has_a_seed_of_its_own_and_an_activation(gateway: GatewayProcess) -> None:
    gateway.serve_llm()
    reply = gateway.chat(n=3, seed=2**63 - 1, max_tokens=2)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [(i, "w0 w1 ") for i in range(3)]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert {r["value"]["seed"] for r in gateway.invoker.runs} == {2**63 - 1, -(2**63), -(2**63) + 1}
    assert not any({"n", "best_of"} & r["value"]["body"].keys() for r in gateway.invoker.runs)
    ids = {r["activation_id"] for r in gateway.invoker.runs}
    assert len(ids) == 3
    assert reply.headers["X-Openwhisk-Activation-Id"] in ids
    for activation_id in ids:
        assert gateway.record(activation_id)["response"]["success"]


def test_a_list_of_prompts_is_answered_in_its_order(gateway: GatewayProcess) -> None:
    gateway.serve_llm()
    body = complete(gateway, prompt=["a", [1, 2]], n=2, logprobs=1).json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert all(c["logprobs"]["tokens"] == ["w0 ", "w1 "] for c in body["choices"])
    assert sorted(str(r["value"]["body"]["prompt"]) for r in gateway.invoker.runs) == ["[1, 2]", "[1, 2]", "a", "a"]
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14}


def test_the_choices_of_a_stream_come_beside_one_another(gateway: GatewayProcess) -> None:
    gateway.serve_llm()
    with complete(gateway, stream=True, n=2, stream_options={"include_usage": True}) as reply:
        lines = [line for line in reply.iter_lines() if line.startswith(b"data: ")]
    found = list(events_of(lines))
    assert lines[-1] == b"data: [DONE]"
    texts = {0: "", 1: ""}
    for event in found[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "w0 w1 ", 1: "w0 w1 "}
    assert found[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert len({event["id"] for event in found}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_when_one_choice_fails_the_answer_does(gateway: GatewayProcess, stream: bool) -> None:
    gateway.serve_llm()
    gateway.invoker.failures.append(MemoryTooSmall("too small"))
    reply = complete(gateway, n=2, stream=stream)
    if reply.status_code == 200:  # the other choice was quicker
        assert b'"code": "MemoryTooSmall"' in reply.content
    else:
        assert (reply.status_code, reply.json()["error"]["code"]) == (502, "MemoryTooSmall")


def test_the_choices_of_a_request_share_the_memory_for_the_logprobs_of_its_prompts(start_gateway: Start) -> None:
    """The logprobs of one prompt would fit, but those of sixty-four prompts would fill the gateway."""
    gateway = start_gateway(THAW_LLM_RESULT_BYTES="60000")
    gateway.serve_llm()
    gateway.invoker.prompt = RunPrompt((1, 2), ranked=(tuple(RankedToken(i, "x", -0.5, i) for i in range(100)),))
    one = complete(gateway, prompt_logprobs=20)
    assert len(one.json()["choices"][0]["prompt_logprobs"][1]) == 100
    two = complete(gateway, prompt_logprobs=20, prompt=["a", "b"])
    assert two.status_code == 502, two.text[:200]
    assert "the logprobs of the prompts take more than 60000 bytes" in two.json()["error"]["message"]
    assert complete(gateway, prompt_logprobs=20).status_code == 200, "the count is one request's"


def test_an_activation_that_is_invoked_has_one_answer(gateway: GatewayProcess) -> None:
    gateway.serve_llm()
    reply = gateway.invoke("chat", prompt="a", n=2)
    assert (reply.status_code, "one answer" in reply.json()["error"]) == (400, True)


def answer(*logprobs: float, text: str = "") -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": {"token_logprobs": list(logprobs)}}
    return {"id": "x", "choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": len(logprobs)}}


def test_the_best_are_those_with_the_highest_mean_logprob() -> None:
    asked = {"prompt": "a", "best_of": 3, "n": 2}
    made = several(asked)
    assert [b["logprobs"] for b in made.bodies] == [0, 0, 0]
    found = merged(asked, made, [answer(-3, -3, text="c"), answer(-1, text="a"), answer(-2, -2, -2, text="b")])
    assert [(c["index"], c["text"], c["logprobs"]) for c in found["choices"]] == [(0, "a", None), (1, "b", None)]
    assert found["usage"] == {"prompt_tokens": 1, "completion_tokens": 6, "total_tokens": 7}


def test_the_best_are_chosen_by_their_own_tokens_behind_an_echoed_prompt() -> None:
    asked = {"prompt": "a", "best_of": 2, "echo": True}
    answers = [answer(-2, text="b"), answer(-1, text="a")]
    for one in answers:
        one["choices"][0]["logprobs"]["token_logprobs"][:0] = [None, -9.0]
    assert [c["text"] for c in merged(asked, several(asked), answers)["choices"]] == ["a"]


@pytest.mark.parametrize(("logprobs", "kept"), [(0, True), (None, False), (False, False)])
def test_logprobs_without_alternatives_are_logprobs(logprobs: Any, kept: bool) -> None:
    asked = {"prompt": "a", "n": 2, "logprobs": logprobs}
    found = merged(asked, several(asked), [answer(-1), answer(-2)])["choices"]
    assert [c["logprobs"] is not None for c in found] == [kept, kept]


def test_a_stream_ends_when_a_part_never_runs() -> None:
    """A gateway that ends cancels the parts that wait for a thread."""
    call = call_of(action=action_of(CHAT, KIND_LLM), body={"model": "chat"}, endpoint="chat")
    busy, hold = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as choices:
        choices.submit(lambda: (busy.set(), hold.wait(60)))
        assert busy.wait(60)
        texts = Merging(choices, [call], Hangup(), lambda _: iter(())).texts(1)
        choices.shutdown(wait=False, cancel_futures=True)
        with pytest.raises(Unavailable):
            next(texts)
        late = replace(call, action=replace(call.action, limits=Limits(timeout=-60_000)))
        all_busy: Any = SimpleNamespace(submit=lambda *_: Future[None]())
        with pytest.raises(TimeLimitExceeded):
            next(Merging(all_busy, [late], Hangup(), lambda _: iter(())).texts(1))
        hold.set()
