"""The proxy's side of its engine process: it starts the engine, submits requests and hands each one its events."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from relay.clients.channel import Channel, ChannelClosed
from relay.protocol.messages import LlmInit
from thaw.errors import (
    ErrorInfo,
    InstanceGone,
    PlatformError,
    ProtocolError,
    ThawError,
    TimeLimitExceeded,
    WorkerLost,
    from_info,
)
from thaw.logs import Log
from thaw.process.lasting import LastingThread
from thaw_runtime.engine.killed_or_failed import reap, start_error
from thaw_runtime.engine.protocol import (
    Checked,
    Consolidated,
    ConsolidationEnded,
    EmbedRequest,
    EngineRequest,
    EngineStarted,
    Event,
    Failed,
    Finished,
    Usage,
)
from thaw_runtime.engine.wire import (
    Abort,
    AdapterEnded,
    Consolidate,
    ConsolidationDone,
    Embed,
    EngineCheck,
    EngineChecked,
    EngineReady,
    EngineStart,
    EngineStartFailed,
    Events,
    LoadAdapter,
    Message,
    Submit,
    decode,
    encode,
)
from thaw_runtime.process.stops import StopWatch

log = Log("runtime-proxy")


@dataclass(slots=True)
class Answer:
    """The events of one request, in order.  The last one is Finished or Failed."""

    request_id: str
    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)

    def next(self, timeout_s: float | None) -> list[Event]:
        """Wait for at least one event; return all that have come.  Raises TimeLimitExceeded."""
        try:
            events = [self.events.get(timeout=timeout_s)]
            while not self.events.empty():
                events.append(self.events.get_nowait())
        except queue.Empty:
            raise TimeLimitExceeded("the action ran longer than its time limit") from None
        return events


class EngineLink:
    """The link to one engine process.  It has one reader thread; any number of threads may submit."""

    def __init__(self, channel: Channel, pid: int) -> None:
        self._channel = channel
        self._pid = pid
        self._lock = threading.Lock()
        self._answers: dict[str, Answer] = {}
        self._outcome: queue.SimpleQueue[EngineStarted | Exception] = queue.SimpleQueue()
        self._checked: queue.SimpleQueue[Checked | ThawError] = queue.SimpleQueue()
        self._consolidation: queue.SimpleQueue[ConsolidationEnded] | None = None
        self._loads: dict[int, queue.SimpleQueue[ErrorInfo | None]] = {}  # the waiting loads of adapters, by number
        self._numbers = count(1)
        self._lost: ErrorInfo | None = None
        self.stops = StopWatch(pid, "engine")
        channel.set_timeout(None)

    def listen(self, on_lost: Callable[[int], None]) -> None:
        """Begin to read the engine's messages.  The reader thread calls ``on_lost`` once, after the open requests have
        failed, with the signal that killed the engine, or 0."""
        self.stops.begin()
        LastingThread(partial(self._read, on_lost), "engine-link").start()

    def begin_start(self, init: LlmInit, descriptor_socket: str) -> None:
        self._send(EngineStart(init, descriptor_socket))

    def wait_started(self) -> EngineStarted:
        """Wait until the engine has started.  Raises the error that kept it from starting.  There is no deadline, so
        that a start that makes progress is never interrupted.
        """
        outcome = self._outcome.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def give_up_start(self, error: Exception) -> None:
        """Let :meth:`wait_started` raise ``error``, unless the engine's own outcome was first."""
        self._outcome.put(error)

    def begin_check(self, init: LlmInit, descriptor_socket: str) -> None:
        self._send(EngineCheck(init, descriptor_socket))

    def wait_checked(self) -> Checked:
        """Wait for the engine's answer.  Raises the error with which the start would fail."""
        outcome = self._checked.get()
        if isinstance(outcome, ThawError):
            raise outcome
        return outcome

    def submit(self, request: EngineRequest | EmbedRequest) -> Answer:
        """Give the engine a request.  Raises InstanceGone, ProtocolError for a request that does not fit in a frame."""
        answer = Answer(request.request_id)
        with self._lock:
            if self._lost is not None:
                raise InstanceGone("the engine has died")
            self._answers[request.request_id] = answer
        try:
            self._send(Embed(request) if isinstance(request, EmbedRequest) else Submit(request))
        except ProtocolError:
            with self._lock:
                self._answers.pop(request.request_id, None)
            raise
        return answer

    def abort(self, request_id: str) -> None:
        """Stop computing a request; its reader gets Finished("abort").  A request that has ended is ignored."""
        with self._lock:
            answer = self._answers.pop(request_id, None)
        if answer is not None:
            self._send(Abort(request_id))
            answer.events.put(Finished("abort", Usage(0, 0)))

    def consolidate(self) -> Consolidated:
        """Let the engine become one worker, and wait for that.  Raises the error that kept it from it, WorkerLost when
        the engine ends or has ended.

        There is no deadline: how long it takes depends on the bytes that are missing.  The caller begins one at a time.
        """
        ended: queue.SimpleQueue[ConsolidationEnded] = queue.SimpleQueue()
        with self._lock:
            if self._lost is not None:
                raise from_info(self._lost)
            self._consolidation = ended
        self._send(Consolidate())
        outcome = ended.get()
        if isinstance(outcome, ErrorInfo):
            raise from_info(outcome)
        return outcome

    def load_adapter(self, name: str, replaces: str, config: str, weights_fd: int) -> None:
        """Let the engine load an adapter, and wait for that.  The caller closes ``weights_fd``.  Raises the error that
        kept the engine from it, InstanceGone, ProtocolError for a config that does not fit in a frame.  There is no
        deadline: the engine answers after its present step."""
        ended: queue.SimpleQueue[ErrorInfo | None] = queue.SimpleQueue()
        with self._lock:
            if self._lost is not None:
                raise InstanceGone("the engine has died")
            number = next(self._numbers)
            self._loads[number] = ended
        try:
            self._send(LoadAdapter(number, name, replaces, config), (weights_fd,))
        except ProtocolError:
            with self._lock:
                self._loads.pop(number, None)
            raise
        error = ended.get()
        if error is not None:
            raise from_info(error)

    def inflight(self) -> int:
        with self._lock:
            return len(self._answers)

    def _send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        try:
            self._channel.send(encode(message), fds)
        except OSError:
            pass  # the reader thread sees the same end and fails the request

    def _read(self, on_lost: Callable[[int], None]) -> None:
        try:
            while True:
                self._deliver(decode(self._channel.receive()[0]))
        except (ChannelClosed, OSError):
            on_lost(self._lose())
        except ProtocolError as e:  # a damaged message: what follows it in the stream cannot be read either
            on_lost(self._lose(e.message))

    def _deliver(self, message: Message) -> None:
        if isinstance(message, Events):
            for request_id, event in message.events:
                self._deliver_event(request_id, event)
        elif isinstance(message, EngineReady):
            self._outcome.put(message.started)
        elif isinstance(message, EngineStartFailed):
            self._outcome.put(from_info(message.error))
        elif isinstance(message, EngineChecked):
            error = from_info(message.error) if message.error is not None else PlatformError("an empty answer")
            self._checked.put(message.checked or error)
        elif isinstance(message, ConsolidationDone):
            self._end_consolidation(message.outcome)
        elif isinstance(message, AdapterEnded):
            self._end_load(message.number, message.error)
        else:
            raise ProtocolError(f"the engine sent {type(message).__name__}")

    def _deliver_event(self, request_id: str, event: Event) -> None:
        with self._lock:
            answer = self._answers.get(request_id)
            if answer is not None and isinstance(event, Finished | Failed):
                del self._answers[request_id]
        if answer is not None:
            answer.events.put(event)

    def _end_load(self, number: int, error: ErrorInfo | None) -> None:
        with self._lock:
            ended = self._loads.pop(number, None)
        if ended is not None:
            ended.put(error)

    def _end_consolidation(self, outcome: ConsolidationEnded) -> None:
        with self._lock:
            ended, self._consolidation = self._consolidation, None
        if ended is not None:
            ended.put(outcome)

    def _lose(self, damaged: str = "") -> int:
        """Fail every request of the engine.  Returns the signal that killed it, or 0 if it ended by itself or is ended
        here, because a message of it is ``damaged``."""
        signal_number, how = reap(self._pid, damaged)
        error = ErrorInfo(WorkerLost.__name__, f"the engine process {how}")
        log.event("engine_lost", pid=self._pid, reason=error.message)
        with self._lock:
            self._lost = error
            answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.events.put(Failed(error))
        self._outcome.put(start_error(how, signal_number))
        self._checked.put(start_error(how, signal_number))
        self._end_consolidation(error)
        for number in list(self._loads):
            self._end_load(number, error)
        return signal_number
