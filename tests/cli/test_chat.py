"""``thaw chat``: server-sent events become text as they come."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Run
from tests.cli.fake_gateway import FakeGateway
from thaw.cli.answers import events
from thaw.errors import Unavailable

CHAT = "POST /v1/chat/completions"


def _sse(*texts: str) -> bytes:
    chunks = [{"choices": [{"delta": {"content": t}, "finish_reason": None}]} for t in texts]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    chunks.append({"choices": [], "usage": {"completion_tokens": len(texts)}})
    return b"".join(b"data: " + json.dumps(c).encode() + b"\n\n" for c in chunks) + b"data: [DONE]\n\n"


def test_a_message_streams_its_answer_and_says_how_long_it_took(at: Run, gateway: FakeGateway) -> None:
    gateway.answers[CHAT] = (200, _sse("The capital", " is", " Paris."))
    done = at("chat", "chat", "--message", "What?", "--temperature", "0", "--max-tokens", "9")
    assert done.stdout == "The capital is Paris.\n"
    assert "3 tokens" in done.stderr
    assert f"thaw activation explain {'a' * 32}" in done.stderr
    body = gateway.asked[0].body
    assert body["messages"] == [{"role": "user", "content": "What?"}]
    assert (body["model"], body["stream"], body["temperature"], body["max_tokens"]) == ("chat", True, 0, 9)


def test_a_conversation_carries_what_was_said_before(at: Run, gateway: FakeGateway) -> None:
    gateway.answers[CHAT] = (200, _sse("yes"))
    done = at("chat", "chat", stdin="one\n\ntwo\n/bye\nnever\n")
    assert done.stdout == "yes\nyes\n"
    assert [m["content"] for m in gateway.asked[1].body["messages"]] == ["one", "yes", "two"]
    assert len(gateway.asked) == 2


def test_an_error_inside_the_stream_ends_with_its_message(at: Run, gateway: FakeGateway) -> None:
    failed = b'data: {"error": {"message": "the model is truncated", "type": "x"}}\n\ndata: [DONE]\n\n'
    gateway.answers[CHAT] = (200, failed)
    done = at("chat", "chat", "--message", "hi")
    assert done.stderr.startswith("error: the model is truncated\n")
    assert done.returncode == 246


def test_an_unknown_model_is_an_error_in_openai_s_form(at: Run, gateway: FakeGateway) -> None:
    gateway.answers[CHAT] = (404, {"error": {"message": "The model 'x' does not exist", "code": "model_not_found"}})
    done = at("chat", "x", "--message", "hi")
    assert done.stderr.startswith("error: The model 'x' does not exist\n")
    assert done.returncode == 148


def test_a_stream_without_its_end_is_not_taken_for_an_answer() -> None:
    with pytest.raises(Unavailable, match="broke off"):
        list(events([b'data: {"choices": []}', b""]))


def test_comments_and_other_fields_of_a_stream_are_skipped() -> None:
    assert list(events([b": waiting", b"event: x", b'data: {"a": 1}', b"", b"data: [DONE]"])) == [{"a": 1}]
