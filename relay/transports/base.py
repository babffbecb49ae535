"""What a transport does: ordered messages between the stages of one group, in chunks of bounded frames.

A message is any number of bytes; it travels as chunks of at most ``chunk_bytes``, each one frame.  Order holds per
(sender, receiver, priority); an inference message overtakes a KV message, a KV message overtakes bulk.  A sender that
is ``window_bytes`` ahead of its receiver waits: memory between the two is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from relay.frames import FrameHeader, FrameKind, Priority, encode
from thaw.errors import ProtocolError

CHUNK_BYTES: Final = 1024 * 1024
"""Redis moves 1 MB in 2 to 4 ms: small enough to overlap the copies of two, large enough to fill the wire."""

WINDOW_BYTES: Final = 64 * 1024 * 1024
MAX_MESSAGE_BYTES: Final = 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Message:
    """One whole message.  ``sender`` is the stage it came from; ``flags`` say whether tensors are described in it."""

    sender: int
    kind: FrameKind
    priority: Priority
    flags: int
    stream_id: int
    seq: int
    step: int
    payload: memoryview


class Transport(Protocol):
    """One stage's end of its group's links."""

    def send(self, receiver: int, message: FrameHeader, payload: bytes | memoryview, *, deadline_s: float) -> None:
        """Queue ``payload`` for stage ``receiver``.  ``message`` gives kind, priority, flags, stream_id, step.

        Raises Unavailable when the window stays full or the relay does not answer until the deadline.
        """

    def receive(self, *, deadline_s: float) -> Message:
        """The next message, highest priority first.  Raises TimeoutError at the deadline, ProtocolError for damage."""

    def close(self) -> None: ...


def split(header: FrameHeader, payload: memoryview, chunk_bytes: int) -> Iterator[bytes]:
    """The frames of one message."""
    n_chunks = max(1, -(-len(payload) // chunk_bytes))
    for chunk in range(n_chunks):
        part = payload[chunk * chunk_bytes : (chunk + 1) * chunk_bytes]
        yield encode(
            FrameHeader(header.kind, header.priority, header.flags, header.group_id, header.stream_id, header.seq,
                        chunk, n_chunks, step=header.step),
            bytes(part),
        )  # fmt: skip


class Assembly:
    """Chunks of one sender and priority → messages.  A repeated chunk is dropped, a gap is a ProtocolError."""

    def __init__(self) -> None:
        self._next_seq = 0
        self._parts: list[bytes | memoryview] = []
        self._n_bytes = 0

    def add(self, sender: int, header: FrameHeader, payload: bytes | memoryview) -> Message | None:
        expected = (self._next_seq, len(self._parts))
        if (header.seq, header.chunk) < expected:
            return None
        if (header.seq, header.chunk) != expected:
            raise ProtocolError(f"stage {sender}: message {header.seq} chunk {header.chunk} came, expected {expected}")
        self._n_bytes += len(payload)
        if self._n_bytes > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"stage {sender}: a message of more than {MAX_MESSAGE_BYTES} bytes")
        self._parts.append(payload)
        if len(self._parts) < header.n_chunks:
            return None
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._next_seq, self._parts, self._n_bytes = self._next_seq + 1, [], 0
        return Message(sender, header.kind, header.priority, header.flags, header.stream_id, header.seq, header.step,
                       memoryview(body))  # fmt: skip
