"""A server that does nothing for a request: it reads the request and answers, and that so many times a second.

    python -m bench._bare RATE STATUS N_BYTES

``bare_ready PORT`` is printed when it listens.  A rate of 0 is none: everything is answered at once.
"""

from __future__ import annotations

import re
import selectors
import socket
import sys
import time
from collections import deque
from typing import Final

from thaw.process import descriptors

_LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
_READ_BYTES: Final = 256 * 1024


class _Client:
    """A request that is read: its beginning until the head is there, then the number of bytes that are to come."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._head = b""
        self._left = -1

    def read(self) -> bool:
        """Return whether a request is complete.  Raises ConnectionError at the end."""
        data = self.sock.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError
        if self._left < 0:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return False
            length = _LENGTH.search(self._head, 0, end)
            self._left = int(length[1]) if length else 0
            data, self._head = self._head[end + 4 :], b""
        self._left -= len(data)
        if self._left > 0:
            return False
        self._left = -1
        return True


class Bare:
    def __init__(self, rate: float, status: int, n_bytes: int) -> None:
        self._pause_s = 1 / rate if rate else 0.0
        self._answer = b"HTTP/1.1 %d Bare\r\nContent-Length: %d\r\n\r\n%b" % (status, n_bytes, b"x" * n_bytes)
        self._selector = selectors.DefaultSelector()
        self._due: deque[_Client] = deque()
        self._next_s = time.monotonic()

    def run(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        while True:
            left_s = max(0.0, self._next_s - time.monotonic()) if self._due else None
            for key, _ in self._selector.select(left_s):
                if key.data is None:
                    self._accept(listener)
                else:
                    self._read(key.data)
            while self._due and self._next_s <= time.monotonic():
                self._next_s = max(self._next_s, time.monotonic() - self._pause_s) + self._pause_s
                self._send(self._due.popleft())

    def _accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, _Client(sock))

    def _read(self, client: _Client) -> None:
        try:
            if client.read():
                self._due.append(client)
        except BlockingIOError:
            return
        except OSError:
            self._selector.unregister(client.sock)
            client.sock.close()

    def _send(self, client: _Client) -> None:
        """Send the answer.  The rest that the kernel does not take at once is dropped, because such a client does not
        read."""
        try:
            client.sock.send(self._answer)
        except OSError:
            pass  # it is gone, which the next look at it tells


def main(rate: float, status: int, n_bytes: int) -> None:
    descriptors.raise_limit()
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        print(f"bare_ready {listener.getsockname()[1]}", flush=True)
        Bare(rate, status, n_bytes).run(listener)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
