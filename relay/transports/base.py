"""The interface of a transport: ordered messages between the stages of one group, in chunks of bounded frames.

A message is any number of bytes.  It travels as chunks of at most ``chunk_bytes``, each in one frame.  Messages keep
their order per (sender, receiver, priority).  An inference message overtakes a KV message and a KV message overtakes a
bulk message, even one that is half sent.  A sender waits when it is as far ahead of its receiver as their ``Flow``
allows, so the memory between the two is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from relay.protocol.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, FrameHeader, FrameKind, Priority, encode_chunk
from relay.protocol.messages import GroupLink
from thaw.errors import ProtocolError, Unavailable
from thaw.ids import GroupId
from thaw.tracing.hops import HopPath

CHUNK_BYTES: Final = 1024 * 1024
"""Redis moves 1 MB in 2 to 4 ms: small enough to overlap the copies of two, large enough to fill the wire."""

WINDOW_BYTES: Final = 64 * 1024 * 1024
GROUP_BYTES: Final = 128 * 1024 * 1024
"""A group's quota: the most bytes that its stages may have on the relay server, over all links and priorities.  The
relay server has 512 MB by default, so it can hold three groups whose receivers have died and still has room for the
others."""
MAX_MESSAGE_BYTES: Final = 1024 * 1024 * 1024
MAX_STAGES: Final = 256
"""Names and handshakes hold a stage number in one byte; plans have at most eight stages today."""

RESUME_S: Final = 10.0
"""How long a call looks for a lost relay server or peer before it fails."""


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
    """How much may be on its way.  Both ends of a link have the same flow.

    ``window_bytes`` is the number of bytes that each priority of a link may always have on their way.  When the flow is
    ``shared``, a priority may also use the windows of the lower ones while they are idle (quota.py).
    """

    chunk_bytes: int = CHUNK_BYTES
    window_bytes: int = WINDOW_BYTES
    max_message_bytes: int = MAX_MESSAGE_BYTES
    resume_s: float = RESUME_S
    shared: bool = False

    @staticmethod
    def of_group(n_stages: int, group_bytes: int = GROUP_BYTES) -> Flow:
        """Every link has the same part of the group's quota to itself, and its priorities share it.

        Both ends compute the same flow without asking each other.
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
        """A receiver reports its total each time it has taken this many bytes.  That is often enough, so a sender never
        stands still."""
        return max(1, self.window_bytes // 4)

    @property
    def at_once_bytes(self) -> int:
        """The room that a sender can count on although the receiver has not reported the last bytes that it took: a
        message up to this size is sent whole or not at all."""
        return self.window_bytes - self.credit_bytes


class Transport(Protocol):
    """One stage's end of its group's links.

    One thread receives as long as the stage lives: after the last ``send`` this thread notices a cut connection and
    sends the lost frames again.  Any thread may send.  Messages of one (receiver, priority) leave one after the other,
    and a message never waits for another of lower priority.  Any thread may call ``close``, also a second time: a
    waiting ``receive`` or ``send`` then ends at once with Unavailable.
    """

    def send(self, receiver: int, message: FrameHeader, payload: bytes | memoryview, *, deadline_s: float) -> None:
        """Hand ``payload`` over for stage ``receiver``.  ``message`` gives kind, priority, flags, stream_id, step.

        The caller may reuse ``payload`` afterwards.  Raises Unavailable when the window stays full or the relay server
        does not answer until the deadline; of a message up to ``Flow.at_once_bytes`` nothing was sent then.  Raises
        WorkerLost when the link cannot go on: its group has ended, or the relay server has lost its frames.
        """

    def receive(self, *, deadline_s: float) -> Message:
        """The next message, highest priority first.

        Raises TimeoutError at the deadline, ProtocolError for damage, WorkerLost as ``send`` does, and Unavailable
        when the relay server cannot be reached for ``Flow.resume_s``.
        """

    def path(self, receiver: int, priority: Priority = Priority.INFERENCE) -> HopPath:
        """The path that carries the next message of ``priority`` to stage ``receiver``."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """The arguments for a stage's end of its group's links.  If ``flow`` is None, the transport chooses it."""

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
    """A call raises this when its transport is closed meanwhile or was closed before."""
    return Unavailable(f"stage {stage}: its transport was closed")


Chunk = tuple[int, bytes, bytes | memoryview]
"""The number of the chunk, the 64 bytes of the frame's header, and the payload behind them."""


def split(message: FrameHeader, group_id: bytes, seq: int, payload: bytes | memoryview, flow: Flow) -> Iterator[Chunk]:
    """The frames of one message.  Each is made when the caller asks for it, and the payload is not copied."""
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
