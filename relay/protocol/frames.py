"""Frame v1, the one envelope of every transport.  docs/formats/frame.md; vectors in tests/vectors/frames.json.

::

    offset 0      4        5     6         7      8             24         28     36     40        44
           ├magic─┼version─┼kind─┼priority─┼flags─┼─group_id────┼─stream_id┼─seq──┼chunk─┼n_chunks─┼
           44       48     56          60           64
           ┼n_bytes─┼─step─┼header_crc─┼payload_crc─┤ tensor descriptors (flag TENSORS) │ payload

All numbers are little-endian.  The CRCs (Castagnoli) find damage; the group's credential stops forgery.  ``n_bytes``
counts the bytes behind the header, descriptors included, and is at most 8 MiB, so a receiver allocates only after every
bound was checked.  "Need more bytes" is a state: :func:`decode_header` takes exactly 64 bytes, the caller reads the
rest.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

import google_crc32c

from thaw.errors import ProtocolError

MAGIC: Final = b"THWF"
VERSION: Final = 1
HEADER_BYTES: Final = 64
MAX_PAYLOAD_BYTES: Final = 8 * 1024 * 1024
FLAG_TENSORS: Final = 1
_KNOWN_FLAGS: Final = FLAG_TENSORS

_BEHIND_FLAGS: Final = struct.Struct("<16sIQIIIQII")
_FLAGS_END: Final = 8
_HEAD: Final = struct.Struct("<4sBBBB16sIQIIIQ")  # without the two checksums
_CRC_OFFSET: Final = 56  # header_crc covers the 56 bytes before it and the payload_crc after it


class FrameKind(enum.IntEnum):
    CONTROL = 0
    HIDDEN_STATES = 1
    KV = 2
    BULK = 3
    ACK = 4
    CREDIT = 5


class Priority(enum.IntEnum):
    """Inference goes before KV blocks, KV blocks before bulk; order holds per stream, not across priorities."""

    INFERENCE = 0
    KV = 1
    BULK = 2


_KNOWN: Final = {
    MAGIC + bytes((VERSION, kind, priority, flags)): (kind, priority, flags)
    for kind in FrameKind
    for priority in Priority
    for flags in range(_KNOWN_FLAGS + 1)
}
"""Every valid beginning of a header: one look-up checks it."""


class FrameHeader(NamedTuple):
    """A tuple and no dataclass: every frame needs one, and making a frozen dataclass of as many fields takes 1 µs."""

    kind: FrameKind
    priority: Priority = Priority.INFERENCE
    flags: int = 0
    group_id: bytes = bytes(16)
    stream_id: int = 0
    seq: int = 0
    chunk: int = 0
    n_chunks: int = 1
    n_bytes: int = 0
    step: int = 0
    payload_crc: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    header: FrameHeader
    payload: bytes | memoryview


_CRC_BLOCK: Final = 32 * 1024
"""The checksum's C code reads only ``bytes``.  A view is copied in pieces that stay in the core's first cache, and far
below the size that malloc requests from the kernel each time (128 KiB)."""


def crc32c(data: bytes | memoryview, crc: int = 0) -> int:
    """Castagnoli checksum of contiguous bytes; ``crc`` is the checksum of the bytes before them."""
    if len(data) <= _CRC_BLOCK or isinstance(data, bytes):
        return int(google_crc32c.extend(crc, bytes(data)))
    for at in range(0, len(data), _CRC_BLOCK):
        crc = google_crc32c.extend(crc, bytes(data[at : at + _CRC_BLOCK]))
    return int(crc)


def encode_header(header: FrameHeader) -> bytes:
    """The 64 bytes of ``header``, header_crc included."""
    h = header
    return _seal(h, h.group_id, h.seq, h.chunk, h.n_chunks, h.n_bytes, h.payload_crc)


def encode_chunk(
    message: FrameHeader, group_id: bytes, seq: int, chunk: int, n_chunks: int, payload: bytes | memoryview
) -> bytes:
    """The 64 bytes before ``payload``: chunk ``chunk`` of message ``seq``, with the other fields of ``message``."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"frame payload of {len(payload)} bytes; the limit is {MAX_PAYLOAD_BYTES}")
    return _seal(message, group_id, seq, chunk, n_chunks, len(payload), crc32c(payload))


def _seal(
    h: FrameHeader, group_id: bytes, seq: int, chunk: int, n_chunks: int, n_bytes: int, payload_crc: int
) -> bytes:
    head = _HEAD.pack(
        MAGIC, VERSION, h.kind, h.priority, h.flags, group_id, h.stream_id, seq, chunk, n_chunks, n_bytes, h.step
    )
    tail = payload_crc.to_bytes(4, "little")
    crc: int = google_crc32c.value(head + tail)
    return head + crc.to_bytes(4, "little") + tail


def encode(header: FrameHeader, payload: bytes) -> bytes:
    """A whole frame.  ``n_bytes`` and ``payload_crc`` are filled in.  Raises ProtocolError above 8 MiB."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"frame payload of {len(payload)} bytes; the limit is {MAX_PAYLOAD_BYTES}")
    return encode_header(header._replace(n_bytes=len(payload), payload_crc=crc32c(payload))) + payload


def decode_header(data: bytes | memoryview) -> FrameHeader:
    """Check and read 64 bytes.  Raises ProtocolError; no memory is allocated by the header's numbers."""
    raw = bytes(data)
    known = _KNOWN.get(raw[:_FLAGS_END])
    if known is None or len(raw) != HEADER_BYTES:
        raise _refused(raw)
    group_id, stream_id, seq, chunk, n_chunks, n_bytes, step, header_crc, payload_crc = _BEHIND_FLAGS.unpack_from(
        raw, _FLAGS_END
    )
    if header_crc != google_crc32c.value(raw[:_CRC_OFFSET] + raw[60:]):
        raise _refused(raw)
    if n_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"frame claims {n_bytes} bytes; the limit is {MAX_PAYLOAD_BYTES}")
    if chunk >= n_chunks:
        raise ProtocolError(f"frame claims chunk {chunk} of {n_chunks}")
    kind, priority, flags = known
    return tuple.__new__(
        FrameHeader, (kind, priority, flags, group_id, stream_id, seq, chunk, n_chunks, n_bytes, step, payload_crc)
    )  # half the time of FrameHeader(…)


def _refused(raw: bytes) -> ProtocolError:
    """The error of a header with a wrong length, beginning or checksum: the first one in the order of frame.md."""
    if len(raw) != HEADER_BYTES:
        return ProtocolError(f"a frame header has {HEADER_BYTES} bytes, got {len(raw)}")
    magic, version, kind, priority, flags = raw[:4], *raw[4:_FLAGS_END]
    if magic != MAGIC:
        return ProtocolError(f"not a frame: magic {magic!r}")
    if version != VERSION:
        return ProtocolError(f"frame version {version}; this side reads {VERSION}")
    if int.from_bytes(raw[_CRC_OFFSET:60], "little") != google_crc32c.value(raw[:_CRC_OFFSET] + raw[60:]):
        return ProtocolError("frame header failed its checksum")
    return ProtocolError(f"frame of kind {kind}, priority {priority}, flags {flags:#x} is not known")


def decode(data: bytes | memoryview) -> Frame:
    """One whole frame (a Redis stream entry).  Raises ProtocolError."""
    if len(data) < HEADER_BYTES:
        raise ProtocolError(f"a frame has at least {HEADER_BYTES} bytes, got {len(data)}")
    header = decode_header(data[:HEADER_BYTES])
    payload = data[HEADER_BYTES:]
    if len(payload) != header.n_bytes:
        raise ProtocolError(f"frame claims {header.n_bytes} bytes and carries {len(payload)}")
    check_payload(header, payload)
    return Frame(header, payload)


def check_payload(header: FrameHeader, payload: bytes | memoryview) -> None:
    check_sum(header, crc32c(payload))


def check_sum(header: FrameHeader, crc: int) -> None:
    """Check the payload by its ``crc``, which the caller computed while the payload came.  Raises ProtocolError."""
    if crc != header.payload_crc:
        raise ProtocolError("frame payload failed its checksum")
