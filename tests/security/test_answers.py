"""Every answer has a length that it may not exceed, no matter which program makes it."""

from __future__ import annotations

import pytest

from tests.gateway.conftest import GatewayProcess
from tests.gateway.fake_invoker import FakeInvoker
from tests.security.slow import ACTIONS, Start


@pytest.fixture
def gateway(start: Start, invoker: FakeInvoker) -> GatewayProcess:
    gateway = start(THAW_LLM_RESULT_BYTES="4500")
    gateway.put_llm()
    invoker.ready("guest/chat")
    gateway.wait_for_routes()
    return gateway


@pytest.mark.parametrize("headers", [{}, {"X-Thaw-Resumable": "1"}], ids=["plain", "resumable"])
def test_a_stream_that_never_ends_is_cut(gateway: GatewayProcess, headers: dict[str, str]) -> None:
    body = {"model": "chat", "prompt": "hi", "stream": True, "max_tokens": 1_000_000}
    reply = gateway.call("POST", "/v1/completions", json=body, headers=headers)
    assert "exceeded the allowed length: 23 tokens take more than 4500 bytes." in reply.text
    assert reply.text.count('"finish_reason": null') == 22
    assert gateway.record(reply.headers["X-Openwhisk-Activation-Id"])["response"]["statusCode"] == 2


def test_a_whole_answer_has_a_limit(gateway: GatewayProcess) -> None:
    assert [gateway.chat(max_tokens=n).status_code for n in (22, 23, 1_000_000)] == [200, 502, 502]
    assert gateway.chat(max_tokens=1_000_000).json()["error"]["code"] == "DeveloperError"
    body = {"prompt": "hi", "max_tokens": 1_000_000}
    assert gateway.call("POST", f"{ACTIONS}/chat?blocking=true", json=body).status_code == 502
