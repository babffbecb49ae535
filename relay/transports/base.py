"""The interface of a transport: ordered messages between the stages of one group, in chunks of bounded frames.

A message is any number of bytes; it travels as chunks of at most ``chunk_bytes``, each one frame.  Order holds per
(sender, receiver, priority); an inference message overtakes a KV message, a KV message overtakes bulk, also one that
is half sent.  A sender waits when it is as far ahead of its receiver as their ``Flow`` allows, so the memory between
the two is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from relay.protocol.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, FrameHeader, FrameKind, Priority, encode_chunk
from relay.protocol.messages import GroupLink
from thaw.errors import ProtocolError, Unavailable
from thaw.hops import HopPath
from thaw.ids import GroupId

CHUNK_BYTES: Final = 1024 * 1024
"""Redis moves 1 MB in 2 to 4 ms: small enough to overlap the copies of two, large enough to fill the wire."""

WINDOW_BYTES: Final = 64 * 1024 * 1024
GROUP_BYTES: Final = 128 * 1024 * 1024
"""A group's quota: the bytes that its stages may have on the relay, all links and priorities together.  A relay of
512 MB, the default, can hold three groups whose receivers have died and still has room for others."""
MAX_MESSAGE_BYTES: Final = 1024 * 1024 * 1024
MAX_STAGES: Final = 256
"""Stage numbers are one byte in names and handshakes; plans today have at most eight."""

RESUME_S: Final = 10.0
"""How long a transport tries to reach a lost relay or peer before the call in progress fails."""


class Message(NamedTuple):
    """One whole message.  ``sender`` is the stage it came from; ``flags`` say whether tensors are described in it.

    It is a tuple for the same reason as FrameHeader.
    """

    sender: int
    kind: FrameKind
    priority: Priority
    flags: int
    stream_id: int
    seq: int
    step: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Flow:
    """How many bytes may be on their way.  Both ends of a link have the same Flow.

    Each priority of a link may always have ``window_bytes`` on their way.  When the flow is ``shared``, a priority may
    also use the windows of the lower ones while these do not use them (quota.py).
    """

    chunk_bytes: int = CHUNK_BYTES
    window_bytes: int = WINDOW_BYTES
    max_message_bytes: int = MAX_MESSAGE_BYTES
    resume_s: float = RESUME_S
    shared: bool = False

    @staticmethod
    def of_group(n_stages: int, group_bytes: int = GROUP_BYTES) -> Flow:
        """Give every link the same part of the group's quota; the priorities of a link share its part.

        Both ends compute the same Flow without asking each other.
        """
        n_ways = max(1, n_stages * (n_stages - 1) * len(Priority))
        window = max(4 * HEADER_BYTES, min(WINDOW_BYTES, group_bytes // n_ways))
        return Flow(chunk_bytes=min(CHUNK_BYTES, window // 4), window_bytes=window, shared=True)

    def __post_init__(self) -> None:
        if not 0 < self.chunk_bytes <= MAX_PAYLOAD_BYTES:
            raise ProtocolError(f"chunks of {self.chunk_bytes} bytes; a frame carries 1 to {MAX_PAYLOAD_BYTES}")

    @property
    def most_bytes(self) -> int:
        """The bytes that one priority of a link may have on their way while the others send nothing."""
        return self.window_bytes * (len(Priority) if self.shared else 1)

    @property
    def credit_bytes(self) -> int:
        """A receiver reports each time it has taken this many bytes: often enough that a sender never stands still."""
        return max(1, self.window_bytes // 4)

    @property
    def at_once_bytes(self) -> int:
        """The room that a sender has for certain, though the receiver has not reported the last bytes it took: a
        message up to this size is sent whole or not at all."""
        return self.window_bytes - self.credit_bytes


class Transport(Protocol):
    """One stage's end of its group's links.

    One thread receives, for as long as the stage lives: after the last ``send`` this thread notices a cut connection
    and sends again the frames that were lost.  Any thread may send; messages of one (receiver, priority) leave one
    after the other, and a message never waits for another of lower priority.  Any thread may call ``close``, also
    twice: a waiting ``receive`` or ``send`` ends at once with Unavailable.
    """

    def send(self, receiver: int, message: FrameHeader, payload: bytes | memoryview, *, deadline_s: float) -> None:
        """Hand ``payload`` over for stage ``receiver``.  ``message`` gives kind, priority, flags, stream_id, step.

        The caller may reuse ``payload`` afterwards.  Raises Unavailable when the window stays full or the relay does
        not answer until the deadline; nothing of a message up to ``Flow.at_once_bytes`` was sent then.  Raises
        WorkerLost when the link cannot be continued: its group has ended, or the relay has lost its frames.
        """

    def receive(self, *, deadline_s: float) -> Message:
        """The next message, highest priority first.

        Raises TimeoutError at the deadline, ProtocolError for damage, WorkerLost like ``send``, Unavailable when the
        relay cannot be reached for ``Flow.resume_s``.
        """

    def path(self, receiver: int, priority: Priority = Priority.INFERENCE) -> HopPath:
        """The path that carries the next message of ``priority`` to stage ``receiver``."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """What a stage's end of its group's links is made from.  ``flow`` None: the transport chooses."""

    link: GroupLink
    group_id: GroupId
    stage: int
    n_stages: int
    flow: Flow | None = None

    @property
    def peers(self) -> tuple[int, ...]:
        """The other stages."""
        return tuple(peer for peer in range(self.n_stages) if peer != self.stage)

    @property
    def flow_on_relay(self) -> Flow:
        """The flow of a transport whose messages may lie on the relay server: it keeps to the group's quota there."""
        return self.flow or Flow.of_group(self.n_stages)


MakeTransport = Callable[[GroupEnd], Transport]
"""Raises PlatformError for a link whose address it cannot use, WorkerLost for a credential that nobody knows."""


def closed(stage: int) -> Unavailable:
    """The error of a call that waits while its transport is closed, or that comes afterwards."""
    return Unavailable(f"stage {stage}: its transport was closed")


Chunk = tuple[int, bytes, bytes | memoryview]
"""(number, the frame's 64 bytes, what follows them)."""


def split(message: FrameHeader, group_id: bytes, seq: int, payload: bytes | memoryview, flow: Flow) -> Iterator[Chunk]:
    """Yield the frames of one message, each made when it is needed; the payload is not copied."""
    view = memoryview(payload).cast("B")
    n_bytes = len(view)
    if n_bytes > flow.max_message_bytes:
        raise ProtocolError(f"a message of {n_bytes} bytes; the limit is {flow.max_message_bytes}")
    n_chunks = max(1, -(-n_bytes // flow.chunk_bytes))
    if n_chunks == 1 and isinstance(payload, bytes):  # the checksum of bytes needs no copy
        yield 0, encode_chunk(message, group_id, seq, 0, 1, payload), payload
        return
    for chunk in range(n_chunks):
        part = view[chunk * flow.chunk_bytes : (chunk + 1) * flow.chunk_bytes]
        yield chunk, encode_chunk(message, group_id, seq, chunk, n_chunks, part), part
