"""Whatever a request waits for, it waits without a turn: here another request has to compute before the wait ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import pytest

from gateway.processor import Processor, waiting
from gateway.serving.hangup import Hangup
from gateway.serving.held.until_news import Held
from gateway.serving.routing.invoker_pool import InvokerPool
from gateway.serving.routing.waiting_room import WaitingRoom
from relay.state import redis_link
from tests.gateway.calls import call_of, instance_of
from tests.gateway.shared_processor import shared
from tests.gateway.test_dispatch import Noted, dispatcher_of
from tests.gateway.waits import until
from thaw.ids import Namespace
from thaw.process.bell import Bell

_S = 20.0
GUEST, OTHER = Namespace("guest"), Namespace("other")
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 7\r\n\r\n"


@contextmanager
def beside(processor: Processor, act: Callable[[], object]) -> Iterator[None]:
    """The block is a request.  Meanwhile ``act`` is another one, which needs a turn."""

    def run() -> None:
        with processor.computing(OTHER):
            act()

    thread = threading.Thread(target=run, daemon=True)
    with processor.computing(GUEST):
        thread.start()
        yield
    thread.join(_S)
    assert not thread.is_alive()
    assert processor.n_free == 1


def test_a_request_waits_for_the_answer_of_a_host_without_a_turn() -> None:
    processor = shared()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted: list[socket.socket] = []

        def answer() -> None:
            accepted.append(listener.accept()[0])
            accepted[0].sendall(ANSWER + b'{"n":1}')

        pool = InvokerPool("token")
        with beside(processor, answer):
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            deadline_s = time.monotonic() + _S
            reply = pool.post(address, "/", b"{}", stream=False, deadline_s=deadline_s, hangup=Hangup())
            reply.read_head()
            assert reply.read_json() == {"n": 1}
        pool.close()
        accepted[0].close()


def test_a_request_waits_for_the_state_server_without_a_turn(valkey_url: str) -> None:
    processor = shared()
    with (
        redis_link.connect(valkey_url, waiting=waiting) as client,
        redis_link.connect(valkey_url) as other,
        beside(processor, lambda: other.rpush("news", "there")),
    ):
        assert client.blpop(["news"], timeout=4) == (b"news", b"there")


def test_a_request_that_is_held_until_there_is_news_has_no_turn() -> None:
    processor, bell, found = shared(), Bell(), [0]

    def change() -> None:
        found[0] = 1
        bell.ring()

    with beside(processor, change):
        look = lambda: (time.monotonic(), found[0])  # noqa: E731
        assert Held(4).until_news(GUEST, Hangup(), _S, lambda: nullcontext(bell), look, lambda n: n == 1) == 1


def test_a_request_waits_for_an_instance_without_a_turn() -> None:
    processor, room, noted = shared(), WaitingRoom(), Noted()
    noted.refusals = 0
    with beside(processor, lambda: room.instance_changed(instance_of())):
        reached = dispatcher_of(room, noted, noted).reach(call_of("a"))
        assert next(reached) == "queued"
        assert next(reached) is cast(Any, noted)
        assert next(reached, None) is None
    assert noted.done == ["added", "sent", "withdrawn", "accepted"]


@pytest.mark.parametrize("how", ["a command", "a pipeline"])
def test_a_request_that_is_in_line_for_its_turn_has_no_connection_to_the_state_server(
    valkey_url: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that have turns may wait for its connection."""
    monkeypatch.setattr(redis_link, "_MAX_CONNECTIONS", 1)
    processor, asks = shared(), threading.Event()
    with redis_link.connect(valkey_url, waiting=waiting) as client, redis_link.connect(valkey_url) as other:
        asker = client if how == "a command" else client.pipeline(transaction=False)

        def ask() -> None:
            with processor.computing(OTHER):
                asks.set()
                asker.blpop(["news"], timeout=4)
                if how == "a pipeline":
                    asker.execute()

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        assert asks.wait(_S)
        with processor.computing(GUEST):
            other.rpush("news", "there")
            until(lambda: processor.n_in_line)
            assert processor.n_in_line == 1
            client.connection_pool.release(client.connection_pool.get_connection())  # fails where none is free
        asking.join(_S)
        assert not asking.is_alive()
    assert processor.n_free == 1
