"""A crowd of clients that cost a server connections and nothing else, in a process of its own.

    python -m bench._crowd PORT N_IDLE N_SLOW

An idle client has had one answer and keeps its connection.  A slow one sends a byte of a head each second, and never
the end of it.  Whoever is closed comes back at once.  ``crowd_ready`` is printed when all are there.
"""

from __future__ import annotations

import heapq
import itertools
import selectors
import socket
import sys
import time

from thaw.process import descriptors

_ADDRESSES = tuple(f"127.0.0.{i}" for i in range(2, 10))
"""A gateway may limit the connections of one address, and those from 127.0.0.1 would take ports of other servers."""
_ASK = b"GET /api/v1 HTTP/1.1\r\nHost: x\r\n\r\n"
_BYTE_S = 1.0


class Crowd:
    def __init__(self, port: int) -> None:
        self._port = port
        self._selector = selectors.DefaultSelector()
        self._addresses = itertools.cycle(_ADDRESSES)
        self._due: list[tuple[float, int, socket.socket]] = []
        self._number = itertools.count()

    def add(self, *, slow: bool) -> None:
        sock = socket.create_connection(("127.0.0.1", self._port), 30, source_address=(next(self._addresses), 0))
        if slow:
            sock.sendall(b"GET / HTTP/1.1\r\nX: ")
            heapq.heappush(self._due, (time.monotonic() + _BYTE_S, next(self._number), sock))
        else:
            sock.sendall(_ASK)
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, slow)

    def run(self) -> None:
        while True:
            left_s = self._due[0][0] - time.monotonic() if self._due else None
            for key, _ in self._selector.select(None if left_s is None else max(0.0, left_s)):
                self._read(key.fileobj, slow=key.data)  # type: ignore[arg-type]
            self._send()

    def _send(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            _, _, sock = heapq.heappop(self._due)
            try:
                sock.send(b"x")
            except OSError:
                continue  # it was closed, and another one came in its place
            heapq.heappush(self._due, (time.monotonic() + _BYTE_S, next(self._number), sock))

    def _read(self, sock: socket.socket, *, slow: bool) -> None:
        try:
            if sock.recv(65536):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._selector.unregister(sock)
        sock.close()
        self.add(slow=slow)


def main(port: int, n_idle: int, n_slow: int) -> None:
    descriptors.raise_limit()
    crowd = Crowd(port)
    for i in range(n_idle + n_slow):
        crowd.add(slow=i >= n_idle)
    print("crowd_ready", flush=True)
    crowd.run()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
