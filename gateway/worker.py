"""gunicorn's gthread worker, in which only a complete request has a thread (gateway/front/ draws the states).

gunicorn gives a connection a thread with its first byte, and reads and writes on it; a few hundred slow clients stop
the gateway.  Here the worker's selector reads heads and bodies, waits for clients that read slowly, and waits for the
end of a connection after its last answer (RFC 9112 section 9.6).  Each wait has a deadline.

Where something has a limit, the client that has waited longest gives way: an honest one is done within milliseconds.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from gunicorn.workers.gthread import STOP_KEEPALIVE_LINGER, ThreadWorker

from gateway.front.answering import answer
from gateway.front.bounds import UNCHECKED_BODY_BYTES, Bounds
from gateway.front.connection import CONTINUE, Connection, State
from gateway.front.deadlines import Deadlines
from gateway.front.memory import SharedMemory
from gateway.front.request import BrokenRequest, RequestReader
from gateway.front.visit import TooSlow, Visit
from thaw.errors import Throttled

_READ_BYTES: Final = 64 * 1024
_BODY_READ_BYTES: Final = 256 * 1024
_ACCEPTED_AT_ONCE: Final = 64
_CHECKERS: Final = 4
"""Threads that check keys before long bodies are read.  They are not those that hold requests."""
_FOREVER: Final = float("inf")
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Worker(ThreadWorker):  # type: ignore[misc]
    """Everything but handle() and check() runs on the worker's main thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bounds: Bounds = self.app.bounds
        self._deadlines = Deadlines()
        self._addresses: Counter[str] = Counter()
        self._idle: dict[Connection, None] = {}
        self._unchecked: dict[Connection, int] = {}
        self._unread: dict[Connection, int] = {}
        self._unchecked_bytes = self._unread_bytes = 0
        self._memory = SharedMemory(self.bounds.body_bytes)
        self._line: deque[Connection] = deque()
        self.worker_connections = self.bounds.connections

    def init_process(self) -> None:
        self._checkers = ThreadPoolExecutor(_CHECKERS, "check")
        super().init_process()

    # connections begin -----------------------------------------------------------------------------------------------

    def accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, client = listener.accept()
            except BlockingIOError:
                return
            except OSError as e:
                if e.errno in _NO_ROOM:  # the listener stays readable, and would keep this thread busy
                    self._make_room()
                return  # else the client has gone again
            self._begin(sock, client, listener.getsockname())

    def _begin(self, sock: socket.socket, client: object, server: object) -> None:
        sock.setblocking(False)
        connection = Connection(sock, client, server, self.bounds.answer_s)
        self.nr_conns += 1
        self._addresses[connection.address] += 1
        per_address = self.bounds.per_address
        if connection.address and per_address and self._addresses[connection.address] > per_address:
            self._close(connection)
            return
        if self.nr_conns >= self.bounds.connections:
            self._make_room()
        self._wait_for_request(connection, self.bounds.head_s)

    def _make_room(self) -> None:
        """Close the connection that has waited longest: a stranger's without a request, one with a part of a request,
        else one whose client had a valid key."""
        strangers = (c for c in self._idle if not c.is_known)
        oldest = next(strangers, None) or next(iter(self._unchecked), None) or next(iter(self._idle), None)
        if oldest is not None:
            self._close(oldest)

    def _wait_for_request(self, connection: Connection, within_s: float) -> None:
        connection.state = State.IDLE
        self._idle[connection] = None
        self._deadlines.set(connection, time.monotonic() + within_s)
        self._watch(connection, selectors.EVENT_READ)

    # requests are read -----------------------------------------------------------------------------------------------

    def _on_ready(self, connection: Connection, _sock: object) -> None:
        if not connection.watched:  # an earlier event of the same moment has closed it
            return
        if connection.state is State.WRITING:
            self._write_on(connection)
            return
        try:
            data = connection.sock.recv(_READ_BYTES if connection.reserved is None else _BODY_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(connection)
        elif connection.state is not State.ENDING:  # what comes behind the last request is thrown away
            self._feed(connection, data)

    def _feed(self, connection: Connection, data: bytes) -> None:
        if connection.request is None:
            self._idle.pop(connection, None)
            connection.state, connection.request = State.READING, RequestReader()
            connection.began_s = 0.0
        request = connection.request
        try:
            if request.feed(data):
                self._run(connection)
                return
        except BrokenRequest as e:
            connection.refuse(e.http_status, e.message)
            self._end(connection)
            return
        self._read_on(connection, request)

    def _read_on(self, connection: Connection, request: RequestReader) -> None:
        """The request is not complete."""
        now_s = time.monotonic()
        if not connection.began_s:
            connection.began_s = now_s
            self._deadlines.set(connection, now_s + self.bounds.head_s)
        if connection.reserved is not None:
            if request.n_body > connection.reserved[1]:  # chunks beyond what the application reads: it says so
                self._run(connection)
            return
        if request.head and (request.n_bytes or request.n_body) > UNCHECKED_BODY_BYTES:
            self._check(connection)
            return
        if request.head and request.expects:
            request.expects = False
            connection.send(CONTINUE)
        self._watch(connection, selectors.EVENT_READ)  # it is not watched after a pipelined beginning
        self._count_unchecked(connection, request.n_read)

    def _count_unchecked(self, connection: Connection, n_bytes: int) -> None:
        self._unchecked_bytes += n_bytes - self._unchecked.get(connection, 0)
        self._unchecked[connection] = n_bytes
        while self._unchecked_bytes > self.bounds.unchecked_bytes:
            self._close(next(iter(self._unchecked)))

    def _check(self, connection: Connection) -> None:
        """Have the application look at the head before its long body is read."""
        self._leave_reading(connection)
        connection.state, connection.visit = State.CHECKING, Visit(head_only=True)
        self._submit(self._checkers, connection, self._checked)

    def _checked(self, connection: Connection, done: Future[bool]) -> None:
        visit, request = connection.visit, connection.request
        if visit.max_bytes is None or visit.namespace is None or request is None:
            self.finish_request(connection, done)
            return
        connection.is_known = True
        n_bytes = visit.max_bytes + 1 if request.n_bytes is None else request.n_bytes
        connection.reserved = (visit.namespace, n_bytes)
        if self._memory.take(*connection.reserved):
            self._read_body(connection)
        else:
            connection.state = State.LINED_UP
            self._line.append(connection)
            self._deadlines.set(connection, time.monotonic() + self.bounds.line_s)

    def _read_body(self, connection: Connection) -> None:
        request = connection.request
        assert request is not None  # noqa: S101  it has been checked
        connection.state, connection.began_s = State.READING, time.monotonic()
        self._deadlines.set(connection, self.bounds.body_deadline_s(connection.began_s, 0))
        self._watch(connection, selectors.EVENT_READ)
        if request.expects:
            request.expects = False
            connection.send(CONTINUE)

    def _serve_line(self) -> None:
        for connection in tuple(self._line):
            if connection.reserved is not None and self._memory.take(*connection.reserved):
                self._line.remove(connection)
                self._read_body(connection)

    def _leave_reading(self, connection: Connection) -> None:
        self._unwatch(connection)
        self._unchecked_bytes -= self._unchecked.pop(connection, 0)
        self._deadlines.set(connection, _FOREVER)

    # requests are answered -------------------------------------------------------------------------------------------

    def _run(self, connection: Connection, visit: Visit | None = None) -> None:
        self._leave_reading(connection)
        connection.state, connection.visit = State.RUNNING, visit or Visit()
        self._submit(self.tpool, connection, self.finish_request)

    def _submit(self, pool: ThreadPoolExecutor, connection: Connection, then: Any) -> None:
        done = pool.submit(self.handle, connection)
        done.add_done_callback(lambda future: self.method_queue.defer(then, connection, future))

    def handle(self, conn: Connection) -> bool:
        """Runs on a thread.  Return whether the connection takes another request."""
        try:
            return answer(self.cfg, self.wsgi, conn, keep=self.alive and not conn.visit.head_only)
        except OSError:
            return False  # the client is gone
        except Exception:
            self.log.exception("Error handling request")
            return False

    def finish_request(self, conn: Connection, fs: Future[bool]) -> None:
        conn.keep = not fs.cancelled() and fs.exception() is None and fs.result()
        conn.is_known = conn.is_known or conn.visit.namespace is not None
        if conn.request is not None:
            conn.rest, conn.request = conn.request.rest, None
        self._give_memory_back(conn)
        if conn.out.left is None:
            self._written(conn)
            return
        conn.state, conn.began_s = State.WRITING, time.monotonic()
        self._unread[conn] = len(conn.out.left)
        self._unread_bytes += len(conn.out.left)
        while self._unread_bytes > self.bounds.answer_bytes and len(self._unread) > 1:
            self._close(next(iter(self._unread)))
        if not conn.is_closed:
            self._deadlines.set(conn, self.bounds.answer_deadline_s(conn.began_s, 0))
            self._watch(conn, selectors.EVENT_WRITE)

    def _write_on(self, connection: Connection) -> None:
        left = connection.out.left
        assert left is not None  # noqa: S101  the state says so
        try:
            sent = connection.sock.send(left)
        except BlockingIOError:
            return
        except OSError:
            self._close(connection)
            return
        connection.out.left = left[sent:]
        if sent == len(left):
            connection.out.left = None
            self._unread_bytes -= self._unread.pop(connection)
            self._unwatch(connection)
            self._written(connection)

    def _written(self, connection: Connection) -> None:
        if not connection.keep:
            self._end(connection)
            return
        self._wait_for_request(connection, self.bounds.idle_s if self.alive else STOP_KEEPALIVE_LINGER)
        if connection.rest:
            rest, connection.rest = connection.rest, b""
            self._feed(connection, rest)

    # connections end -------------------------------------------------------------------------------------------------

    def murder_pending(self) -> None:
        """Called at least once a second: act on the deadlines that have come."""
        for connection in self._deadlines.due(time.monotonic()):
            self._expire(connection)
        self._deadlines.forget_closed(self.nr_conns)

    def murder_keepalived(self, force: bool = False) -> None:
        """gunicorn's list of kept-alive connections stays empty: murder_pending() does it all."""

    def _cap_keepalive(self, deadline: float) -> None:
        """The worker stops: connections without a request, or with a part of its head, are open for a moment more."""
        for connection in (*self._idle, *self._unchecked):
            self._deadlines.set(connection, min(connection.deadline_s, deadline))

    def _expire(self, connection: Connection) -> None:
        now_s, request = time.monotonic(), connection.request
        if connection.state is State.READING and request is not None:
            if not request.head:
                connection.refuse(408, f"The head of the request took longer than {self.bounds.head_s:g} s.")
                self._end(connection)
                return
            deadline_s = self.bounds.body_deadline_s(connection.began_s, request.n_read)
            if deadline_s > now_s:
                self._deadlines.set(connection, deadline_s)
                return
            error = TooSlow(f"The body of the request came too slowly: {request.n_body} bytes.")
            self._run(connection, Visit(refusal=error))
        elif connection.state is State.LINED_UP and connection.reserved is not None:
            n_bytes = connection.reserved[1]
            connection.reserved = None
            self._line.remove(connection)
            message = f"Too many long requests at once: there is no room for another {n_bytes} bytes."
            self._run(connection, Visit(refusal=Throttled(message, retry_after_s=self.bounds.line_s)))
        else:
            self._expire_answer(connection, now_s)

    def _expire_answer(self, connection: Connection, now_s: float) -> None:
        if connection.state is State.WRITING and connection.out.left is not None:
            n_read = self._unread[connection] - len(connection.out.left)
            deadline_s = self.bounds.answer_deadline_s(connection.began_s, n_read)
            if deadline_s > now_s:
                self._deadlines.set(connection, deadline_s)
                return
        self._close(connection)

    def _end(self, connection: Connection) -> None:
        """Half-close, and read to the client's end: a reset would cut the answer off."""
        self._leave_reading(connection)
        self._give_memory_back(connection)
        connection.state = State.ENDING
        self._deadlines.set(connection, time.monotonic() + self.bounds.linger_s)
        try:
            connection.sock.shutdown(socket.SHUT_WR)
        except OSError:  # the client has reset it
            self._close(connection)
            return
        self._watch(connection, selectors.EVENT_READ)

    def _close(self, connection: Connection) -> None:
        if connection.is_closed:
            return
        self._leave_reading(connection)
        self._idle.pop(connection, None)
        self._unread_bytes -= self._unread.pop(connection, 0)
        if connection.state is State.LINED_UP:
            self._line.remove(connection)
            connection.reserved = None
        self._give_memory_back(connection)
        self.nr_conns -= 1
        self._addresses[connection.address] -= 1
        if not self._addresses[connection.address]:
            del self._addresses[connection.address]
        connection.close()

    def _give_memory_back(self, connection: Connection) -> None:
        if connection.reserved is not None:
            reserved, connection.reserved = connection.reserved, None
            self._memory.give_back(*reserved)
            self._serve_line()

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
