"""A tenant that asks for as much as it can of one thing, in a process of its own.

    FLOOD_KEY=UUID:SECRET python -m bench._flood PORT KIND

Each connection asks again when it has its answer, whatever that is.  A reader reads nothing, and comes back when it is
cut.  ``flood_ready`` is printed with the first answer that is none of a refusal, or when all readers are there.  At the
end (SIGTERM) the numbers of answers by status are printed, 0 for a connection that was closed; or how many readers are
there.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import select
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from thaw.process import descriptors

ACTION: Final = "/api/v1/namespaces/_/actions/flooded"
LONG: Final = "/api/v1/namespaces/_/actions/long"
LONG_BYTES: Final = 2_000_000
_BODY_BYTES: Final = 1_000_000
"""The size of a large argument, just below the limit for a function's arguments."""
_DEPLOYED_BYTES: Final = 200_000
_READERS: Final = 200


def code(n_bytes: int = 0) -> dict[str, Any]:
    text = "def main(args):\n    return {'n': len(args)}\n" + "#" * n_bytes
    return {"exec": {"kind": "python:3.11", "code": text, "binary": False}, "limits": {"concurrency": 1}}


@dataclass(frozen=True, slots=True)
class Flood:
    connections: int
    method: str
    path: Callable[[int], str]
    body: bytes
    status: int = 200  # the status of an answer that is not a refusal


def _floods() -> Mapping[str, Flood]:
    small, large = b'{"name": "you"}', json.dumps({"x": "y" * _BODY_BYTES}).encode()
    deployed = json.dumps(code(_DEPLOYED_BYTES)).encode()
    return {
        "requests": Flood(32, "POST", lambda _: f"{ACTION}?blocking=true", small),
        "twin": Flood(4, "POST", lambda _: f"{ACTION}?blocking=true", small),
        "accepted": Flood(32, "POST", lambda _: ACTION, small, 202),
        "bodies": Flood(16, "POST", lambda _: f"{ACTION}?blocking=true", large),
        "deploys": Flood(16, "PUT", lambda n: f"/api/v1/namespaces/_/actions/made-{n}?overwrite=true", deployed),
    }


def was_flooded(kind: str, told: str) -> bool:
    """Return whether, by its last line, the flood was one: on average, each connection had an answer that was not a
    refusal."""
    n: dict[str, int] = json.loads(told)
    if kind == "slow_readers":
        return n.get("there", 0) >= _READERS // 2
    flood = _floods()[kind]
    return n.get(str(flood.status), 0) >= flood.connections


def n_answered(kind: str, told: str) -> int:
    """Return the number of the flood's answers, by its last line.  It is 0 for slow readers, which read none."""
    n: dict[str, int] = json.loads(told)
    return 0 if kind == "slow_readers" else sum(n.values())


def status_of(kind: str) -> int:
    """Return the status of an answer that is not a refusal."""
    return 200 if kind == "slow_readers" else _floods()[kind].status


class Asking:
    def __init__(self, port: int, headers: dict[str, str], flood: Flood) -> None:
        self._port, self._headers, self._flood = port, headers, flood
        self._statuses = Counter[int]()
        self._lock = threading.Lock()

    def run(self) -> None:
        for n in range(self._flood.connections):
            threading.Thread(target=self._ask, args=(n,), daemon=True).start()
        signal.pause()

    def told(self) -> dict[int, int]:
        with self._lock:
            return dict(self._statuses)

    def _ask(self, n: int) -> None:
        """A connection that the gateway closes is opened again by the next request."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        while True:
            try:
                connection.request(self._flood.method, self._flood.path(n), self._flood.body, self._headers)
                response = connection.getresponse()
                response.read()
                status = response.status
            except (OSError, http.client.HTTPException):
                connection.close()
                status = 0
            with self._lock:
                self._statuses[status] += 1
                is_first = status == self._flood.status and self._statuses[status] == 1
            if is_first:
                print("flood_ready", flush=True)


class NotReading:
    """Connections that ask for two megabytes of code each and never read."""

    def __init__(self, port: int, headers: dict[str, str]) -> None:
        self._port = port
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._request = f"GET {LONG} HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode()
        self._poll = select.poll()
        self._socks: dict[int, socket.socket] = {}
        self._n_cut = 0

    def run(self) -> None:
        for _ in range(_READERS):
            self._add()
        print("flood_ready", flush=True)
        while True:
            for descriptor, _ in self._poll.poll():
                self._poll.unregister(descriptor)
                self._socks.pop(descriptor).close()
                self._n_cut += 1
                self._add()

    def told(self) -> dict[str, int]:
        return {"there": len(self._socks), "cut": self._n_cut}

    def _add(self) -> None:
        sock = socket.create_connection(("127.0.0.1", self._port), 60)
        sock.sendall(self._request)
        self._socks[sock.fileno()] = sock
        self._poll.register(sock, select.POLLRDHUP)  # reports a reset or an end, but not incoming data


def main(port: int, kind: str) -> None:
    descriptors.raise_limit()
    credentials = base64.b64encode(os.environ["FLOOD_KEY"].encode()).decode()
    headers = {"Authorization": f"Basic {credentials}", "Content-Type": "application/json"}
    flood = NotReading(port, headers) if kind == "slow_readers" else Asking(port, headers, _floods()[kind])

    def tell(*_: object) -> None:
        print(json.dumps(flood.told()), flush=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, tell)
    flood.run()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
