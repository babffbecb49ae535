"""One request to a container, bounded in time and in size, because user code may answer it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any, Final

from relay.clients.http11 import Connection
from thaw.errors import ProtocolError

MOST_BYTES: Final = 256 * 1024
"""The largest answer: many times the size of a start's events."""


class ContainerCall:
    def __init__(self, path: str, deadline_s: float) -> None:
        self._path, self._deadline_s = path, deadline_s
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._expired = False

    def ask(self, method: str, path: str, body: bytes = b"", headers: str = "") -> tuple[int, dict[str, Any]]:
        """The answer's status and JSON object; may be called once.  ``headers`` are whole lines.

        Raises TimeoutError at the deadline of the whole exchange, OSError when the connection breaks, ProtocolError
        for an answer that is no object or too large.
        """
        timer = threading.Timer(self._deadline_s, self._expire)  # a socket's timeout begins again with every byte
        timer.daemon = True
        timer.start()
        try:
            return self._exchange(method, path, body, headers)
        except OSError as e:
            if self._expired:
                raise TimeoutError from e
            raise
        finally:
            timer.cancel()
            self._sock.close()

    def abort(self) -> None:
        """Make :meth:`ask` raise OSError now."""
        with contextlib.suppress(OSError):  # it is not connected yet, or has just ended
            self._sock.shutdown(socket.SHUT_RDWR)

    def _expire(self) -> None:
        self._expired = True
        self.abort()

    def _exchange(self, method: str, path: str, body: bytes, headers: str) -> tuple[int, dict[str, Any]]:
        self._sock.settimeout(self._deadline_s)
        self._sock.connect(self._path)
        connection = Connection(self._sock)
        try:
            connection.send(method, path, headers or "Content-Type: application/json\r\n", body)
            connection.read_head()
            data = connection.read(MOST_BYTES + 1)
        finally:
            connection.close()
        if len(data) > MOST_BYTES:
            raise ProtocolError(f"more than {MOST_BYTES} bytes")
        try:
            plain = json.loads(data)
        except (ValueError, RecursionError) as e:
            raise ProtocolError("no JSON") from e
        if not isinstance(plain, dict):
            raise ProtocolError("no JSON object")
        return connection.status, plain
