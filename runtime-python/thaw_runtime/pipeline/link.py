"""One stage's messages to and from its neighbours: batches down the chain, tokens and heartbeats back to stage 0.

A receiver thread takes messages while the stage computes, so batch i + 1 has arrived when batch i is done.  Every stage
receives a message from its predecessor at least every ``beat_s`` seconds: stage 0 sends a Beat down the chain, and the
last stage sends it back.  So a neighbour that has been silent for ``lost_after_s`` seconds is lost, whatever its host
reports.  A stage that ends on its own sends a Lost at once.  When a stage's transport changes the path to its successor
(thaw/tracing/hops.py), the stage tells stage 0 with a PathTaken, before the first message on the new path.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from relay.protocol.frames import FLAG_TENSORS, FrameHeader, FrameKind, Priority
from relay.protocol.messages import LlmInit
from relay.transports.base import Message, Transport
from relay.transports.connect import connect
from thaw.errors import ErrorInfo, InitFailed, ProtocolError, ThawError, WorkerLost
from thaw.process.lasting import LastingThread
from thaw.tracing.hops import HopPath
from thaw_runtime.pipeline.kv_wire import KvPart, decode_kv_part, encode_kv_part
from thaw_runtime.pipeline.wire import (
    Batch,
    Beat,
    Control,
    Lost,
    Parted,
    PathTaken,
    Sampled,
    decode_batch,
    decode_control,
    encode_batch,
    encode_control,
)

_BATCH: Final = FrameHeader(FrameKind.HIDDEN_STATES, Priority.INFERENCE, FLAG_TENSORS)
_CONTROL: Final = FrameHeader(FrameKind.CONTROL, Priority.INFERENCE)
_KV: Final = FrameHeader(FrameKind.KV, Priority.KV, FLAG_TENSORS)


@dataclass(frozen=True, slots=True)
class Patience:
    """Time limits in seconds; tests use shorter ones."""

    beat_s: float = 5.0
    """The pause between two beats.  A beat is four messages of 100 bytes per group, and an object store bills each, so
    beats come no more often than the detection of a loss needs.
    """
    lost_after_s: float = 20.0
    """Four beats: a busy host may delay a thread for a second, and an object store may delay an answer for several."""
    first_word_s: float = 3600.0
    """The limit before a neighbour's first message: until then it may still be fetching (see ARRIVAL_DEADLINE_S in
    weights/readable_segment.py).
    """
    send_s: float = 30.0
    """A receiver's thread always reads, so a window that stays full for this long means that the receiver is lost."""


PATIENCE: Final = Patience()
PART_S: Final = 1.0
"""How long stage 0, which computes alone by then, tries to tell that it has left."""


class StageLink:
    """A stage makes its link before it loads the weights, so it already passes beats on while it loads.

    Stage 0 gets tokens through ``on_sampled`` and KV blocks through ``on_kv_part``, on the receiver thread.  The other
    stages take batches with :meth:`next_batch`.
    """

    def __init__(self, transport: Transport, stage: int, n_stages: int, patience: Patience = PATIENCE) -> None:
        self._transport = transport
        self._stage, self._n_stages, self._patience = stage, n_stages, patience
        self._changed = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._lost: ErrorInfo | None = None
        self.parted: Parted | None = None  # stage 0 has left, as its own worker
        self._closing = False
        self._heard = False
        self._telling = threading.Lock()
        self._paths = [HopPath.UNKNOWN] * n_stages  # stage 0 knows every hop's path, another stage only its own
        self.on_sampled: Callable[[Sampled], None] = lambda _: None
        self.on_kv_part: Callable[[int, KvPart], None] = lambda stage, part: None
        self._when_lost: list[Callable[[ErrorInfo], None]] = []
        self._threads = [LastingThread(self._receive, "stage-receive")]
        if stage == 0:
            self._threads.append(LastingThread(self._beat, "stage-beat"))
        for thread in self._threads:
            thread.start()

    def when_lost(self, callback: Callable[[ErrorInfo], None]) -> None:
        """Call ``callback`` once when the pipeline breaks or ends, on the thread that notices it.  If this has already
        happened, call it at once.
        """
        with self._changed:
            lost = self._lost
            if lost is None:
                self._when_lost.append(callback)
        if lost is not None:
            callback(lost)

    def check(self) -> None:
        """Raises WorkerLost if the pipeline is broken."""
        if self._lost is not None:
            raise WorkerLost(self._lost.message, hint=self._lost.hint)

    def hops(self) -> tuple[HopPath, ...]:
        """For stage 0: the path from each stage to the next, as far as the stages have reported it."""
        return tuple(self._paths)

    def send_batch(self, batch: Batch) -> None:
        """Send a batch to the next stage.  Raises WorkerLost."""
        self._send(self._stage + 1, _BATCH, encode_batch(batch), batch.step.number)

    def send_sampled(self, sampled: Sampled) -> None:
        """Send sampled tokens to stage 0.  Raises WorkerLost."""
        self._send(0, _CONTROL, encode_control(sampled), sampled.number)

    def send_kv_part(self, part: KvPart) -> None:
        """Send KV blocks to stage 0, behind all other messages.  Raises WorkerLost, Unavailable.  The pipeline goes on
        without them, so a failure does not break the link.  The path to stage 0 is not the path to the next stage, so
        it is not reported.
        """
        self.check()
        header = FrameHeader(_KV.kind, _KV.priority, _KV.flags, step=part.round)
        self._transport.send(0, header, encode_kv_part(part), deadline_s=self._patience.send_s)

    def send_parted(self, parted: Parted) -> None:
        """Tell the other stages that this stage 0 has left.  It does not matter whether they receive it."""
        with suppress(ThawError, OSError):
            self._transport.send(1, _CONTROL, encode_control(parted), deadline_s=PART_S)

    def next_batch(self) -> Batch | None:
        """Wait for the next batch from the previous stage and return it; None once stage 0 has left.  Raises
        WorkerLost."""
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self.parted is not None or self._lost is not None)
            if self._batches:
                return self._batches.popleft()
            if self.parted is not None:
                return None
        self.check()
        raise AssertionError("woken for nothing")

    def leave(self) -> None:
        """Close, when the pipeline is over.  Nobody is told."""
        with self._changed:
            self._closing = True
        self._transport.close()

    def end(self, error: ErrorInfo) -> None:
        """Tell stage 0 and the next stage, if possible, that this stage ends, and close.  Idempotent."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        lost = encode_control(Lost(self._stage, error))
        receivers = {0, self._stage + 1} - {self._stage, self._n_stages}
        for receiver in receivers:
            with suppress(ThawError, OSError):
                self._transport.send(receiver, _CONTROL, lost, deadline_s=1.0)
        self._lose(error)
        self._transport.close()

    # ── threads ──

    def _receive(self) -> None:
        quiet_since = time.monotonic()
        try:
            while self._lost is None and self.parted is None:
                allowed = self._patience.lost_after_s if self._heard else self._patience.first_word_s
                left_s = quiet_since + allowed - time.monotonic()
                if left_s <= 0:
                    raise WorkerLost(f"{self._name(self._before)} has been silent for {allowed:g} s")
                try:
                    message = self._transport.receive(deadline_s=left_s)
                except TimeoutError:
                    continue
                self._take(message)
                if message.sender == self._before:
                    self._heard, quiet_since = True, time.monotonic()
        except (ThawError, OSError) as e:
            self._lose(ErrorInfo(WorkerLost.__name__, f"the pipeline is broken: {e}"))

    def _take(self, message: Message) -> None:
        if message.kind is FrameKind.HIDDEN_STATES and self._stage > 0 and message.sender == self._before:
            batch = decode_batch(message.payload)
            with self._changed:
                self._batches.append(batch)
                self._changed.notify_all()
        elif message.kind is FrameKind.KV and self._stage == 0:
            self.on_kv_part(message.sender, decode_kv_part(message.payload))
        elif message.kind is FrameKind.CONTROL:
            self._control(message.sender, decode_control(message.payload))
        else:
            raise ProtocolError(f"{message.kind.name} from stage {message.sender} is not expected here")

    def _control(self, sender: int, control: Control) -> None:
        if isinstance(control, Lost):
            if self._stage > 0 and self._after != 0:
                with suppress(ThawError):
                    self._send(self._after, _CONTROL, encode_control(control), 0)
            raise WorkerLost(f"{self._name(control.stage)} has ended: {control.error.message}")
        if sender != self._before or (isinstance(control, Parted) and self._stage == 0):
            raise ProtocolError(f"{type(control).__name__} from stage {sender}, expected from {self._before}")
        if isinstance(control, Parted):
            self._part(control)
        elif isinstance(control, (Beat, PathTaken)):
            if self._stage > 0:
                self._send(self._after, _CONTROL, encode_control(control), 0)
            elif isinstance(control, PathTaken):
                self._note_path(control)
        elif self._stage == 0:
            self.on_sampled(control)
        else:
            raise ProtocolError("tokens came to a stage that is not the first")

    def _part(self, parted: Parted) -> None:
        """The pipeline is over, so from now on silence and the loss of others mean nothing."""
        if self._after != 0:
            with suppress(ThawError):
                self._send(self._after, _CONTROL, encode_control(parted), 0)
        with self._changed:
            self.parted = parted
            self._changed.notify_all()

    def _note_path(self, told: PathTaken) -> None:
        if not 0 < told.stage < self._n_stages:
            raise ProtocolError(f"the path of stage {told.stage}, which this pipeline does not have")
        self._paths[told.stage] = told.path

    def _beat(self) -> None:
        number = 0
        with suppress(WorkerLost):  # the thread that noticed the loss has already called the callbacks
            while True:
                self._send(1, _CONTROL, encode_control(Beat(number)), 0)
                number += 1
                with self._changed:
                    if self._changed.wait_for(lambda: self._lost is not None, timeout=self._patience.beat_s):
                        return

    # ── ──

    @property
    def _before(self) -> int:
        return (self._stage - 1) % self._n_stages

    @property
    def _after(self) -> int:
        return (self._stage + 1) % self._n_stages

    def _send(self, receiver: int, header: FrameHeader, payload: bytes, step: int) -> None:
        self.check()
        if (path := self._transport.path(receiver)) is not self._paths[self._stage]:
            self._tell_path(receiver, path)
        self._hand_over(receiver, header, payload, step)

    def _tell_path(self, receiver: int, path: HopPath) -> None:
        """Tell stage 0 about a changed path, once per change.  Threads that notice the same change wait here, so that
        no message overtakes this one.
        """
        with self._telling:
            if path is self._paths[self._stage]:
                return
            if self._stage > 0:
                self._hand_over(receiver, _CONTROL, encode_control(PathTaken(self._stage, path)), 0)
            self._paths[self._stage] = path

    def _hand_over(self, receiver: int, header: FrameHeader, payload: bytes, step: int) -> None:
        message = FrameHeader(header.kind, header.priority, header.flags, step=step)
        try:
            self._transport.send(receiver, message, payload, deadline_s=self._patience.send_s)
        except (ThawError, OSError) as e:
            self._lose(ErrorInfo(WorkerLost.__name__, f"{self._name(receiver)} cannot be reached: {e}"))
            self.check()

    def _lose(self, error: ErrorInfo) -> None:
        with self._changed:
            if self._lost is not None:
                return
            self._lost = error
            self._changed.notify_all()
        for callback in self._when_lost:
            callback(error)

    def _name(self, stage: int) -> str:
        return f"stage {stage} of {self._n_stages}"


def open_transport(init: LlmInit) -> Transport:
    """Connect this stage to the transport of its group.  Raises InitFailed when the plan names no transport."""
    if init.link is None:
        raise InitFailed(f"stage {init.stage} of {init.n_stages} was given no way to reach the others")
    return connect(init.link, init.group_id, init.stage, init.n_stages)
