"""Do our own readers of HTTP/1.1 and of the Redis protocol cost less than the libraries that could replace them?

Each reader takes the same messages from a socket pair, and only its own CPU time is counted.  For HTTP, the messages
are the invoker's answer as the gateway reads it, whole and as a stream of tokens, and a run as the invoker reads it.
For the Redis protocol, it is a frame of hidden states, up to the message that a stage receives.  A value is our
reader's CPU time divided by the library's.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import h11
import hiredis
import httptools

from bench import _common
from bench._common import Goal, interleave, judge, median
from relay.clients import http11
from relay.protocol.frames import (
    HEADER_BYTES,
    FrameHeader,
    FrameKind,
    Priority,
    check_payload,
    decode_header,
    encode_chunk,
)
from relay.protocol.messages import GroupCredential
from relay.transports import resp
from relay.transports.assembly import Assembly
from relay.transports.base import Flow
from relay.transports.redis_in import RedisLane
from relay.transports.redis_server import GroupRelay
from thaw.ids import GroupId

_BODY: Final = b'{"result": {"greeting": "Hello stranger!"}, "status": "success", "success": true}' * 3
_ANSWER: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_BODY) + _BODY
_N_TOKENS: Final = 32
_TOKEN: Final = b"t" * 80
_STREAM: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"50\r\n%b\r\n" % _TOKEN * _N_TOKENS
    + b"0\r\n\r\n"
)
_RUN: Final = (
    b"POST /run HTTP/1.1\r\nHost: thaw\r\nAuthorization: Bearer 0123456789abcdef\r\nX-Thaw-Instance: abc\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_BODY) + _BODY
)
_GROUP: Final = GroupId("ab" * 16)
_FRAME_BYTES: Final = {"8k": 8 << 10, "256k": 256 << 10}
Exchange = Callable[[], object]
"""Takes one message from the socket, up to its end."""
Readers = dict[str, Callable[[socket.socket], Exchange]]


class Pair:
    """Two connected sockets whose buffers hold the largest message."""

    def __init__(self) -> None:
        self.far, self.near = socket.socketpair()
        self.far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 << 20)

    def cost_us(self, message: Callable[[int], bytes], take: Exchange, count: int) -> float:
        """The CPU time for one message, without the time to send it."""
        spent = 0.0
        for i in range(count):
            self.far.sendall(message(i))
            began = time.thread_time()
            take()
            spent += time.thread_time() - began
        return spent / count * 1e6


# HTTP -----------------------------------------------------------------------------------------------------------------


def ours_reads_an_answer(near: socket.socket) -> Exchange:
    connection = http11.Connection(near)

    def take() -> None:
        connection.read_head()
        assert connection.status == 200
        connection.read_rest()

    return take


def ours_reads_a_run(near: socket.socket) -> Exchange:
    handler: Any = http11.Handler.__new__(http11.Handler)
    handler.rfile = near.makefile("rb")

    def take() -> None:
        handler.raw_requestline = handler.rfile.readline()
        assert handler.parse_request()
        handler.rfile.read(int(handler.headers["content-length"]))

    return take


def h11_reads(role: Any, near: socket.socket) -> Exchange:
    """A client that has sent its request already: only the reading of the answer is counted."""

    def take() -> None:
        connection = h11.Connection(role)
        if role is h11.CLIENT:
            connection.send(h11.Request(method="GET", target="/", headers=[("Host", "thaw")]))
            connection.send(h11.EndOfMessage())
        parts, event = [], None
        while event is not h11.EndOfMessage:
            found = connection.next_event()
            event = type(found)
            if found is h11.NEED_DATA:
                connection.receive_data(near.recv(65536))
            elif isinstance(found, h11.Data):
                parts.append(bytes(found.data))
        b"".join(parts)

    return take


class _Heard:
    """The callbacks that httptools calls."""

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.parts: list[bytes] = []
        self.is_whole = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)

    def on_message_complete(self) -> None:
        self.is_whole = True


def httptools_reads(parser_of: Callable[[_Heard], Any], near: socket.socket) -> Exchange:
    def take() -> None:
        heard = _Heard()
        parser = parser_of(heard)
        while not heard.is_whole:
            parser.feed_data(near.recv(65536))
        b"".join(heard.parts)

    return take


# the Redis protocol ---------------------------------------------------------------------------------------------------


class _Messages:
    """Stands for an Inbox."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def deliver(self, message: Any) -> None:
        self.n_bytes += len(message.payload)


def _relay() -> GroupRelay:
    return GroupRelay("redis://127.0.0.1:1/0", GroupCredential("", ""), _GROUP)


def frames(n_bytes: int) -> Callable[[int], bytes]:
    """Answers to XREAD with one frame each, in their order."""
    key, payload = _relay().stream(0, 1, Priority.INFERENCE).encode(), bytes(n_bytes)
    header = FrameHeader(FrameKind.HIDDEN_STATES, Priority.INFERENCE)

    def answer(i: int) -> bytes:
        frame = encode_chunk(header, bytes.fromhex(_GROUP), i, 0, 1, payload) + payload
        entry_id = b"%d-1" % (i + 1)
        head = b"*1\r\n*2\r\n$%d\r\n%b\r\n*1\r\n*2\r\n$%d\r\n%b\r\n*2\r\n$1\r\nf\r\n$%d\r\n"
        return head % (len(key), key, len(entry_id), entry_id, len(frame)) + frame + b"\r\n"

    return answer


def ours_receives(n_bytes: int, near: socket.socket) -> Exchange:
    inbox: Any = _Messages()
    lane: Any = RedisLane(_relay(), inbox, 1, {0: Assembly(0)}, Priority.INFERENCE, Flow(chunk_bytes=1 << 20))
    connection: Any = resp.Connection.__new__(resp.Connection)
    connection.sock, connection.buffer = near, bytearray(resp.BUFFER_BYTES)
    connection.view, connection.start, connection.end = memoryview(connection.buffer), 0, 0
    lane._connection = connection

    def take() -> None:
        wanted = inbox.n_bytes + n_bytes
        while inbox.n_bytes < wanted:
            lane.advance()

    return take


def hiredis_receives(n_bytes: int, near: socket.socket) -> Exchange:
    reader, inbox, assembly = hiredis.Reader(), _Messages(), Assembly(0)

    def take() -> None:
        while (answer := reader.gets()) is False:
            reader.feed(near.recv(max(65536, n_bytes)))
        ((_, ((_, (_, frame)),)),) = answer
        header, payload = decode_header(frame[:HEADER_BYTES]), frame[HEADER_BYTES:]
        check_payload(header, payload)
        message = assembly.whole(header, payload)
        assert message is not None
        inbox.deliver(message)

    return take


# the question ---------------------------------------------------------------------------------------------------------


def compare(name: str, message: Callable[[int], bytes], readers: Readers, rounds: int, count: int) -> list[Goal]:
    def measured(reader: Callable[[socket.socket], Exchange]) -> Callable[[], float]:
        def once() -> float:
            pair = Pair()
            with pair.far, pair.near:
                return round(pair.cost_us(message, reader(pair.near), count), 2)

        return once

    _common.say(f"{name}: µs of CPU time for one")
    us = interleave({who: measured(reader) for who, reader in readers.items()}, rounds)
    goals = []
    for library in [who for who in us if who != "ours"]:
        ratio = median([a / b for a, b in zip(us["ours"], us[library], strict=True)])
        floor = f"{median(us['ours']):.1f} µs against {median(us[library]):.1f} µs"
        goals.append(judge(f"{name}_vs_{library}", ratio, "<=", 1.0, floor=floor, rounds=rounds))
    return goals


def main() -> int:
    options = _common.options(__doc__ or "")
    rounds, count = options.n or (5 if options.quick else 9), 1000 if options.quick else 4000
    client: Readers = {
        "ours": ours_reads_an_answer,
        "h11": partial(h11_reads, h11.CLIENT),
        "httptools": partial(httptools_reads, httptools.HttpResponseParser),
    }
    server: Readers = {
        "ours": ours_reads_a_run,
        "h11": partial(h11_reads, h11.SERVER),
        "httptools": partial(httptools_reads, httptools.HttpRequestParser),
    }
    goals = compare("answer", lambda _: _ANSWER, client, rounds, count)
    goals += compare("stream", lambda _: _STREAM, client, rounds, count // 4)
    goals += compare("run", lambda _: _RUN, server, rounds, count)
    for size, n_bytes in _FRAME_BYTES.items():
        readers: Readers = {
            "ours": partial(ours_receives, n_bytes),
            "hiredis": partial(hiredis_receives, n_bytes),
        }
        goals += compare(f"frame_{size}", frames(n_bytes), readers, rounds, count // 4)
    return _common.report("codecs", goals, rounds=rounds)


if __name__ == "__main__":
    sys.exit(main())
