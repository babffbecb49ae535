"""The engine process's messages to its proxy fit in frames, even for the largest requests."""

from __future__ import annotations

import socket
import threading

from relay.clients.channel import Channel, ChannelClosed
from thaw_runtime.engine.main import tell_events
from thaw_runtime.engine.protocol import Event, Failed, Finished, Logprobs, Token, Usage
from thaw_runtime.engine.wire import Events, decode

ROW = Logprobs(-0.1234567890123456, tuple((100_000 + i, -1.234567890123456) for i in range(20)), 12345)


def told(*events: tuple[str, Event]) -> tuple[list[str], list[tuple[tuple[str, Event], ...]]]:
    """The requests that failed, and the events of each message."""
    ours, theirs = socket.socketpair()
    found: list[tuple[tuple[str, Event], ...]] = []

    def read() -> None:
        channel = Channel(theirs)
        try:
            while isinstance(message := decode(channel.receive()[0]), Events):
                found.append(message.events)
        except ChannelClosed:
            return

    reader = threading.Thread(target=read)
    reader.start()
    with theirs:
        with ours:
            failed = tell_events(Channel(ours), events)
        reader.join(30)
    assert not reader.is_alive()
    return failed, found


def first(n_prompt: int) -> Token:
    return Token(0, 5, None, {"wall_ms": 1}, prompt=(ROW,) * n_prompt)


def test_events_of_several_requests_that_fit_in_no_one_frame_come_in_several() -> None:
    events = [("a", first(8_000)), ("b", first(8_000)), ("c", Token(3, 7)), ("a", Finished("length", Usage(1, 1)))]
    failed, found = told(*events)
    assert failed == []
    assert [event for message in found for event in message] == events
    assert len(found) > 1


def test_an_event_that_fits_in_no_frame_fails_its_request_and_no_other() -> None:
    failed, found = told(("a", Token(3, 7)), ("b", first(15_000)), ("c", Token(4, 8)))
    assert failed == ["b"]
    events = dict(event for message in found for event in message)
    assert (events["a"], events["c"]) == (Token(3, 7), Token(4, 8))
    assert isinstance(events["b"], Failed)
    assert events["b"].error.code == "BadRequest"
