"""The interface of a segment that both readers implement: Python (relay.protocol.segment) and the native library."""

from __future__ import annotations

from typing import Protocol

from relay.protocol.messages import SegmentOffer

ARRIVAL_DEADLINE_S = 3600.0
"""The longest wait for one range.  It limits a very slow fetch; a fetch that has died is noticed by its heartbeat."""


class Segment(Protocol):
    """Bytes that are still arriving."""

    offer: SegmentOffer
    n_bytes: int

    def view(self, segment_offset: int, n_bytes: int) -> memoryview: ...

    def wait(self, end: int, deadline_s: float) -> int: ...

    def locate(self, file: str, offset: int) -> int: ...

    def close(self) -> None: ...
