"""HTTP/1.1 keep-alive to the invokers' data ports: a pool of connections per address, and one run on one of them.

What may be repeated is decided by what the invoker can have seen.  Before the request was written, and when it
answers InstanceGone or InstanceBusy, nothing ran; a connection that breaks afterwards is WorkerLost: it may have run.
"""

from __future__ import annotations

import http.client
import select
import socket
import struct
import threading
import time
from typing import Any, Final

from gateway.hangup import Hangup
from relay import messages
from relay.messages import LogsFound, LogsWanted
from thaw import wire
from thaw.errors import ErrorInfo, InstanceGone, ProtocolError, ThawError, TimeLimitExceeded, WorkerLost, from_info

STREAM_TYPE: Final = "application/x-thaw-stream"
IDLE_S: Final = 20.0
"""An idle connection is used no longer than this; invokers keep theirs for longer, so the two never race."""
_CONNECT_S: Final = 5.0
_TIMEOUT_SLACK_S: Final = 0.5
"""Setting a socket's timeout is a system call; a token is not worth one."""
_MAX_FRAME_BYTES: Final = 8 * 1024 * 1024


class InvokerPool:
    def __init__(self, token: str) -> None:
        self._token = token
        self._lock = threading.Lock()
        self._idle: dict[str, list[tuple[float, http.client.HTTPConnection]]] = {}

    def post(self, address: str, path: str, body: bytes, *, stream: bool, deadline_s: float, hangup: Hangup) -> Reply:
        """Send, and wait for the head of the answer.  Raises InstanceGone, InstanceBusy, WorkerLost, ClientGone,
        TimeLimitExceeded, or the error the invoker or container names."""
        connection = self._connect(address)
        reply = Reply(self, address, connection, deadline_s, hangup)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        if stream:
            headers["Accept"] = STREAM_TYPE
        reply.send("POST", path, body, headers)
        return reply

    def logs(self, address: str, wanted: LogsWanted, *, timeout_s: float) -> LogsFound:
        """What these runs printed.  Raises as post() does."""
        deadline_s = time.monotonic() + timeout_s
        reply = self.post(address, "/logs", wire.dumps(wanted), stream=False, deadline_s=deadline_s, hangup=Hangup())
        return wire.from_plain(LogsFound, reply.read_json())

    def give_back(self, address: str, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._idle.setdefault(address, []).append((time.monotonic(), connection))

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for _, connection in connections:
                connection.close()

    def _connect(self, address: str) -> http.client.HTTPConnection:
        while (connection := self._pop(address)) is not None:
            if not _stale(connection):
                return connection
            connection.close()
        host, _, port = address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=_CONNECT_S)
        try:
            connection.connect()  # sets TCP_NODELAY itself
        except OSError as e:
            raise InstanceGone(f"the invoker at {address} does not answer: {e}") from e
        return connection

    def _pop(self, address: str) -> http.client.HTTPConnection | None:
        """The connection used last; those that were idle for too long are closed on the way."""
        with self._lock:
            connections = self._idle.get(address, [])
            fresh = time.monotonic() - IDLE_S
            while connections and connections[0][0] < fresh:
                connections.pop(0)[1].close()
            return connections.pop()[1] if connections else None


class Reply:
    """An answer as it arrives.  Ends with read_json(), finish() (keeps the connection) or abort() (closes it)."""

    def __init__(
        self, pool: InvokerPool, address: str, connection: http.client.HTTPConnection, deadline_s: float,
        hangup: Hangup,
    ) -> None:  # fmt: skip
        self._pool, self._address, self._connection = pool, address, connection
        self._deadline_s, self._hangup = deadline_s, hangup
        self._response: http.client.HTTPResponse
        self._sock = connection.sock  # http.client drops its own reference when the peer will close
        self._timeout_set_s = float("-inf")
        self._plain: Any = None
        self.status = 0

    def send(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        try:
            with self._bounded():
                self._connection.request(method, path, body, headers)
                self._response = self._connection.getresponse()
                self.status = self._response.status
        except ThawError:
            self.abort()
            raise
        if self.status != 200:
            self._raise_named_error()

    def read_message(self) -> Any:
        """The next frame of a stream (relay.messages)."""
        with self._bounded():
            (n_bytes,) = struct.unpack("<I", self._exactly(4))
            if n_bytes > _MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {n_bytes} bytes in a run's stream")
            return messages.from_plain(wire.loads(object, self._exactly(n_bytes)))

    def read_json(self) -> Any:
        """The whole body of an answer that is one JSON value."""
        if self._plain is not None:
            return self._plain
        try:
            with self._bounded():
                data = self._response.read()
        except ThawError:
            self.abort()
            raise
        self._pool.give_back(self._address, self._connection)
        return wire.loads(object, data)

    def finish(self) -> None:
        """Behind the last frame: read the terminal chunk, keep the connection."""
        try:
            with self._bounded():
                rest = self._response.read(1)
        except ThawError:
            self.abort()  # the answer is whole; only the connection is not worth keeping
            return
        if rest or self._response.will_close:
            self.abort()
        else:
            self._pool.give_back(self._address, self._connection)

    def abort(self) -> None:
        self._connection.close()
        response = getattr(self, "_response", None)
        if response is not None:
            response.close()

    def _exactly(self, n_bytes: int) -> bytes:
        data = self._response.read(n_bytes)
        if len(data) < n_bytes:
            raise WorkerLost("the container's answer ended early")
        return data

    def _raise_named_error(self) -> None:
        """Raise what a non-200 answer names; one without ErrorInfo is the function's own and stays readable."""
        self._plain = self.read_json()
        if isinstance(self._plain, dict) and isinstance(self._plain.get("info"), dict):
            raise from_info(wire.from_plain(ErrorInfo, self._plain["info"]))

    def _bounded(self) -> _Bounded:
        now_s = time.monotonic()
        if now_s >= self._deadline_s:
            raise TimeLimitExceeded("The action exceeded its time limits.")
        if self._sock is not None and now_s - self._timeout_set_s > _TIMEOUT_SLACK_S:
            self._sock.settimeout(self._deadline_s - now_s)
            self._timeout_set_s = now_s
        return _Bounded(self._sock, self._hangup)


class _Bounded:
    """Socket work that ends at the socket's timeout or with the client, its exceptions translated."""

    def __init__(self, sock: socket.socket | None, hangup: Hangup) -> None:
        self._sock, self._hangup = sock, hangup
        self._waking = hangup.waking(self._shut)

    def __enter__(self) -> None:
        self._waking.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._waking.__exit__(None, None, None)
        if isinstance(error, (OSError, http.client.HTTPException)) or (error is not None and self._hangup.is_set):
            self._hangup.check()
            if isinstance(error, TimeoutError):
                raise TimeLimitExceeded("The action exceeded its time limits.") from error
            raise WorkerLost(f"the connection to the container broke: {error!r}") from error

    def _shut(self) -> None:
        try:
            if self._sock is not None:
                self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed meanwhile


def _stale(connection: http.client.HTTPConnection) -> bool:
    """An idle connection that is readable was closed by the peer (or holds bytes nobody asked for)."""
    if connection.sock is None:
        return True
    poll = select.poll()  # select() cannot take descriptors from 1024 on
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))
