"""The sending end of one TCP link: it keeps each frame until the receiver has it, so a cut connection loses nothing.

::

    queue:  │ written, not acknowledged │ being written │ waiting │        ← acknowledged: dropped
            └──────── resent from the receiver's position after a cut ─────┘

A payload is written from the caller's memory; only frames that are not acknowledged when ``send`` returns are copied,
or kept without a copy if the payload is ``bytes``.  The threads that may work here are the one that sends and, while it
does something else, the one that receives (a TcpOut is a lane of the inbox).
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from relay.protocol.frames import HEADER_BYTES, FrameHeader, FrameKind, Priority, decode_header, encode_chunk
from relay.transports.base import Flow, closed, split
from relay.transports.inbox import BUSY_S, LOSS_ONLY, Inbox
from relay.transports.resp import SMALL_BYTES
from thaw.errors import ProtocolError, Unavailable, WorkerLost

_RETRY_S: Final = 0.1
_IOV_MAX: Final = 64
_READ_ACKS_BYTES: Final = 256 * 1024
"""Bytes that are kept before acknowledgements are read (a receiver sends one every 128 KiB).  So only one message in
many needs a system call for them, and the kept bytes stay in the core's cache: memory that was never touched costs more
than the copy into it."""


@dataclass(slots=True)
class Outgoing:
    seq: int
    chunk: int
    head: bytes
    payload: bytes | memoryview

    @property
    def n_bytes(self) -> int:
        return HEADER_BYTES + len(self.payload)


Dial = Callable[[float], tuple[socket.socket, tuple[int, int]]]
"""Connects within the given seconds; returns the non-blocking socket and the receiver's position.  Raises OSError."""


class NoRoute(Unavailable):
    """The receiver cannot be reached, and the caller has another path to it, also for frames that were cut off."""


class TcpOut:
    """The link to one receiver at one priority.  Lock order: this lock, then the inbox's methods (which take none)."""

    def __init__(
        self,
        dial: Dial,
        inbox: Inbox,
        stage: int,
        receiver: int,
        priority: Priority,
        flow: Flow,
        group_id: bytes,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self.priority = priority
        self._on_lost = on_lost
        self.queue: deque[Outgoing] = deque()
        self.broken = ""
        self._dial, self._inbox, self._flow, self._group_id = dial, inbox, flow, group_id
        self._stage, self._receiver = stage, receiver
        self._small_bytes = min(flow.chunk_bytes, flow.credit_bytes, SMALL_BYTES)
        self._most_small_bytes = flow.credit_bytes
        self._read_acks_bytes = min(flow.credit_bytes, _READ_ACKS_BYTES)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._sock: socket.socket | None = None
        self._queued_bytes = 0
        self._n_written = 0  # frames of the queue that were written whole
        self._offset = 0  # bytes written of the next one
        self._acks = b""
        self._seq = 0

    def send(self, message: FrameHeader, payload: bytes | memoryview, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        with self._lock:
            if self.broken:
                raise WorkerLost(f"the link to stage {self._receiver} broke: {self.broken}")
            self._send(self._seq, message, payload, until)
            self._seq += 1

    def send_as(self, seq: int, message: FrameHeader, payload: bytes | memoryview, deadline_s: float) -> None:
        """Send with a number from the caller, which has another path to the receiver beside this one."""
        with self._lock:
            self._send(seq, message, payload, time.monotonic() + deadline_s)

    def connect(self, timeout_s: float) -> None:
        """Connect, and write the queued frames.  Raises OSError when the receiver cannot be reached."""
        with self._lock:
            if self._sock is None:
                self._connect(timeout_s)
                self._flush(time.monotonic() + timeout_s)

    def abandon(self) -> list[Outgoing]:
        """Give this path up; return the frames that are not acknowledged, for another path."""
        with self._lock:
            self._drop()
            frames, self.queue = list(self.queue), deque()
            self._queued_bytes = self._n_written = self._offset = 0
            return frames

    def advance(self) -> None:
        """The connection was lost, or takes bytes again.  A thread that sends notices by itself."""
        if self._lock.acquire(blocking=False):
            try:
                self._work_in_passing()
            finally:
                self._lock.release()

    def arm(self) -> None: ...

    def revive(self, now_s: float) -> float | None:
        if self._sock is not None:
            return None
        if not self._lock.acquire(blocking=False):
            return now_s + BUSY_S
        try:
            if self._sock is None and self.queue and not self.broken:
                if self._on_lost is None:
                    return self._revive(now_s)
                self._on_lost()
        finally:
            self._lock.release()
        return None

    def close(self) -> None:
        self._closed.set()
        sock = self._sock
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other side closed it first
        with self._lock:
            self._drop()

    def _send(self, seq: int, message: FrameHeader, payload: bytes | memoryview, until: float) -> None:
        n_bytes = len(payload) if isinstance(payload, bytes) else payload.nbytes
        if n_bytes <= self._small_bytes and self._queued_bytes <= self._most_small_bytes:
            self._send_small(seq, message, bytes(payload), until)
            return
        if self._queued_bytes:
            self._await_room(min(n_bytes + HEADER_BYTES, self._flow.at_once_bytes), until)
        try:
            for number, head, part in split(message, self._group_id, seq, payload, self._flow):
                if number:
                    self._await_room(HEADER_BYTES + len(part), until)
                self.queue.append(Outgoing(seq, number, head, part))
                self._queued_bytes += HEADER_BYTES + len(part)
                self._flush(until)
        except NoRoute:
            raise
        except BaseException as e:
            if self.queue and self.queue[-1].seq == seq:
                self.broken = f"a message was cut off: {e}"
            raise
        finally:
            self._keep(seq, payload)

    def _send_small(self, seq: int, message: FrameHeader, payload: bytes, until: float) -> None:
        """Send one frame, far below the window, in one call if no other frame is waiting."""
        head = encode_chunk(message, self._group_id, seq, 0, 1, payload)
        sock, alone, sent = self._sock, self._n_written == len(self.queue), 0
        if sock is not None and alone:
            try:
                sent = sock.send(head + payload)
            except OSError:
                sent = 0  # the socket is full, or lost: flushing finds out which
        self.queue.append(Outgoing(seq, 0, head, payload))
        self._queued_bytes += HEADER_BYTES + len(payload)
        if sent == HEADER_BYTES + len(payload):
            self._n_written += 1
            if self._queued_bytes > self._read_acks_bytes:
                self._read_acks_or_lose()
            return
        if alone:
            self._offset = sent
        try:
            self._flush(until)
        except NoRoute:
            raise
        except BaseException as e:
            self.broken = f"a message was cut off: {e}"
            raise

    def _keep(self, seq: int, payload: bytes | memoryview) -> None:
        """The caller may reuse the payload from now on: copy the frames that may have to be sent again."""
        self._read_acks_or_lose()  # most of a large message has arrived by now
        if isinstance(payload, bytes) and len(payload) <= self._flow.most_bytes:  # bytes cannot change
            return
        for frame in reversed(self.queue):
            if frame.seq != seq:
                break
            frame.payload = bytes(frame.payload)

    def _await_room(self, n_bytes: int, until: float) -> None:
        while self._lacks_room(n_bytes):
            self._flush(until)
            if not self._lacks_room(n_bytes):
                return  # a new connection has told what arrived, and may have nothing more to tell
            if self._sock is not None and not self._wait(select.POLLIN, until):
                raise Unavailable(
                    f"stage {self._receiver} does not keep up: {self._queued_bytes} bytes are unread",
                    hint="is the stage alive?",
                )
            self._read_acks_or_lose()

    def _lacks_room(self, n_bytes: int) -> bool:
        return bool(self.queue) and self._queued_bytes + n_bytes > self._flow.most_bytes

    def _flush(self, until: float) -> None:
        """Write the queue; if the receiver does not take it until the deadline, a later call goes on."""
        while self._sock is None or self._n_written < len(self.queue):
            try:
                sock = self._sock or self._connect(until - time.monotonic())
                if self._write(sock):
                    continue
                if not self._wait(select.POLLOUT | select.POLLIN, until):
                    self._inbox.rewatch(sock.fileno(), LOSS_ONLY | select.EPOLLOUT)
                    return
                self._read_acks(sock)
            except OSError as e:
                self._retry(e, until)

    def _write(self, sock: socket.socket) -> bool:
        """Write once as much as fits.  False when the socket is full."""
        parts: list[bytes | memoryview] = []
        for at in range(self._n_written, min(len(self.queue), self._n_written + _IOV_MAX // 2)):
            parts += (self.queue[at].head, self.queue[at].payload)
        try:
            sent = sock.sendmsg(_skip(parts, self._offset)) if len(parts) > 2 or self._offset else _plain(sock, parts)
        except BlockingIOError:
            return False
        self._offset += sent
        while self._n_written < len(self.queue) and self._offset >= self.queue[self._n_written].n_bytes:
            self._offset -= self.queue[self._n_written].n_bytes
            self._n_written += 1
        if self._queued_bytes > self._flow.credit_bytes:
            self._read_acks(sock)
        return True

    def _wait(self, events: int, until: float) -> bool:
        assert self._sock is not None  # noqa: S101
        waiter = select.poll()
        waiter.register(self._sock, events)
        ready = waiter.poll(max(0, int((until - time.monotonic()) * 1000 + 0.999)))
        if self._closed.is_set():
            raise closed(self._stage)
        return bool(ready)

    def _read_acks(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(64 * HEADER_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the receiver closed the connection")
        self._acks += data
        while len(self._acks) >= HEADER_BYTES:
            header = decode_header(self._acks[:HEADER_BYTES])
            self._acks = self._acks[HEADER_BYTES:]
            if header.kind is not FrameKind.ACK or header.group_id != self._group_id or header.n_bytes:
                raise ProtocolError(f"stage {self._receiver} answers with a frame of kind {header.kind.name}")
            self._acknowledged((header.seq, header.chunk))

    def _acknowledged(self, position: tuple[int, int]) -> None:
        while self.queue and (self.queue[0].seq, self.queue[0].chunk) < position and self._n_written:
            self._queued_bytes -= self.queue.popleft().n_bytes
            self._n_written -= 1

    def _read_acks_or_lose(self) -> None:
        try:
            if self._sock is not None:
                self._read_acks(self._sock)
        except OSError:
            self._drop()
            self._inbox.idle(self)  # there may be no further send: the thread that receives goes on

    def _connect(self, timeout_s: float) -> socket.socket:
        if self._closed.is_set():
            raise closed(self._stage)
        sock, position = self._dial(timeout_s)
        self._sock, self._offset, self._acks = sock, 0, b""
        self._n_written = len(self.queue)
        self._acknowledged(position)
        self._n_written = 0
        if self.queue and (self.queue[0].seq, self.queue[0].chunk) > position and position[0] >= self.queue[0].seq:
            raise WorkerLost(f"stage {self._receiver} has lost what was sent: it is at {position}")
        self._inbox.watch(sock.fileno(), self, LOSS_ONLY)
        return sock

    def _retry(self, e: OSError, until: float) -> None:
        now, was_up = time.monotonic(), self._sock is not None
        self._drop()
        if self._closed.is_set():
            raise closed(self._stage) from e
        if not was_up and self._on_lost is not None:
            raise NoRoute(f"stage {self._receiver} cannot be reached: {e}") from e
        if now >= until:
            self._inbox.idle(self)
            raise Unavailable(f"stage {self._receiver} cannot be reached: {e}", hint="is the stage alive?") from e
        if not was_up:
            self._closed.wait(min(_RETRY_S, until - now))

    def _work_in_passing(self) -> None:
        sock = self._sock
        if sock is None:
            return
        try:
            self._read_acks(sock)
            while self._n_written < len(self.queue):
                if not self._write(sock):
                    return
            self._inbox.rewatch(sock.fileno(), LOSS_ONLY)
        except OSError:
            self._drop()
            self._inbox.idle(self)

    def _revive(self, now_s: float) -> float | None:
        try:
            sock = self._connect(1.0)
        except OSError:
            return now_s + _RETRY_S
        self._inbox.rewatch(sock.fileno(), LOSS_ONLY | select.EPOLLOUT)
        return None

    def _drop(self) -> None:
        if self._sock is not None:
            self._inbox.forget(self._sock.fileno())
            self._sock.close()
            self._sock = None


def _plain(sock: socket.socket, parts: list[bytes | memoryview]) -> int:
    if sum(map(len, parts)) <= 32 * 1024:
        return sock.send(b"".join(parts))
    return sock.sendmsg(parts)


def _skip(parts: list[bytes | memoryview], n_bytes: int) -> list[bytes | memoryview]:
    """``parts`` without their first ``n_bytes``."""
    while parts and n_bytes >= len(parts[0]):
        n_bytes -= len(parts.pop(0))
    if n_bytes:
        parts[0] = memoryview(parts[0])[n_bytes:]
    return parts
