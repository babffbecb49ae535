"""``thaw chat`` prints the text of server-sent events as they arrive."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.cli.conftest import Run
from tests.cli.fake_gateway import FakeGateway
from thaw.cli.platform_api.answers import events
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


NO_BUCKET = {"error": {"message": "no such bucket", "code": "ModelNotFound", "hint": "check the model's uri"}}
FAILURES = {
    "in the stream": (
        (200, b'data: {"error": {"message": "the model is truncated", "type": "x"}}\n\ndata: [DONE]\n\n'),
        246,
        "error: the model is truncated\n",
    ),
    "an unknown model": (
        (404, {"error": {"message": "The model 'x' does not exist", "code": "model_not_found"}}),
        148,
        "error: The model 'x' does not exist\n",
    ),
    "a failed start": ((502, NO_BUCKET), 246, "error: no such bucket\nhint: check the model's uri\n"),
    "a failed start in the stream": (
        (200, b"data: " + json.dumps(NO_BUCKET).encode() + b"\n\n"),
        246,
        "error: no such bucket\nhint: check the model's uri\n",
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_an_error_has_its_message_and_says_what_to_do_about_it(at: Run, gateway: FakeGateway, failure: str) -> None:
    gateway.answers[CHAT], status, said = FAILURES[failure]
    done = at("chat", "x", "--message", "hi")
    assert (done.returncode, done.stderr[: len(said)]) == (status, said)


def test_the_hosts_that_are_there_are_listed(at: Run, gateway: FakeGateway) -> None:
    device = {"name": "cpu", "kind": "cpu", "memory_bytes": 8 << 30, "free_bytes": 6 << 30}
    report = {"boot_id": "b", "address": "a:1", "devices": [device], "n_cores": 2, "network_bytes_per_s": 0.0}
    report |= {"share": "none", "driver": "process", "started_wall_ms": 0, "seen_wall_ms": 0}
    hosts = [{**report, "host_id": "here", "live": True}, {**report, "host_id": "lost", "live": False}]
    gateway.answers["GET /api/v1/thaw/hosts"] = (200, {"hosts": hosts, "now_wall_ms": 1})
    listed = at("host", "list").stdout
    assert "here" in listed
    assert "lost" not in listed


@pytest.fixture
def drains(gateway: FakeGateway) -> Callable[..., None]:
    """Answer the questions about a drain one after the other."""

    def answer(*left: dict[str, object]) -> None:
        path = "/api/v1/thaw/hosts/host-1/drain"
        gateway.answers[f"PUT {path}"] = gateway.answers[f"DELETE {path}"] = (200, {})
        gateway.answers[f"GET {path}"] = [(200, {"draining": True, **each}) for each in left]

    return answer


def test_a_host_is_drained_by_its_name_and_taken_back(
    at: Run, gateway: FakeGateway, drains: Callable[..., None]
) -> None:
    begun = {"moving": 3, "running": 1, "instances": 2}
    drains(begun | {"moving": 0}, begun)
    first, second = at("host", "drain", "host-1").stdout.splitlines()
    assert first == "host-1 is draining; thaw host undrain host-1 takes it back"
    assert second == "host-1: 3 requests are moving, 1 function runs, 2 instances are left"
    assert [json.loads(a.query["known"])["moving"] for a in gateway.asked if "known" in a.query] == [0]
    assert at("host", "undrain", "host-1").stdout == "host-1 takes starts\n"


def test_a_drain_may_be_waited_for_and_says_each_change_once(at: Run, drains: Callable[..., None]) -> None:
    left = {"moving": 1, "running": 2, "instances": 1}
    drains(left, left, left | {"moving": 0}, {})
    assert at("host", "drain", "host-1", "--wait").stdout.splitlines()[1:] == [
        "host-1: 1 request is moving, 2 functions run, 1 instance is left",
        "host-1: 2 functions run, 1 instance is left",
        "host-1 is empty",
    ]


def test_whoever_waits_for_a_drain_is_told_when_it_is_withdrawn(at: Run, drains: Callable[..., None]) -> None:
    drains({"moving": 1, "instances": 1}, {"moving": 1, "instances": 1, "draining": False})
    done = at("host", "drain", "host-1", "--wait")
    assert done.returncode != 0
    assert "host-1 is not draining any more" in done.stderr


def test_a_stream_without_its_end_is_not_taken_for_an_answer() -> None:
    with pytest.raises(Unavailable, match="broke before the answer ended"):
        list(events([b'data: {"choices": []}', b""]))


def test_comments_and_other_fields_of_a_stream_are_skipped() -> None:
    assert list(events([b": waiting", b"event: x", b'data: {"a": 1}', b"", b"data: [DONE]"])) == [{"a": 1}]
