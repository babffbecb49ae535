"""gunicorn's gthread worker, in which only a complete request has a thread (gateway/front/ draws the states).

gunicorn gives a connection a thread with its first byte, and reads and writes on it; a few hundred slow clients stop
the gateway.  Here the worker's selector reads heads and bodies, waits for clients that read slowly, and waits for the
end of a connection after its last answer (RFC 9112 section 9.6).  Each wait has a deadline.

When something is full, the owner that has most of it loses its oldest connection (front/holdings.py).
"""

from __future__ import annotations

import selectors
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from gunicorn.workers.gthread import STOP_KEEPALIVE_LINGER

from gateway.connections import ConnectionWorker
from gateway.front.answering import answer
from gateway.front.bounds import CHUNKED_STEP_BYTES, UNCHECKED_BODY_BYTES
from gateway.front.connection import CONTINUE, Connection, Out, State, whole_bytes
from gateway.front.holdings import Holdings
from gateway.front.memory import Line, SharedMemory
from gateway.front.request import BrokenRequest, RequestReader
from gateway.front.turns import Turns
from gateway.front.visit import TooSlow, Visit
from thaw.errors import Throttled
from thaw.ids import Namespace

_READ_BYTES: Final = 64 * 1024
_BODY_READ_BYTES: Final = 256 * 1024
_CHECKERS: Final = 4
"""Threads that check keys before long bodies are read.  They are not those that hold requests, and keys that are in
the gateway's memory have as many of their own: others wait for the state server."""
_CONTINUERS: Final = 4
"""Threads that make the next part of an answer.  Requests may hold all others for minutes, and an answer that has begun
cannot be refused."""


class Worker(ConnectionWorker):
    """Everything but handle() runs on the worker's main thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parts = Holdings()
        """The bytes of requests that are bounded by ``unchecked_bytes``."""
        self._unproven: dict[Connection, None] = {}
        """Those of ``_parts`` that a thread has."""
        self._unread = Holdings()
        """The bytes of answers."""
        self._memory = SharedMemory(self.bounds.body_bytes)
        self._line = Line(self._memory)

    def init_process(self) -> None:
        self._checks = Turns(ThreadPoolExecutor(_CHECKERS, "check"), _CHECKERS)
        self._known_checks = Turns(ThreadPoolExecutor(_CHECKERS, "check-known"), _CHECKERS)
        self._continuations = Turns(ThreadPoolExecutor(_CONTINUERS, "go-on"), _CONTINUERS)
        super().init_process()

    def get_thread_pool(self) -> ThreadPoolExecutor:
        pool: ThreadPoolExecutor = super().get_thread_pool()
        self._threads = Turns(pool, self.cfg.threads)
        return pool

    # requests are read -----------------------------------------------------------------------------------------------

    def _ready(self, connection: Connection) -> None:
        if connection.state is State.WRITING:
            self._write_on(connection)
        else:
            self._read(connection)

    def _read(self, connection: Connection) -> None:
        request = connection.request
        n_bytes = _READ_BYTES
        if connection.reserved is not None and request is not None:
            n_bytes = _BODY_READ_BYTES
            if request.n_bytes is not None:  # the bytes behind it have no memory reserved
                n_bytes = min(n_bytes, request.n_bytes - request.n_body)
        try:
            data = connection.sock.recv(n_bytes)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(connection)
        elif connection.state is State.ENDING:  # bytes behind the last request are discarded
            latest_s = connection.began_s + self.bounds.linger_total_s
            self._deadlines.set(connection, min(latest_s, time.monotonic() + self.bounds.linger_on_s))
        else:
            self._feed(connection, data)

    def _feed(self, connection: Connection, data: bytes) -> None:
        if connection.request is None:
            connection.state, connection.request = State.READING, RequestReader()
            connection.began_s = 0.0
        request = connection.request
        try:
            if request.feed(data):
                self._run(connection)
                return
        except BrokenRequest as e:
            self._refuse(connection, e.http_status, e.message)
            return
        self._read_on(connection, request)

    def _read_on(self, connection: Connection, request: RequestReader) -> None:
        """The request is not complete."""
        if connection.reserved is not None:
            n_reserved, max_bytes = connection.reserved[1], connection.visit.max_bytes or 0
            if request.n_body > max_bytes:  # chunks beyond what the application reads: it says so
                self._run(connection)
            elif request.n_body > n_reserved:
                self._reserve(connection, max(request.n_body - n_reserved, CHUNKED_STEP_BYTES))
            return
        if not connection.began_s:
            connection.began_s = time.monotonic()
            self._deadlines.set(connection, connection.began_s + self.bounds.head_s)
            self._waiting.drop(connection)  # as an idle connection it may have been the oldest
            self._waiting.set(connection)
        if request.head and (request.n_bytes or request.n_body) > UNCHECKED_BODY_BYTES:
            self._check(connection, request)
            return
        if request.head and request.expects:
            request.expects = False
            connection.send(CONTINUE)
        self._watch(connection, selectors.EVENT_READ)  # it is not watched after a pipelined beginning
        self._hold(connection, request.n_read)

    def _hold(self, connection: Connection, n_bytes: int) -> None:
        """Count the request, which may close it."""
        self._parts.set(connection, n_bytes)
        if self._parts.total > self.bounds.unchecked_bytes:
            for c in [c for c in self._unproven if c.visit.namespace is not None]:
                self._forget_parts(c)
        while self._parts.total > self.bounds.unchecked_bytes:
            if not self._close_one(c for c in self._parts.heaviest() if c in self._waiting):
                return  # threads have all of them

    def _forget_parts(self, connection: Connection) -> None:
        self._parts.drop(connection)
        self._unproven.pop(connection, None)

    def _check(self, connection: Connection, request: RequestReader) -> None:
        """Have the application look at the head before its long body is read."""
        self._leave_waiting(connection)
        connection.visit, connection.out = Visit(head_only=True), Out(None, self.bounds.answer_s)
        known = not request.is_web and self.app.knows(request.authorization)
        self._take_turn(self._known_checks if known else self._checks, connection)

    def _reserve(self, connection: Connection, n_bytes: int) -> None:
        """Read the body when there is memory for ``n_bytes`` more of it."""
        namespace = connection.namespace
        assert namespace is not None  # noqa: S101  it has been checked
        connection.wants, connection.since_s = n_bytes, time.monotonic()
        if self._line.take(connection, namespace):
            self._read_body(connection)
        elif self._line.join(connection, namespace):
            self._unwatch(connection)
            connection.state = State.LINED_UP
            self._waiting.set(connection)
            self._deadlines.set(connection, connection.since_s + self.bounds.line_s)
            if connection.reserved is None and connection.request is not None:
                self._hold(connection, connection.request.n_read)
        else:
            self._refuse_body(connection)

    def _read_body(self, connection: Connection) -> None:
        request, namespace = connection.request, connection.namespace
        assert request is not None and namespace is not None  # noqa: S101, PT018  it has been checked
        n_before = 0 if connection.reserved is None else connection.reserved[1]
        connection.reserved = (namespace, n_before + connection.wants)
        self._waiting.drop(connection)
        self._forget_parts(connection)
        connection.state = State.READING
        connection.began_s += time.monotonic() - connection.since_s  # the wait for memory is not the client's fault
        self._deadlines.set(connection, self.bounds.body_deadline_s(connection.began_s, request.n_body))
        self._watch(connection, selectors.EVENT_READ)
        if request.expects:
            request.expects = False
            connection.send(CONTINUE)

    def _refuse_body(self, connection: Connection) -> None:
        message = f"Too many long requests at once: there is no room for another {connection.wants} bytes."
        self._run(connection, Visit(refusal=Throttled(message, retry_after_s=self.bounds.line_s)))

    # requests have threads -------------------------------------------------------------------------------------------

    def _run(self, connection: Connection, visit: Visit | None = None) -> None:
        self._leave_waiting(connection)
        connection.visit = visit or Visit()
        if connection.reserved is not None and connection.request is not None:
            self._trim(connection.reserved, connection, connection.request.n_read)
        self._take_turn(self._threads, connection)

    def _trim(self, reserved: tuple[Namespace, int], connection: Connection, n_bytes: int) -> None:
        """Give back the memory that the body has not needed."""
        namespace, n_reserved = reserved
        if n_bytes < n_reserved:
            connection.reserved = (namespace, n_bytes)
            self._memory.give_back(namespace, n_reserved - n_bytes)
            self._serve_line()

    def _take_turn(self, turns: Turns, connection: Connection) -> None:
        request = connection.request
        n_read = 0 if request is None else request.n_read  # None: an answer goes on
        if turns.take():
            self._start(turns, connection)
            if connection.namespace is None:  # else its bytes are bounded by the requests that its namespace may hold
                self._hold(connection, n_read)
            return
        connection.state, connection.turns = State.QUEUED, turns
        turns.join(connection, connection.namespace or self._known_namespace(request))
        self._waiting.set(connection)
        self._deadlines.set(connection, time.monotonic() + self.bounds.line_s)
        if connection.reserved is None:
            self._hold(connection, n_read)

    def _known_namespace(self, request: RequestReader | None) -> Namespace | None:
        """The namespace of the request's key, if the gateway knows it."""
        known: Namespace | None = self.app.known_namespace("" if request is None else request.authorization)
        return known

    def _start(self, turns: Turns, connection: Connection) -> None:
        connection.state = State.CHECKING if connection.visit.head_only else State.RUNNING
        if connection.state is State.CHECKING:
            self._deadlines.set(connection, time.monotonic() + self.bounds.line_s)
        if connection.namespace is None:
            self._unproven[connection] = None
        else:
            self._parts.drop(connection)
        done = turns.pool.submit(self.handle, connection, connection.visit, connection.out)
        done.add_done_callback(partial(self.method_queue.defer, self._done, turns, connection, connection.visit))

    def handle(self, conn: Connection, visit: Visit, out: Out) -> bool:
        """Runs on a thread.  Return whether the connection takes another request."""
        with self.app.computing(conn.namespace or self._known_namespace(conn.request)):
            return self._answer(conn, visit, out)

    def _answer(self, conn: Connection, visit: Visit, out: Out) -> bool:
        try:
            if out.more is not None:
                more, out.more = out.more, None
                return more.go_on()
            return answer(self.cfg, self.wsgi, conn, visit, out, keep=self.alive and not visit.head_only)
        except OSError:
            return False  # the client is gone
        except Exception:
            self.log.exception("Error handling request")
            return False

    def _done(self, turns: Turns, connection: Connection, visit: Visit, job: Future[bool]) -> None:
        following = turns.pass_on()
        if following is not None:
            following.turns = None
            self._leave_waiting(following)
            self._guard(following, partial(self._start, turns))
        if connection.visit is visit and not connection.is_closed:  # else the worker has given it up
            self._guard(connection, self._after_thread, job)

    # requests are answered -------------------------------------------------------------------------------------------

    def _after_thread(self, connection: Connection, job: Future[bool]) -> None:
        visit, request = connection.visit, connection.request
        if visit.namespace is not None and visit.namespace != connection.namespace:
            self._forget_parts(connection)
            self._know(connection, visit.namespace)
        if visit.head_only and visit.max_bytes is not None and request is not None and connection.namespace is not None:
            connection.out = Out(connection.sock, self.bounds.answer_s)
            connection.began_s = time.monotonic()
            steps = max(request.n_body, min(visit.max_bytes, CHUNKED_STEP_BYTES))
            self._reserve(connection, steps if request.n_bytes is None else request.n_bytes)
            return
        if connection.out.is_broken:
            self._close(connection)
            return
        connection.keep = not job.cancelled() and job.exception() is None and job.result()
        self._forget_parts(connection)
        if request is not None:
            connection.rest, connection.request = request.rest, None
        self._give_memory_back(connection)
        if connection.out.left is None:
            self._written(connection)
        else:
            self._leave_to_read(connection, connection.out.left)

    def _know(self, connection: Connection, namespace: Namespace) -> None:
        if connection.namespace is None:
            mates = self._addresses[connection.address]
            del mates[connection]
            mates[connection] = None  # strangers give way before it
        if connection.reserved is None:
            connection.namespace = namespace

    def _leave_to_read(self, connection: Connection, left: memoryview) -> None:
        out, now_s = connection.out, time.monotonic()
        connection.state = State.WRITING
        if not out.began_s:
            out.began_s, out.n_read = now_s, 0  # the client has not yet read the bytes that the kernel took at once
        elif connection.since_s > out.began_s:
            out.began_s += now_s - connection.since_s  # the wait for the next part is not the client's fault
        self._deadlines.set(connection, self.bounds.answer_deadline_s(out.began_s, out.n_read))
        self._waiting.set(connection)
        self._watch(connection, selectors.EVENT_WRITE)
        self._unread.set(connection, whole_bytes(left) + len(connection.rest))
        while self._unread.total > self.bounds.answer_bytes and len(self._unread) > 1:
            self._close(max(self._unread.heaviest(), key=partial(self._seconds_behind, now_s)))

    def _seconds_behind(self, now_s: float, connection: Connection) -> float:
        """Return how much later than allowed the client has read its part of the answer."""
        return now_s - connection.out.began_s - connection.out.n_read / self.bounds.rate

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
        connection.out.n_read += sent
        if sent < len(left):
            left = left[sent:]
            if 2 * len(left) < whole_bytes(left):
                left = memoryview(bytes(left))
                self._unread.set(connection, len(left) + len(connection.rest))
            connection.out.left = left
            return
        connection.out.left = None
        self._unread.drop(connection)
        self._leave_waiting(connection)
        if connection.out.more is not None:
            connection.since_s = time.monotonic()
            self._take_turn(self._continuations, connection)
        else:
            self._written(connection)

    def _written(self, connection: Connection) -> None:
        if not connection.keep:
            self._end(connection)
            return
        self._wait_for_request(connection, self.bounds.idle_s if self.alive else STOP_KEEPALIVE_LINGER)
        if self.nr_conns >= self.bounds.connections:  # clients that send one request after another would keep it full
            if not self._close_one(self._waiting.heaviest(more_than=1)):
                self._close(connection)  # and not a newcomer's, whose first request may be on its way
            if connection.is_closed:
                return
        if connection.rest:
            rest, connection.rest = connection.rest, b""
            self._feed(connection, rest)

    # connections end -------------------------------------------------------------------------------------------------

    def _expire(self, connection: Connection) -> None:
        state, request = connection.state, connection.request
        if state is State.READING and request is not None:
            self._expire_reading(connection, request)
        elif state is State.LINED_UP:
            self._leave_line(connection)
            self._refuse_body(connection)
        elif state is State.QUEUED and connection.out.more is not None:
            self._close(connection)  # in the middle of its answer
        elif state in (State.QUEUED, State.CHECKING):
            connection.visit, connection.out = Visit(), Out(connection.sock, self.bounds.answer_s)
            self._refuse(connection, 503, f"No thread was free for this request within {self.bounds.line_s:g} s.")
        elif state is State.WRITING and connection.out.left is not None:
            out = connection.out
            self._expire_unless_later(connection, self.bounds.answer_deadline_s(out.began_s, out.n_read))
        else:
            self._close(connection)

    def _expire_unless_later(self, connection: Connection, deadline_s: float) -> None:
        if deadline_s > time.monotonic():
            self._deadlines.set(connection, deadline_s)
        else:
            self._close(connection)

    def _expire_reading(self, connection: Connection, request: RequestReader) -> None:
        deadline_s = self.bounds.body_deadline_s(connection.began_s, request.n_body)
        if not request.head:
            self._refuse(connection, 408, f"The head of the request took longer than {self.bounds.head_s:g} s.")
        elif deadline_s > time.monotonic():
            self._deadlines.set(connection, deadline_s)
        else:
            error = TooSlow(f"The body of the request came too slowly: {request.n_body} bytes.")
            self._run(connection, Visit(refusal=error))

    def _give_up(self, connection: Connection) -> None:
        super()._give_up(connection)
        self._forget_parts(connection)
        self._unread.drop(connection)
        if connection.turns is not None:
            connection.turns.leave(connection)
            connection.turns = None
        if connection.state is State.LINED_UP:
            self._leave_line(connection)
        self._give_memory_back(connection)

    def _leave_line(self, connection: Connection) -> None:
        assert connection.namespace is not None  # noqa: S101  it has been checked
        self._line.leave(connection, connection.namespace)
        connection.state = State.READING

    def _give_memory_back(self, connection: Connection) -> None:
        if connection.reserved is not None:
            reserved, connection.reserved = connection.reserved, None
            self._memory.give_back(*reserved)
            self._serve_line()

    def _serve_line(self) -> None:
        for connection in tuple(self._line.serve()):
            self._guard(connection, self._read_body)
