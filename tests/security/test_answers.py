"""Every answer has a length that it may not exceed, no matter which program makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.gateway.conftest import KEY, GatewayProcess, add_key
from tests.gateway.fake_invoker import FakeInvoker

WAIT_S = 30.0


@pytest.fixture
def gateway(valkey_url: str) -> Iterator[GatewayProcess]:
    add_key(valkey_url, KEY, "guest")
    with ExitStack() as stack:
        process = GatewayProcess(valkey_url, THAW_LLM_RESULT_BYTES="4500")
        stack.callback(process.end)
        invoker = FakeInvoker(valkey_url)
        stack.callback(invoker.stop)
        process.put_llm()
        invoker.ready("guest/chat")
        process.wait_for_routes()
        yield process


@pytest.mark.parametrize("headers", [{}, {"X-Thaw-Resumable": "1"}], ids=["plain", "resumable"])
def test_a_stream_that_never_ends_is_cut(gateway: GatewayProcess, headers: dict[str, str]) -> None:
    body = {"model": "chat", "prompt": "hi", "stream": True, "max_tokens": 1_000_000}
    reply = gateway.call("POST", "/v1/completions", json=body, headers=headers)
    assert "exceeded the allowed length: 23 tokens take more than 4500 bytes." in reply.text
    assert reply.text.count('"finish_reason": null') == 22
    assert gateway.record(reply.headers["X-Openwhisk-Activation-Id"])["response"]["statusCode"] == 2


def test_a_whole_answer_has_a_limit(gateway: GatewayProcess) -> None:
    ask: Callable[[int], int] = lambda n: gateway.chat(max_tokens=n).status_code  # noqa: E731
    assert (ask(22), ask(23), ask(1_000_000)) == (200, 502, 502)
    assert gateway.chat(max_tokens=1_000_000).json()["error"]["code"] == "DeveloperError"
    reply = gateway.call(
        "POST", "/api/v1/namespaces/_/actions/chat?blocking=true", json={"prompt": "hi", "max_tokens": 1_000_000}
    )
    assert reply.status_code == 502
