"""A thousand streamed answers at once, read by one thread: which began, which were open at once, which completed."""

from __future__ import annotations

import base64
import json
import selectors
import socket
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """``at_once`` is the largest number of streams that were open together: their heads (200) had arrived, and they had
    not ended.
    """

    asked: int
    at_once: int
    complete: int
    seconds: float
    first_failure: str


class _Stream:
    def __init__(self, address: tuple[str, int], request: bytes) -> None:
        self.sock = socket.create_connection(address)
        self.sock.setblocking(False)
        self.got = bytearray()
        self.sock.sendall(request)

    @property
    def begun(self) -> bool:
        return self.got.startswith(b"HTTP/1.1 200") and b"\r\n\r\n" in self.got

    @property
    def complete(self) -> bool:
        return self.begun and b"data: [DONE]" in self.got and b'"finish_reason"' in self.got


def hold(port: int, auth: str, model: str, count: int, max_tokens: int, deadline_s: float) -> Held:
    """Send ``count`` requests, each on a connection of its own, and then read until all streams have ended."""
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "Count."}],
            "stream": True,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Basic {base64.b64encode(auth.encode()).decode()}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    ).encode()
    began = time.monotonic()
    streams = [_Stream(("127.0.0.1", port), head + body) for _ in range(count)]
    selector = selectors.DefaultSelector()
    for stream in streams:
        selector.register(stream.sock, selectors.EVENT_READ, stream)
    at_once, ended, begun = 0, 0, 0
    while selector.get_map() and time.monotonic() - began < deadline_s:
        for key, _ in selector.select(1.0):
            stream = key.data
            before = stream.begun
            data = _receive(stream.sock)
            stream.got += data
            begun += stream.begun and not before
            if not data:
                selector.unregister(stream.sock)
                stream.sock.close()
                ended += 1
        at_once = max(at_once, begun - ended)
    failed = [s for s in streams if not s.complete]
    for stream in failed:
        stream.sock.close()
    text = bytes(failed[0].got[:300]).decode(errors="replace") if failed else ""
    return Held(count, at_once, count - len(failed), time.monotonic() - began, text)


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65536)
    except ConnectionError:
        return b""
