"""A segment as its readers see it, whoever reads: Python (relay.protocol.segment) or the native library."""

from __future__ import annotations

from typing import Protocol

from relay.protocol.messages import SegmentOffer

ARRIVAL_DEADLINE_S = 3600.0
"""The longest wait for one range: it bounds a fetch that crawls.  One that has died is noticed by its heartbeat."""


class Segment(Protocol):
    """Bytes that are still arriving."""

    offer: SegmentOffer
    n_bytes: int

    def view(self, segment_offset: int, n_bytes: int) -> memoryview: ...

    def wait(self, end: int, deadline_s: float) -> int: ...

    def locate(self, file: str, offset: int) -> int: ...

    def close(self) -> None: ...
