"""Segment v1: a model's bytes in shared memory while they arrive.  docs/formats/segment.md; vectors/segment.json.

::

    control page (4 KiB, written by fetchd alone)                  slabs (mapped contiguously by the reader)
    0      4         8         16     24    28      32             ┌──────────┬──────────┬──────────┐
    ├magic─┼─version─┼─n_bytes─┼─end──┼─seq─┼─state─┼─heartbeat    │ verified │ verified │ arriving │
    40           44              48           52      64           └──────────┴──────────┴──────────┘
    ┼─error code─┼─message bytes─┼─hint bytes─┼──0───┼─text…        0                    end     n_bytes

Producer: data → end → seq + 1 → FUTEX_WAKE(seq).  A reader reads only below ``end`` and sleeps on ``seq``.  The
heartbeat is CLOCK_MONOTONIC of the host and moves only while the state is FILLING.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import struct
import time
from collections.abc import Sequence
from typing import Final

from relay.protocol.messages import PlacedRange, SegmentOffer
from relay.protocol.pool import aligned
from relay.protocol.shared_memory import Region, futex_wait, futex_wake
from thaw.errors import (
    ErrorInfo,
    MemoryTooSmall,
    ModelChanged,
    ModelCorrupt,
    ModelNotFound,
    ModelUnsupported,
    PlatformError,
    ProtocolError,
    StoreUnavailable,
    ThawError,
    from_info,
)
from thaw.model import FileRange

MAGIC: Final = b"THWS"
VERSION: Final = 1
PAGE_BYTES: Final = 4096
MAX_WAIT_S: Final = 0.2
"""A waiting reader checks the heartbeat this often, because a dead fetchd wakes no reader."""
HEARTBEAT_S: Final = 0.2
DEAD_AFTER_S: Final = 3.0
"""Fifteen missed heartbeats: a busy two-core machine has been seen to hold a thread back for one second."""

_HEADER: Final = struct.Struct("<4sIQQIIQIIII")
_TEXT_OFFSET: Final = 64
_MAX_TEXT: Final = 1500  # message and hint each; both fit behind the header
_END, _HEARTBEAT = 2, 4  # as u64 words
_SEQ, _STATE = 6, 7  # as u32 words
_N_BYTES_U64: Final = 1


class SegmentState(enum.IntEnum):
    FILLING = 0
    COMPLETE = 1
    FAILED = 2


_STATES: Final = {state.value: state for state in SegmentState}

_ERROR_CODES: Final[tuple[type[ThawError], ...]] = (
    PlatformError,
    ModelNotFound,
    ModelCorrupt,
    ModelUnsupported,
    MemoryTooSmall,
    StoreUnavailable,
    ModelChanged,
)
"""The number on the page is the place in this tuple plus one; append only."""


def error_on_page(number: int, message: str, hint: str) -> ThawError:
    """Return the error of a failed page.  An unknown number comes from a newer fetchd and means PlatformError."""
    cls = _ERROR_CODES[number - 1] if 0 < number <= len(_ERROR_CODES) else PlatformError
    return from_info(ErrorInfo(cls.__name__, message, hint))


def lay_out(ranges: Sequence[FileRange]) -> tuple[PlacedRange, ...]:
    """Where each range lies in the segment: in the order given, each at the next multiple of ``pool.ALIGNMENT``."""
    placed: list[PlacedRange] = []
    offset = 0
    for r in ranges:
        placed.append(PlacedRange(r.file, r.offset, r.n_bytes, offset))
        offset += aligned(r.n_bytes)
    return tuple(placed)


def segment_bytes(layout: Sequence[PlacedRange]) -> int:
    return max((p.segment_offset + p.n_bytes for p in layout), default=0)


class ControlPage:
    """fetchd's side of the page.  Not thread-safe: its owner holds a lock around every call."""

    def __init__(self, page: mmap.mmap, n_bytes: int) -> None:
        self._page = page
        self._u64 = (ctypes.c_uint64 * 5).from_buffer(page)
        self._u32 = (ctypes.c_uint32 * 10).from_buffer(page)
        self._seq_address = ctypes.addressof(self._u32) + _SEQ * 4
        now = time.monotonic_ns()
        page[: _HEADER.size] = _HEADER.pack(MAGIC, VERSION, n_bytes, 0, 0, SegmentState.FILLING, now, 0, 0, 0, 0)

    @property
    def end(self) -> int:
        return int(self._u64[_END])

    @property
    def state(self) -> SegmentState:
        return SegmentState(self._u32[_STATE])

    def advance(self, end: int) -> None:
        """Publish that ``[0, end)`` is verified.  The caller has written the data before this call."""
        self._u64[_END] = end
        self._announce()

    def beat(self) -> None:
        self._u64[_HEARTBEAT] = time.monotonic_ns()

    def complete(self) -> None:
        self._u64[_END] = self._u64[_N_BYTES_U64]
        self._u32[_STATE] = SegmentState.COMPLETE
        self._announce()

    def fail(self, error: ErrorInfo) -> None:
        """Publish the error.  ``end`` does not change: the bytes below it were verified and stay valid."""
        names = [cls.__name__ for cls in _ERROR_CODES]
        number = names.index(error.code) + 1 if error.code in names else 1
        message, hint = _bounded(error.message), _bounded(error.hint)
        self._page[_TEXT_OFFSET : _TEXT_OFFSET + len(message) + len(hint)] = message + hint
        struct.pack_into("<III", self._page, 40, number, len(message), len(hint))
        self._u32[_STATE] = SegmentState.FAILED
        self._announce()

    def close(self) -> None:
        del self._u64, self._u32
        self._page.close()

    def _announce(self) -> None:
        self.beat()
        self._u32[_SEQ] = (self._u32[_SEQ] + 1) & 0xFFFFFFFF
        futex_wake(self._seq_address)


def _bounded(text: str) -> bytes:
    """At most _MAX_TEXT bytes of UTF-8, never half a character."""
    return text.encode()[:_MAX_TEXT].decode(errors="ignore").encode()


class PageReader:
    """A consumer's side of the control page: a read-only mapping."""

    def __init__(self, fd: int) -> None:
        self._region = Region(PAGE_BYTES)
        self._region.map(0, fd, PAGE_BYTES, writable=False)
        address = self._region.address
        self._u64 = (ctypes.c_uint64 * 5).from_address(address)
        self._u32 = (ctypes.c_uint32 * 10).from_address(address)
        self._seq_address = address + _SEQ * 4
        self._seen = 0
        magic, version, self.n_bytes, *_ = _HEADER.unpack_from(self._region.view)
        if magic != MAGIC or version != VERSION:
            self._region.close()
            raise ProtocolError(f"not a control page of segment v{VERSION}: magic {magic!r}, version {version}")

    @property
    def end(self) -> int:
        """Raises ProtocolError for a page with impossible values."""
        return self.look()[1]

    @property
    def seq(self) -> int:
        return int(self._u32[_SEQ])

    @property
    def state(self) -> SegmentState:
        return self.look()[0]

    def look(self) -> tuple[SegmentState, int]:
        """Read the state before the end, so that a complete page has its final end.  Raises ProtocolError like
        :attr:`end`."""
        seen = self._seen  # before the page: another thread may see a later end meanwhile
        state, end = int(self._u32[_STATE]), int(self._u64[_END])
        if state not in _STATES:
            raise ProtocolError(f"control page is in state {state}")
        if end > self.n_bytes:
            raise ProtocolError(f"control page ends at {end} of {self.n_bytes} bytes")
        if end < seen:
            raise ProtocolError(f"control page went back from {seen} to {end}")
        if state == SegmentState.COMPLETE and end != self.n_bytes:
            raise ProtocolError(f"control page is complete at {end} of {self.n_bytes} bytes")
        self._seen = end
        return _STATES[state], end

    @property
    def heartbeat_age_s(self) -> float:
        return (time.monotonic_ns() - int(self._u64[_HEARTBEAT])) / 1e9

    def error(self) -> ThawError:
        """Read the error from a FAILED page."""
        number, n_message, n_hint = struct.unpack_from("<III", self._region.view, 40)
        n_message, n_hint = min(n_message, _MAX_TEXT), min(n_hint, _MAX_TEXT)
        text = bytes(self._region.view[_TEXT_OFFSET : _TEXT_OFFSET + n_message + n_hint])
        message, hint = text[:n_message].decode(errors="replace"), text[n_message:].decode(errors="replace")
        return error_on_page(number, message, hint)

    def sleep(self, seq: int, timeout_s: float) -> None:
        """Sleep until the page's number is not ``seq`` any more, or for ``timeout_s``."""
        futex_wait(self._seq_address, seq, timeout_s)

    def close(self) -> None:
        del self._u64, self._u32
        self._region.close()


class Places:
    """The places of the files' bytes in a segment."""

    def __init__(self, layout: Sequence[PlacedRange]) -> None:
        self._places = {p.file: [q for q in layout if q.file == p.file] for p in layout}

    def locate(self, file: str, offset: int) -> int:
        """The segment offset of byte ``offset`` of ``file``.  Raises KeyError when the segment does not hold it."""
        for p in self._places.get(file, ()):
            if p.offset <= offset < p.offset + p.n_bytes or (p.n_bytes == 0 and p.offset == offset):
                return p.segment_offset + offset - p.offset
        raise KeyError(f"the segment does not hold byte {offset} of {file}")


class SegmentReader:
    """A granted segment, mapped read-only and contiguously.  Takes ownership of ``fds`` (control page, slabs)."""

    def __init__(self, offer: SegmentOffer, fds: Sequence[int]) -> None:
        self.offer = offer
        self.n_bytes = offer.n_bytes
        self.first_bytes = offer.first_bytes or offer.n_bytes
        """Bytes from this offset on come in the background, after all bytes that a start waits for."""
        try:
            if len(fds) != offer.n_slabs + 1 or offer.n_slabs * offer.slab_bytes < offer.n_bytes:
                raise ProtocolError(f"segment of {offer.n_bytes} bytes came with {len(fds)} descriptors")
            self._page = PageReader(fds[0])
            if self._page.n_bytes != offer.n_bytes:
                raise ProtocolError(f"control page says {self._page.n_bytes} bytes, the offer {offer.n_bytes}")
            self._region = Region(offer.n_slabs * offer.slab_bytes)
            for i, fd in enumerate(fds[1:]):
                self._region.map(i * offer.slab_bytes, fd, offer.slab_bytes, writable=False)
        finally:
            for fd in fds:
                os.close(fd)
        self.locate = Places(offer.layout).locate

    @property
    def end(self) -> int:
        """Bytes from the start that have arrived and were verified."""
        return self._page.end

    @property
    def address(self) -> int:
        """Where the segment lies in this process (for cudaHostRegister and native readers)."""
        return self._region.address

    def view(self, segment_offset: int, n_bytes: int) -> memoryview:
        """Read-only bytes; meaningful below :attr:`end` only.  Valid beyond :meth:`close` while it is held."""
        if segment_offset < 0 or n_bytes < 0 or segment_offset + n_bytes > self.n_bytes:
            raise ValueError(f"[{segment_offset}, +{n_bytes}) lies outside the segment of {self.n_bytes} bytes")
        return self._region.view[segment_offset : segment_offset + n_bytes].toreadonly()

    def wait(self, end: int, deadline_s: float) -> int:
        """Sleep until ``[0, end)`` has arrived; return the present end.  ``deadline_s`` counts from this call.

        Raises the fetch's error (ModelCorrupt, StoreUnavailable …), PlatformError when fetchd's heartbeat stops or
        the deadline passes, ProtocolError for a page with impossible values.
        """
        if end > self.n_bytes:
            raise ValueError(f"waiting for byte {end} of a segment of {self.n_bytes} bytes")
        deadline = time.monotonic() + deadline_s
        while True:
            seq = self._page.seq  # before end: progress between the two reads makes the sleep return at once
            state, have = self._page.look()
            if have >= end:
                return have
            if state is SegmentState.FAILED:
                raise self._page.error()
            if self._page.heartbeat_age_s > DEAD_AFTER_S:
                raise PlatformError(
                    f"the fetch stopped at byte {have} of {self.n_bytes}: no heartbeat for {DEAD_AFTER_S:.0f} s",
                    hint="fetchd has died or was stopped; see its log",
                )
            left = deadline - time.monotonic()
            if left <= 0:
                raise PlatformError(f"{have} of the {end} bytes wanted had arrived after {deadline_s:g} s")
            self._page.sleep(seq, min(left, MAX_WAIT_S))

    def close(self) -> None:
        self._page.close()
        self._region.close()
