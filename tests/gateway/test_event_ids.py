"""Ids of events: the clients that may use an id, and the events that such a client still lacks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.serving.answers.event_ids import EventId, EventIds, OtherAnswer, Progress, request_digest
from tests.gateway.calls import CHAT, GUEST, action_of
from thaw.action import KIND_LLM, Action
from thaw.errors import NotFound
from thaw.ids import ActivationId, Namespace

OTHER = Namespace("other")
ACTIVATION = ActivationId("5f" * 16)
BODY: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "stream": True}


CHAT_1 = action_of(CHAT, KIND_LLM)
DIGEST = request_digest(CHAT_1, "chat", BODY)
IDS = EventIds("the installation's token")
STARTED_S = 1_780_000_000
SENT = f"{IDS.prefix(GUEST, ACTIVATION, STARTED_S, DIGEST)}:17.0000abcd"


def test_an_id_is_read_by_any_gateway_of_the_installation() -> None:
    again = EventIds("the installation's token")
    assert again.read(SENT, GUEST) == EventId(ACTIVATION, STARTED_S, DIGEST, 17, 0xABCD)
    assert again.read(f" {SENT} ", GUEST).index == 17


@pytest.mark.parametrize("text", ["", "17", SENT[:-1], SENT + "0", SENT.replace("5f", "6f", 1), SENT.replace(":", ";")])
def test_what_is_no_id_is_not_found(text: str) -> None:
    with pytest.raises(NotFound) as unknown:
        IDS.read(text, GUEST)
    with pytest.raises(NotFound) as others:
        IDS.read(SENT, OTHER)
    with pytest.raises(NotFound):
        EventIds("another installation's token").read(SENT, GUEST)
    assert unknown.value.message == others.value.message


@given(st.integers(0, len(SENT) - 1), st.characters(codec="latin-1"))
def test_an_id_with_one_other_character_is_another_events_or_none(at: int, character: str) -> None:
    """Index and checksum are not signed: a client that changes them can lie only about the events that it has."""
    changed = SENT[:at] + character + SENT[at + 1 :]
    signed = len(SENT.partition(":")[0])
    if changed.strip() == SENT or at > signed:
        return
    with pytest.raises(NotFound):
        IDS.read(changed, GUEST)


@pytest.mark.parametrize(
    ("of_action", "endpoint", "body"),
    [
        (action_of(CHAT, KIND_LLM, version="0.0.2"), "chat", BODY),
        (action_of("guest/other", KIND_LLM), "chat", BODY),
        (CHAT_1, "completions", BODY),
        (CHAT_1, "chat", {**BODY, "seed": 1}),
    ],
)
def test_another_request_has_another_digest(of_action: Action, endpoint: str, body: dict[str, Any]) -> None:
    assert request_digest(of_action, endpoint, body) != DIGEST
    assert request_digest(CHAT_1, "chat", dict(reversed(BODY.items()))) == DIGEST


TOKENS = st.lists(st.integers(0, 2**31), min_size=1, max_size=40)


def seen(tokens: list[int], had: EventId | None) -> tuple[list[int], list[tuple[int, int]]]:
    """The numbers that a client reads, and (number, checksum) of all events."""
    progress = Progress(had)
    lacking, known = [], []
    for index, token_id in enumerate(tokens):
        if progress.token(token_id):
            lacking.append(index)
        known.append((index, progress.checksum))
    for number in range(3):
        if progress.lacks_final(number):
            lacking.append(len(tokens) + number)
        known.append((len(tokens) + number, progress.checksum))
    return lacking, known


@given(TOKENS, st.data())
def test_after_any_event_the_rest_comes_once(tokens: list[int], data: st.DataObject) -> None:
    everything, known = seen(tokens, None)
    assert everything == list(range(len(tokens) + 3))
    index, checksum = data.draw(st.sampled_from(known))
    rest, _ = seen(tokens, EventId(ACTIVATION, STARTED_S, DIGEST, index, checksum))
    assert rest == everything[index + 1 :]


@given(TOKENS, st.data())
def test_an_answer_that_differs_before_the_clients_event_is_refused(tokens: list[int], data: st.DataObject) -> None:
    _, known = seen(tokens, None)
    index, checksum = data.draw(st.sampled_from(known))
    changed = list(tokens)
    changed[data.draw(st.integers(0, min(index, len(tokens) - 1)))] += 1
    with pytest.raises(OtherAnswer):
        seen(changed, EventId(ACTIVATION, STARTED_S, DIGEST, index, checksum))
    with pytest.raises(OtherAnswer):  # it ends too early
        seen(tokens, EventId(ACTIVATION, STARTED_S, DIGEST, len(tokens) + 3, known[-1][1]))
