"""Puts the chunks of one sender and priority together to messages; each chunk is received into its place.

::

    place(header) ──▶ the bytes where the payload goes ──▶ (receive, check) ──▶ take(header) ──▶ message, when whole

A message's memory is allocated after the header of its first chunk was checked: number of chunks × bytes of the first
chunk, below the limit.  All chunks but the last have the first one's size, so the place of each is known before it
comes, and nothing is joined at the end.  A repeated chunk (a link was cut and resumed) is dropped.  A chunk ahead of
its turn is refused, unless the link has two paths (``hold_bytes``): then it waits for the chunks on the slower path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from relay.protocol.frames import FrameHeader
from relay.transports.base import MAX_MESSAGE_BYTES, Message
from thaw.errors import ProtocolError

Position = tuple[int, int]
"""(message, chunk) that comes next; both from 0."""


_NOTHING = memoryview(b"")
_KEEP_BYTES: Final = 1024 * 1024
"""The most memory that is kept for the next message: enough for a batch of hidden states, not for a prompt's."""


class Assembly:
    """Not thread-safe: its owner reads one link."""

    def __init__(self, sender: int, *, max_message_bytes: int = MAX_MESSAGE_BYTES, hold_bytes: int = 0) -> None:
        self._sender, self._max_bytes, self._hold_bytes = sender, max_message_bytes, hold_bytes
        self._first: FrameHeader | None = None  # chunk 0 of the message in progress
        self._body = _NOTHING
        self._last = bytearray()
        self._held: dict[Position, tuple[FrameHeader, memoryview]] = {}
        self._held_bytes = 0
        self.position: Position = (0, 0)

    @property
    def is_ahead(self) -> bool:
        """Whether chunks wait for earlier ones."""
        return bool(self._held)

    def whole(self, header: FrameHeader, payload: bytes) -> Message | None:
        """Return the message if it has one chunk, which was checked, and is next; None: use ``place`` and ``take``."""
        kind, priority, flags, _, stream_id, seq, _, n_chunks, _, step, _ = header
        if n_chunks != 1 or self._held or self.position != (seq, 0):
            return None
        self.position = (seq + 1, 0)
        self._first = None
        return tuple.__new__(Message, (self._sender, kind, priority, flags, stream_id, seq, step, memoryview(payload)))

    def place(self, header: FrameHeader) -> memoryview:
        """Return the memory for the payload of ``header``.  Raises ProtocolError; nothing was allocated then."""
        at = (header.seq, header.chunk)
        if at < self.position or at in self._held:
            return memoryview(bytearray(header.n_bytes))  # a repetition: take() drops it
        if at > self.position:
            return self._place_ahead(header)
        if header.chunk == 0:
            self._begin(header)
        offset, size = self._slot(header)
        return self._body[offset : offset + size]

    def take(self, header: FrameHeader, payload: memoryview) -> Sequence[Message]:
        """Take a ``payload`` that was received where ``place`` said and checked; return the messages it completes.

        Raises ProtocolError, as ``place`` does.
        """
        at = (header.seq, header.chunk)
        if at < self.position or at in self._held:
            return ()
        if at > self.position:
            self._held[at] = (header, payload)
            self._held_bytes += len(payload)
            return ()
        if self._first is None or payload.obj is not self._body.obj:
            # The chunk was ahead when its place was asked for; the other path has caught up while it was received.
            self.place(header)[:] = payload
        message = self._advance(header)
        if not self._held:
            return () if message is None else (message,)
        return [m for m in (message, *self._release()) if m is not None]

    def _release(self) -> Iterator[Message | None]:
        while (held := self._held.pop(self.position, None)) is not None:
            header, payload = held
            self._held_bytes -= len(payload)
            self.place(header)[:] = payload
            yield self._advance(header)

    def _begin(self, header: FrameHeader) -> None:
        if header.n_chunks > 1 and header.n_bytes == 0:
            raise ProtocolError(f"stage {self._sender}: a message of {header.n_chunks} chunks begins with an empty one")
        n_bytes = header.n_chunks * header.n_bytes
        if n_bytes >= self._max_bytes + max(1, header.n_bytes):
            raise ProtocolError(f"stage {self._sender}: a message of more than {self._max_bytes} bytes")
        if self._first is None or (self._first.n_chunks, self._first.n_bytes) != (header.n_chunks, header.n_bytes):
            self._body = self._memory(n_bytes)  # else the same chunk came again, by another path or connection
        self._first = header

    def _memory(self, n_bytes: int) -> memoryview:
        """Return the last message's memory if it had the same size and no view of it is alive, else new memory.

        New memory must be zeroed, and from 64 KiB on malloc gets it from the kernel each time, page by page.
        """
        if len(self._last) == n_bytes:
            try:
                self._last.append(0)  # refused while a view of it is alive
                self._last.pop()
                return memoryview(self._last)
            except BufferError:
                pass
        made = bytearray(n_bytes + 1)  # room for the append above
        made.pop()
        if n_bytes <= _KEEP_BYTES:
            self._last = made
        return memoryview(made)

    def _slot(self, header: FrameHeader) -> tuple[int, int]:
        first = self._first
        if first is None or header.n_chunks != first.n_chunks:
            raise ProtocolError(f"stage {self._sender}: chunk {header.chunk} belongs to another message")
        last = header.chunk + 1 == first.n_chunks
        if header.n_bytes > first.n_bytes or (header.n_bytes < first.n_bytes and not last):
            raise ProtocolError(
                f"stage {self._sender}: chunk {header.chunk} has {header.n_bytes} bytes, the first has {first.n_bytes}"
            )
        return header.chunk * first.n_bytes, header.n_bytes

    def _place_ahead(self, header: FrameHeader) -> memoryview:
        if self._held_bytes + header.n_bytes > self._hold_bytes:
            raise ProtocolError(
                f"stage {self._sender}: message {header.seq} chunk {header.chunk} came, expected {self.position}"
            )
        return memoryview(bytearray(header.n_bytes))

    def _advance(self, header: FrameHeader) -> Message | None:
        first = self._first
        assert first is not None  # noqa: S101  place() came before
        if header.chunk + 1 < first.n_chunks:
            self.position = (header.seq, header.chunk + 1)
            return None
        body = self._body[: header.chunk * first.n_bytes + header.n_bytes]
        self.position = (header.seq + 1, 0)
        self._body, self._first = _NOTHING, None
        return Message(
            self._sender, first.kind, first.priority, first.flags, first.stream_id, first.seq, first.step, body
        )
