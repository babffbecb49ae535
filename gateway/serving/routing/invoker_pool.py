"""HTTP/1.1 keep-alive to the invokers' data ports: a pool of connections per address, and one run on one of them.

Whether a request may be repeated depends on what the invoker can have seen.  Without a connection (Unreachable), and
when the invoker answers InstanceGone or InstanceBusy, nothing ran.  A connection that breaks afterwards is WorkerLost:
the request may have run.  So is one of an instance that is gone and silent (gone.py).
"""

from __future__ import annotations

import errno
import socket
import struct
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from gateway.processor import computes_freely, waiting
from gateway.serving.hangup import Hangup
from gateway.serving.routing.gone import GoneInstances
from gateway.serving.routing.run_keys import RunKeys
from relay.clients.http11 import Connection
from relay.protocol import messages
from relay.protocol.data_port_messages import LogsFound, LogsWanted, OutputFound, OutputWanted
from thaw import wire
from thaw.errors import (
    DeveloperError,
    ErrorInfo,
    PlatformError,
    ProtocolError,
    ThawError,
    TimeLimitExceeded,
    WorkerLost,
    from_info,
)
from thaw.ids import InstanceId

STREAM_TYPE: Final = "application/x-thaw-stream"
IDLE_S: Final = 20.0
"""An idle connection is used no longer than this; invokers keep theirs for longer, so the two never race."""
_CONNECT_S: Final = 5.0
_TIMEOUT_SLACK_S: Final = 0.5
"""A socket's timeout may be late by this much: setting it is a system call, and it is not made for every token."""
_NOT_WAITING_S: Final = float("inf")
_MAX_LOGS_BYTES: Final = 1 << 30
"""The limit of an invoker's own answer.  The invoker limits the lines of each run (limits.logs)."""
_MAX_OUTPUT_BYTES: Final = 16 << 20
"""More than an invoker's longest answer, of 20 containers with 64 KiB each."""


class Unreachable(PlatformError):
    """No connection to the invoker now: nothing was sent, and nothing is known of its instances."""


class InvokerPool:
    """``result_bytes``: the longest answer that is taken from a container (a function's; a stream has its frames)."""

    def __init__(self, token: str, result_bytes: int = 1 << 20) -> None:
        self.result_bytes, self.run_keys, self.gone = result_bytes, RunKeys(token), GoneInstances()
        self._headers = f"Authorization: Bearer {token}\r\nContent-Type: application/json\r\n"
        self._accept = f"Accept: {STREAM_TYPE};whole={result_bytes}\r\n"
        self._lock = threading.Lock()
        self._idle: dict[str, list[tuple[float, Connection]]] = {}

    def post(
        self,
        address: str,
        path: str,
        body: bytes,
        *,
        stream: bool,
        deadline_s: float,
        hangup: Hangup,
        headers: str = "",
        instance_id: InstanceId | None = None,
    ) -> Reply:
        """Send a request.  ``headers`` are whole lines.  ``stream``: the answer may come in messages (read_message); an
        image's server answers so if its result is longer than read_json() takes, or of unknown length.
        ``instance_id``: whose run it is.  Raises Unreachable, WorkerLost, ClientGone, TimeLimitExceeded."""
        reply = Reply(self, address, self._connect(address), deadline_s, hangup, instance_id)
        reply.send(path, self._headers + headers + (self._accept if stream else ""), body)
        return reply

    def logs(self, address: str, wanted: LogsWanted, *, timeout_s: float) -> LogsFound:
        """Return the lines that these runs printed.  Raises as post() and read_head() do."""
        deadline_s = time.monotonic() + timeout_s
        reply = self.post(address, "/logs", wire.dumps(wanted), stream=False, deadline_s=deadline_s, hangup=Hangup())
        reply.read_head()
        return wire.from_plain(LogsFound, reply.read_json(max_bytes=_MAX_LOGS_BYTES))

    def output(self, address: str, wanted: OutputWanted, *, timeout_s: float) -> OutputFound:
        """Return the last output of containers that ended there.  Raises as post() and read_head() do."""
        deadline_s = time.monotonic() + timeout_s
        reply = self.post(address, "/output", wire.dumps(wanted), stream=False, deadline_s=deadline_s, hangup=Hangup())
        reply.read_head()
        return wire.from_plain(OutputFound, reply.read_json(max_bytes=_MAX_OUTPUT_BYTES))

    def give_back(self, address: str, connection: Connection) -> None:
        with self._lock:
            self._idle.setdefault(address, []).append((time.monotonic(), connection))

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for _, connection in connections:
                connection.close()

    def _connect(self, address: str) -> Connection:
        while (connection := self._pop(address)) is not None:
            if not connection.is_readable():  # else the peer closed it, or it holds bytes that were not asked for
                return connection
            connection.close()
        host, _, port = address.rpartition(":")
        try:
            return Connection.connect(host, int(port), _CONNECT_S)
        except OSError as e:
            raise Unreachable(f"the invoker at {address} does not answer: {e}") from e

    def _pop(self, address: str) -> Connection | None:
        """Return the connection used last; close those that were idle for too long."""
        with self._lock:
            connections = self._idle.get(address, [])
            fresh = time.monotonic() - IDLE_S
            while connections and connections[0][0] < fresh:
                connections.pop(0)[1].close()
            return connections.pop()[1] if connections else None


class Reply:
    """An answer as it arrives.  It ends with read_json(), finish() (which keeps the connection) or abort() (which
    closes it), and by itself when an error is raised.  Until then a client that hangs up cuts the connection at
    once."""

    def __init__(
        self,
        pool: InvokerPool,
        address: str,
        connection: Connection,
        deadline_s: float,
        hangup: Hangup,
        instance_id: InstanceId | None = None,
    ) -> None:
        self._pool, self._address, self._connection = pool, address, connection
        self._deadline_s, self._hangup, self._instance_id = deadline_s, hangup, instance_id
        self._silence_s: float | None = None
        self._waits_since_s = _NOT_WAITING_S
        self._waking: AbstractContextManager[None] | None = None
        self._ended = self._has_come = False
        self._timeout_set_s = float("-inf")
        self._plain: Any = None
        self.status = self.n_bytes = 0
        if instance_id is not None:
            pool.gone.enter(instance_id, self)

    def send(self, path: str, headers: str, body: bytes) -> None:
        with self._guarded():
            waking = self._hangup.waking(self._shut)
            waking.__enter__()
            self._waking = waking
            self._connection.send("POST", path, headers, body)

    def comes_within(self, timeout_s: float) -> bool:
        """True when the answer begins by then, or never will: reading it does not have to wait.  An instance that is
        gone is not waited for here for so long."""
        now_s = self._waits_since_s = time.monotonic()
        left_s = self._deadline_s - now_s
        silence_s = timeout_s if self._silence_s is None else self._silence_s
        with waiting():
            self._has_come = self._connection.is_readable(min(timeout_s, left_s, silence_s))
        self.waits_no_more()
        return self._has_come or left_s <= timeout_s

    def read_head(self) -> None:
        """Wait for the answer.  Raises InstanceGone, InstanceBusy, WorkerLost, ClientGone, TimeLimitExceeded, the error
        that the invoker or container names, or an error of reading that answer (read_json)."""
        with nullcontext() if self._has_come else waiting(), self._guarded():
            self._connection.read_head()
            self.status = self._connection.status
        if self.status != 200:
            self._raise_named_error()

    def read_message(self) -> Any:
        """The next frame of a stream (relay.protocol.messages)."""
        computes_freely()
        with self._guarded():
            (n_bytes,) = struct.unpack("<I", self._exactly(4))
            if n_bytes > messages.MAX_RUN_MESSAGE_BYTES:
                raise ProtocolError(f"a frame of {n_bytes} bytes in a run's stream")
            return messages.from_plain(wire.loads(object, self._exactly(n_bytes)))

    def read_json(self, *, max_bytes: int | None = None) -> Any:
        """The whole body of an answer that is one JSON value.  Raises DeveloperError when it is too long, or holds a
        number that is not JSON."""
        if self._plain is None:
            allowed = self._pool.result_bytes if max_bytes is None else max_bytes
            with self._guarded():
                data = self._connection.read(allowed + 1)
                if len(data) > allowed:
                    n_bytes = len(data) + self._connection.n_left
                    raise DeveloperError(
                        f"The action produced a response that exceeded the allowed length: {n_bytes} > {allowed} bytes."
                    )
            self._end(keep=True)
            self._plain, self.n_bytes = _parsed(data), len(data)
        return self._plain

    @property
    def is_in_messages(self) -> bool:
        """Whether the answer comes in messages.  Otherwise it is one JSON value."""
        return self._connection.is_chunked

    def extend(self, deadline_s: float) -> None:
        """The answer has begun in time, and its rest may take until ``deadline_s``."""
        self._deadline_s, self._timeout_set_s = deadline_s, float("-inf")

    def finish(self) -> None:
        """After the last frame: read the terminal chunk, keep the connection."""
        try:
            with self._guarded():
                rest = self._connection.read_rest()
        except ThawError:
            return  # the answer is whole; only the connection is not worth keeping
        self._end(keep=not rest)

    def abort(self) -> None:
        self._end(keep=False)

    def _end(self, *, keep: bool) -> None:
        """Give the connection back or close it, but only once."""
        if self._ended:
            return
        self._ended = True
        if self._instance_id is not None:
            self._pool.gone.leave(self._instance_id, self)
        if self._waking is not None:
            self._waking.__exit__(None, None, None)
        # the client may have gone just now and be about to cut the connection
        if keep and self._connection.keep_alive and not self._hangup.is_set:
            self._pool.give_back(self._address, self._connection)
        else:
            self._connection.close()

    def _exactly(self, n_bytes: int) -> bytes:
        data = self._connection.read(n_bytes)
        if len(data) < n_bytes:
            raise WorkerLost("the container's answer ended early")
        return data

    def _raise_named_error(self) -> None:
        """Raise the error that a non-200 answer names.  An answer without ErrorInfo is the function's own and stays
        readable."""
        plain = self.read_json()
        if isinstance(plain, dict) and isinstance(plain.get("info"), dict):
            raise from_info(wire.from_plain(ErrorInfo, plain["info"]))

    def limit_silence(self, silence_s: float | None) -> None:
        self._silence_s = silence_s

    def cut_if_waiting(self, since_s: float) -> None:
        if self._waits_since_s <= since_s:
            self._shut()

    def _guarded(self) -> _Guarded:
        now_s = self._waits_since_s = time.monotonic()
        if now_s >= self._deadline_s:
            self.abort()
            raise TimeLimitExceeded("The action exceeded its time limits.")
        if (silence_s := self._silence_s) is not None:  # read after the wait has begun: see cut_if_waiting()
            self._connection.sock.settimeout(min(silence_s, self._deadline_s - now_s))
            self._timeout_set_s = float("-inf")
        elif now_s - self._timeout_set_s > _TIMEOUT_SLACK_S:
            self._connection.sock.settimeout(self._deadline_s - now_s)
            self._timeout_set_s = now_s
        return _Guarded(self, self._hangup)

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self._deadline_s

    @property
    def is_of_gone_instance(self) -> bool:
        return self._silence_s is not None

    def waits_no_more(self) -> None:
        self._waits_since_s = _NOT_WAITING_S

    def _shut(self) -> None:
        try:
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed meanwhile


class _Guarded:
    """Socket work that ends at the socket's timeout or when the client goes.  Any error ends the reply; a socket's
    error is raised as one of ours."""

    __slots__ = ("_hangup", "_reply")

    def __init__(self, reply: Reply, hangup: Hangup) -> None:
        self._reply, self._hangup = reply, hangup

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._reply.waits_no_more()
        if error is None:
            return
        self._reply.abort()
        if isinstance(error, OSError) or self._hangup.is_set:
            self._hangup.check()
            # ETIMEDOUT means that the host has vanished.  An invoker, too, cuts an answer that is late.
            timed_out = isinstance(error, TimeoutError) and error.errno != errno.ETIMEDOUT
            if self._reply.is_late or (timed_out and not self._reply.is_of_gone_instance):
                raise TimeLimitExceeded("The action exceeded its time limits.") from error
            raise WorkerLost(f"the connection to the container broke: {error!r}") from error


def _parsed(data: bytes) -> Any:
    try:
        return wire.strict(data.decode())
    except wire.NotFinite as e:
        raise DeveloperError(f"The action returned a number that JSON cannot hold: {e}.") from e
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"an answer that is not JSON: {e}") from e
