"""A segment that holds the bytes of a checkpoint's small files alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relay.protocol.messages import PlacedRange
from thaw.model import TensorInfo


@dataclass(frozen=True, slots=True)
class Offer:
    layout: tuple[PlacedRange, ...]
    tensors: tuple[TensorInfo, ...] = ()


class SidecarSegment:
    """``files`` have bytes, text, or what is written as JSON."""

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._data, layout = b"", []
        for name, content in files.items():
            data = as_bytes(content)
            layout.append(PlacedRange(name, 0, len(data), len(self._data)))
            self._data += data
        self.offer = Offer(tuple(layout))

    def wait(self, end: int, deadline_s: float) -> None:
        """Every byte is there."""

    def view(self, offset: int, n_bytes: int) -> bytes:
        return self._data[offset : offset + n_bytes]


def as_bytes(content: Any) -> bytes:
    if isinstance(content, bytes):
        return content
    return (content if isinstance(content, str) else json.dumps(content)).encode()
