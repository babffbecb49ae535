"""Streams that outlast their client's connection: each runs on a thread of its own, and its client reads beside it.

::

    llm_tokens() ──▶ thread of the run ──▶ Kept (kept.py) ──▶ Reader: the request's thread ──▶ client
                                                     └──▶ after a reconnection another Reader, from the start

A stream counts in its namespace's throttle while it runs or is read.  A client that drops connections thus gets no more
runs, and no more of the gateway's threads, than one that stays.  A reader that lags behind makes its run wait.  All
state is behind one lock; nothing under it blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Final

from gateway.processor import computes_freely, waiting
from gateway.serving.answers.kept import Bounds, Kept, Shelf, token_bytes
from gateway.serving.answers.openai_format import aggregate, chunk_fields
from gateway.serving.call import Call
from gateway.serving.dispatch import Dispatcher, time_limit
from gateway.serving.hangup import Hangup
from gateway.serving.outcome import outcome_of
from gateway.serving.routing.throttle import Throttle
from gateway.serving.runs import Outcome, llm_tokens
from relay.protocol.messages import RunFinished, RunToken
from relay.state.streams import HandedOver
from thaw.action import Action
from thaw.activation import ActivationStatus
from thaw.errors import Conflict, ProtocolError, ThawError
from thaw.ids import ActivationId
from thaw.process.lasting import LastingThread

_LEAVES_S: Final = 1.0
"""How long a reader that was replaced may take to tell its client so.  Then its connection is cut: it may be blocked in
a write, and nothing else would free its thread."""
_LATE_S: Final = 5.0
"""A run ends by its time limit.  A reader that waits for so much longer gives up by itself."""


@dataclass(slots=True, eq=False)
class Stream:
    call: Call
    kept: Kept
    changed: threading.Condition
    asked: Action  # as the request found it; while it waits, the call may get a later one
    reader: Reader | None = None
    counted: bool = True
    away: bool = False  # it has given the place of its request's thread back
    running: bool = True
    replacing: bool = False  # a reader waits for its predecessor to leave
    moved: bool = False  # another gateway runs it and writes its record

    def wake(self) -> None:
        with self.changed:
            self.changed.notify_all()


@dataclass(slots=True, eq=False)
class Reader:
    """One connection to a stream.  ``cut`` breaks it."""

    stream: Stream
    hangup: Hangup
    cut: Callable[[], None]
    left: bool = False
    unread_bytes: int = field(init=False)  # bytes of tokens that its thread has not fetched
    _n_tokens: int = 0
    _n_notices: int = field(init=False)

    def __post_init__(self) -> None:
        kept = self.stream.kept
        self.unread_bytes = kept.n_bytes - kept.body_bytes
        self._n_notices = len(kept.notices) - (1 if kept.waits else 0)

    def steps(self) -> Iterator[str | RunToken | RunFinished]:
        """Everything from the first token on, as llm_tokens() yields it.  Raises the error in which the run ended,
        ClientGone, and Conflict when another client reads now."""
        with self.hangup.waking(self.stream.wake):
            while True:
                notices, tokens, end = self._next()
                yield from notices
                yield from tokens
                if isinstance(end, ThawError):
                    raise end
                if end is not None:
                    yield end
                    return

    def _next(self) -> tuple[Sequence[str], Sequence[RunToken], RunFinished | ThawError | None]:
        stream, kept = self.stream, self.stream.kept
        computes_freely()
        with stream.changed:
            left_s = max(0.0, stream.call.wait_deadline_s - time.monotonic()) + _LATE_S
            if not stream.changed.wait_for(self._has_news, left_s):
                raise time_limit(stream.call)
            self.hangup.check()
            if stream.reader is not self:
                raise Conflict("Another client goes on with this answer.")
            notices, self._n_notices = kept.notices[self._n_notices :], len(kept.notices)
            tokens, self._n_tokens = kept.tokens[self._n_tokens :], len(kept.tokens)
            self.unread_bytes = 0
            stream.changed.notify_all()  # the run may wait for this
            return notices, tokens, kept.end

    def _has_news(self) -> bool:
        kept = self.stream.kept
        more = len(kept.tokens) > self._n_tokens or len(kept.notices) > self._n_notices
        return more or kept.end is not None or self.hangup.is_set or self.stream.reader is not self


class Streams:
    def __init__(
        self,
        dispatcher: Dispatcher,
        ended: Callable[[Call, Outcome], None],
        throttle: Throttle,
        bounds: Bounds,
        threads: int,
    ) -> None:
        """``ended`` submits the record.  ``threads``: for all runs whose requests hold a thread, and all that have left
        theirs (throttle.py)."""
        self._dispatcher, self._ended, self._throttle = dispatcher, ended, throttle
        self._lock = threading.Lock()
        self._shelf, self._unread_bytes = Shelf(bounds), bounds.stream_bytes
        self._streams: dict[ActivationId, Stream] = {}  # those on the shelf
        self._running: set[Stream] = set()
        self._due, self._idle = threading.Condition(self._lock), threading.Condition(self._lock)
        self._stopping = False
        self._pool = ThreadPoolExecutor(threads, "stream")
        self._thread = LastingThread(self._expire, "streams")

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the runs that go on without a client, so that their records are submitted."""
        with self._lock:
            self._stopping = True
            self._due.notify_all()
            left = list(self._streams.values())
        for stream in left:
            stream.call.hangup.set()
        with self._lock:
            self._idle.wait_for(lambda: not self._running, timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def n_absent(self) -> int:
        with self._lock:
            return self._shelf.n_absent

    # calls by requests ---------------------------------------------------------------------------------------------

    def begin(
        self,
        call: Call,
        hangup: Hangup,
        cut: Callable[[], None],
        *,
        body_bytes: int = 0,
        handed: HandedOver | None = None,
    ) -> Reader:
        """Run ``call``, which the throttle has counted, and read its answer.  ``handed`` is the part that another
        gateway had.  Raises Conflict when it runs here already."""
        kept = Kept(call.activation_id, body_bytes)
        stream = Stream(call, kept, threading.Condition(self._lock), call.action)
        if handed is not None:
            kept.tokens.extend(handed.tokens)
            kept.end = handed.end
            call.emitted.extend(t.token_id for t in handed.tokens)
            call.model_version = handed.model_version
            call.adapter = handed.tokens[0].adapter if handed.tokens else ""
        stream.running = kept.end is None
        if not stream.running:
            call.payload, kept.body_bytes = chunk_fields(call.payload), 0
        with self._lock:
            if call.activation_id in self._streams:
                raise Conflict("Another client goes on with this answer.")
            self._shelf.put(kept)
            self._streams[call.activation_id] = stream
            if stream.running:
                self._running.add(stream)
            stream.reader = reader = Reader(stream, hangup, cut)
        if stream.running:
            self._pool.submit(self._run, stream)
        return reader

    def find(self, activation_id: ActivationId) -> Stream | None:
        with self._lock:
            return self._streams.get(activation_id)

    def attach(self, activation_id: ActivationId, hangup: Hangup, cut: Callable[[], None]) -> Reader | None:
        """Read a stream that is here, in the place of its present reader.  Raises Throttled, and Conflict while another
        client does the same."""
        with self._lock:
            stream = self._streams.get(activation_id)
            if stream is None:
                return None
            namespace = stream.call.subject.namespace
            self._throttle.enter_again(namespace) if stream.counted else self._throttle.enter(namespace)
            stream.counted = True
            if stream.replacing:  # each that waits holds a thread, so there is one
                raise Conflict("Another client goes on with this answer.")
            if stream.away:
                self._throttle.return_to_thread(namespace)
                stream.away = False
            replaced, stream.reader = stream.reader, Reader(stream, hangup, cut)
            reader, stream.replacing = stream.reader, replaced is not None
            self._shelf.attach(stream.kept)
        self._see_off(stream, replaced)
        return reader

    def leave(self, reader: Reader, *, resumable: bool) -> bool:
        """The reader's connection is over.  ``resumable``: its client may come back, and has an event id.  Return
        whether the stream is kept for it."""
        stream = reader.stream
        with self._lock:
            if reader.left:
                return False
            reader.left = True
            stream.changed.notify_all()
            if stream.reader is not reader:
                return False
            stream.reader = None
            dropped = self._shelf.leave(stream.kept, time.monotonic(), resumable=resumable)
            self._count_out(stream)
            stream.away = stream.counted and self._throttle.leave_thread(stream.call.subject.namespace)
            self._due.notify_all()
            cut = self._forget(dropped)
        _end(cut)
        return not stream.kept.dropped

    # calls by other gateways ---------------------------------------------------------------------------------------

    def picture(self, activation_id: ActivationId) -> HandedOver | None:
        """Return the data with which another gateway can continue a stream; None if it is not here or has failed."""
        with self._lock:
            stream = self._streams.get(activation_id)
            if stream is None or isinstance(stream.kept.end, ThawError):
                return None
            age_ms = round((time.monotonic() - stream.call.received_s) * 1000)
            call = stream.call
            return HandedOver(tuple(stream.kept.tokens), stream.kept.end, age_ms, call.losses, call.model_version)

    def give_away(self, activation_id: ActivationId) -> None:
        """Another gateway has the stream now."""
        with self._lock:
            stream = self._streams.get(activation_id)
            if stream is None:
                return
            stream.moved = True
            replaced, stream.reader = stream.reader, None
            self._count_out(stream)
            cut = self._forget([self._shelf.drop(stream.kept)])
        _end(cut)
        self._see_off(stream, replaced)

    def _see_off(self, stream: Stream, replaced: Reader | None) -> None:
        """A reader was replaced: it tells its client so and leaves, or is cut."""
        with waiting(), self._lock:
            stream.changed.notify_all()
            left = replaced is None or stream.changed.wait_for(lambda: replaced.left, _LEAVES_S)
            stream.replacing = False
        if replaced is not None and not left:
            replaced.cut()

    # a stream's own thread -----------------------------------------------------------------------------------------

    def _run(self, stream: Stream) -> None:
        outcome, end = self._to_end(stream)
        if not stream.moved:
            self._ended(stream.call, outcome)
        with self._lock:
            stream.running = False
            stream.call.payload = chunk_fields(stream.call.payload)
            self._shelf.finish(stream.kept, end)
            stream.changed.notify_all()
            self._count_out(stream)
            self._running.discard(stream)
            self._idle.notify_all()

    def _to_end(self, stream: Stream) -> tuple[Outcome, RunFinished | ThawError]:
        call = stream.call
        try:
            with closing(llm_tokens(self._dispatcher, call)) as steps:
                for step in steps:
                    if isinstance(step, RunFinished):
                        result = aggregate(call, stream.kept.tokens, step)
                        return Outcome(ActivationStatus.SUCCESS, result, step), step
                    if self._add(stream, step):
                        self._wait_for_reader(stream)
            error: ThawError = ProtocolError("the answer ended without an end")
        except ThawError as e:
            error = e
        except Exception as e:  # noqa: BLE001  an error of our own ends the activation, and its reader learns of it
            error = self._dispatcher.fault(call, e)
        return outcome_of(error), error

    def _add(self, stream: Stream, step: str | RunToken) -> bool:
        """Return whether the run must wait for its reader."""
        with self._lock:
            cut = self._forget(self._shelf.add(stream.kept, step))
            if stream.reader is not None and isinstance(step, RunToken):
                stream.reader.unread_bytes += token_bytes(step)
            stream.changed.notify_all()
            lags = self._lags(stream)
        _end(cut)
        return lags

    def _wait_for_reader(self, stream: Stream) -> None:
        """A client that reads too slowly makes its run wait, as one does whose stream is not resumable.  The wait is
        over when the reader fetches its tokens, is replaced or leaves.  Raises ClientGone, TimeLimitExceeded."""
        call = stream.call

        def over() -> bool:
            has_gone = stream.reader is not None and stream.reader.hangup.is_set
            return has_gone or call.hangup.is_set or not self._lags(stream)

        with call.hangup.waking(stream.wake), self._lock:
            left_s = max(0.0, call.wait_deadline_s - time.monotonic())
            if not stream.changed.wait_for(over, left_s):
                raise time_limit(call)
            reader = stream.reader
        call.hangup.check()
        if reader is not None and reader.hangup.is_set:
            reader.cut()  # it may be blocked in a write, and would not leave

    def _lags(self, stream: Stream) -> bool:
        return stream.reader is not None and stream.reader.unread_bytes > self._unread_bytes

    # the shelf -----------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        while not self._stopping:
            with self._lock:
                if not self._stopping:
                    due_s = self._shelf.due_s()
                    self._due.wait(None if due_s is None else max(0.0, due_s - time.monotonic()))
                cut = self._forget(self._shelf.expire(time.monotonic()))
            _end(cut)

    def _forget(self, dropped: Sequence[Kept]) -> Sequence[Stream]:
        """Return the streams whose runs must end, for _end()."""
        return [self._streams.pop(kept.activation_id) for kept in dropped]

    def _count_out(self, stream: Stream) -> None:
        if stream.counted and not stream.running and stream.reader is None:
            stream.counted = False
            self._throttle.leave(stream.call.subject.namespace, away=stream.away)
            stream.away = False


def _end(streams: Sequence[Stream]) -> None:
    """Not under the lock: this closes sockets."""
    for stream in streams:
        stream.call.hangup.set()


def cutting(sock: object) -> Callable[[], None]:
    """Return a function that breaks a request's connection (a socket; a test client has none)."""
    shutdown = getattr(sock, "shutdown", None)

    def cut() -> None:
        if shutdown is not None:
            with suppress(OSError):
                shutdown(2)

    return cut
