"""How the connections of the gateway's worker begin, wait and end (gateway/worker.py has the states).

When all are taken, the owner with most waiting connections loses the one that has waited longest (front/holdings.py).
"""

from __future__ import annotations

import errno
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from gunicorn.workers.gthread import ThreadWorker

from gateway.front.bounds import Bounds
from gateway.front.connection import Connection, State
from gateway.front.deadlines import Deadlines
from gateway.front.holdings import Holdings

_ACCEPTED_AT_ONCE: Final = 64
_FOREVER: Final = float("inf")


class ConnectionWorker(ThreadWorker):  # type: ignore[misc]
    """All of it runs on the worker's main thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bounds: Bounds = self.app.bounds
        self._deadlines = Deadlines()
        self._addresses: dict[str, dict[Connection, None]] = {}
        """The connections of each, those without a valid key first."""
        self._waiting = Holdings()
        """The connections that may give way."""
        self.worker_connections = sys.maxsize  # gunicorn would accept none while so many are open
        self._full_until_s = 0.0

    def _ready(self, connection: Connection) -> None:
        """The client has sent or read something."""
        raise NotImplementedError

    def _expire(self, connection: Connection) -> None:
        """The connection's deadline has come: close it, or set another one."""
        raise NotImplementedError

    def accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, client = listener.accept()
            except BlockingIOError:
                return
            except OSError as e:  # else the client has gone again
                if e.errno in (errno.EMFILE, errno.ENFILE) and not self._make_room():
                    self._stop_accepting()
                return
            connection = Connection(sock, client, listener.getsockname(), self.bounds.answer_s)
            self._guard(connection, self._begin)

    def _stop_accepting(self) -> None:
        """No descriptor is left.  gunicorn accepts none until a connection closes, or a second is over."""
        self.worker_connections, self._full_until_s = self.nr_conns, time.monotonic() + 1.0

    def _begin(self, connection: Connection) -> None:
        connection.sock.setblocking(False)
        self.nr_conns += 1
        mates = self._addresses.setdefault(connection.address, {})
        mates[connection] = None
        per_address = self.bounds.per_address
        too_many = bool(connection.address) and 0 < per_address < len(mates)
        if (too_many and not self._close_one(c for c in mates if c in self._waiting)) or (
            self.nr_conns > self.bounds.connections and not self._make_room()
        ):
            self._close(connection)
            return
        self._wait_for_request(connection, self.bounds.head_s)

    def _make_room(self) -> bool:
        return self._close_one(self._waiting.heaviest())

    def _close_one(self, of: Iterable[Connection]) -> bool:
        oldest = next(iter(of), None)
        if oldest is not None:
            self._close(oldest)
        return oldest is not None

    def _wait_for_request(self, connection: Connection, within_s: float) -> None:
        connection.state = State.IDLE
        self._waiting.set(connection)
        self._deadlines.set(connection, time.monotonic() + within_s)
        self._watch(connection, selectors.EVENT_READ)

    def _guard(self, connection: Connection, act: Callable[..., None], *args: Any) -> None:
        """A bug costs one connection, and not all."""
        try:
            act(connection, *args)
        except Exception:
            self.log.exception("Error on a connection")
            self._close(connection)

    def _on_ready(self, connection: Connection, _sock: object) -> None:
        if connection.watched:  # else an earlier event of the same moment has closed it
            self._guard(connection, self._ready)

    def _watch(self, connection: Connection, events: int) -> None:
        if connection.watched == events:
            return
        self._unwatch(connection)
        connection.watched = events
        self.poller.register(connection.sock, events, partial(self._on_ready, connection))

    def _unwatch(self, connection: Connection) -> None:
        if connection.watched:
            connection.watched = 0
            self.poller.unregister(connection.sock)

    def _leave_waiting(self, connection: Connection) -> None:
        self._unwatch(connection)
        self._waiting.drop(connection)
        self._deadlines.set(connection, _FOREVER)

    def murder_pending(self) -> None:
        """Called at least once a second: act on the deadlines that have come."""
        now_s = time.monotonic()
        for connection in self._deadlines.due(now_s):
            self._guard(connection, self._expire)
        self._deadlines.forget_closed(self.nr_conns)
        if now_s >= self._full_until_s:
            self.worker_connections = sys.maxsize

    def murder_keepalived(self, force: bool = False) -> None:
        """gunicorn's list of kept-alive connections stays empty: murder_pending() does it all."""

    def _cap_keepalive(self, deadline: float) -> None:
        """The worker stops: connections without a request are open for a moment more, and no request is held."""
        self.app.ends()
        for connection in self._waiting:
            begun = connection.out.left is not None or connection.out.more is not None
            if not begun and (connection.request is None or not connection.request.head):
                self._deadlines.set(connection, min(connection.deadline_s, deadline))

    def _refuse(self, connection: Connection, status: int, message: str) -> None:
        connection.refuse(status, message)
        self._end(connection)

    def _end(self, connection: Connection) -> None:
        """Half-close, and read to the client's end: a reset would cut the answer off."""
        self._give_up(connection)
        connection.state, connection.request, connection.rest = State.ENDING, None, b""
        connection.began_s = time.monotonic()
        self._deadlines.set(connection, connection.began_s + self.bounds.linger_s)
        try:
            connection.sock.shutdown(socket.SHUT_WR)
        except OSError:  # the client has reset it
            self._close(connection)
            return
        self._waiting.set(connection)
        self._watch(connection, selectors.EVENT_READ)

    def _give_up(self, connection: Connection) -> None:
        """Take the connection out of every account."""
        self._leave_waiting(connection)

    def _close(self, connection: Connection) -> None:
        if connection.is_closed:
            return
        self._give_up(connection)
        mates = self._addresses.get(connection.address, {})
        if connection in mates:  # else it has failed to begin
            self.nr_conns -= 1
            del mates[connection]
            if not mates:
                del self._addresses[connection.address]
        connection.close()
