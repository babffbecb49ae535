"""The events of a stream: a client gets the same events with and without an interruption."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.serving.answers.event_ids import EventId
from gateway.serving.answers.openai_format import Chunks
from relay.protocol.messages import RunFinished, RunToken, TokenLogprob
from tests.gateway.calls import CHAT, action_of, call_of
from thaw.action import KIND_LLM
from thaw.ids import ActivationId

ACTION = action_of(CHAT, KIND_LLM)
TEXTS = ("Hé", "", "llo", " wor", "", "ld")
"""Some tokens end in the middle of a character, so they have no text."""


def events(
    endpoint: str, body: dict[str, Any], end: RunFinished, *, logprobs: bool, had: EventId | None = None
) -> list[str]:
    chunks = Chunks(call_of(action=ACTION, body=body, endpoint=endpoint, received_ms=0), "ids", had)
    text = ""
    for index, shown in enumerate(TEXTS):
        logprob = TokenLogprob(shown, -0.5, ((shown, -0.5),)) if logprobs else None
        text += chunks.token(RunToken(index, 100 + index, shown, logprob))
    text += chunks.finished(end)
    return [event + "\n\n" for event in text.split("\n\n")[:-1]]


def id_of(event: str) -> EventId:
    index, _, checksum = event.splitlines()[0].removeprefix("id: ids:").partition(".")
    return EventId(ActivationId("a" * 32), 0, b"", int(index), int(checksum, 16))


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("held_back", ["", "!"])
@pytest.mark.parametrize("usage", [True, False])
def test_after_any_event_the_same_events_follow(endpoint: str, logprobs: bool, held_back: str, usage: bool) -> None:
    body = {"model": "chat", "stream_options": {"include_usage": usage}}
    end = RunFinished("stop", 3, len(TEXTS), held_back)
    whole = events(endpoint, body, end, logprobs=logprobs)
    numbered = [event for event in whole if event.startswith("id: ")]
    unnumbered = [event for event in whole if event not in numbered]
    assert len(unnumbered) == (1 if endpoint == "chat" else 0)  # the role
    shown = [n for n, text in enumerate(TEXTS) if text or logprobs]
    last = [n for n, there in ((6, held_back), (7, True), (8, usage)) if there]
    assert [id_of(event).index for event in numbered] == shown + last
    for n, event in enumerate(numbered):
        assert events(endpoint, body, end, logprobs=logprobs, had=id_of(event)) == numbered[n + 1 :]


def test_no_empty_line_follows_a_comment_after_the_first_id() -> None:
    chunks = Chunks(call_of(action=ACTION, body={"model": "chat"}, endpoint="chat"), "ids")
    assert chunks.comment("queued") == ": thaw queued\n\n"
    chunks.token(RunToken(0, 100, ""))
    assert chunks.comment("queued") == ": thaw queued\n\n"
    chunks.token(RunToken(1, 101, "x"))
    assert chunks.comment("queued") == ": thaw queued\n"


def test_tokens_that_print_alike_are_told_apart_by_their_bytes() -> None:
    half, other = r"bytes:\xf0\x9f", r"bytes:\xe2"
    token = RunToken(0, 1, "", TokenLogprob(half, -0.5, ((half, -0.5), (other, -1.5), ("\ufffd", -2.5))))
    chats, completions = (
        json.loads(Chunks(call_of(action=ACTION, body={}, endpoint=endpoint), None).token(token).split("data: ")[-1])
        for endpoint in ("chat", "completions")
    )
    (said,) = chats["choices"][0]["logprobs"]["content"]
    assert said["bytes"] == [0xF0, 0x9F]
    assert [top["bytes"] for top in said["top_logprobs"]] == [[0xF0, 0x9F], [0xE2], [0xEF, 0xBF, 0xBD]]
    assert completions["choices"][0]["logprobs"]["top_logprobs"] == [{half: -0.5, other: -1.5, "\ufffd": -2.5}]
