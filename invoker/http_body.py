"""Where an HTTP/1.1 response ends, while its bytes are passed on as they are.  Pure.

The data port forwards a container's answer unbuffered and must know its end, to keep both connections alive.
``feed`` says how many of the bytes belong to the response; "more is needed" is a state.
"""

from __future__ import annotations

import enum
import re
from typing import Final

from thaw.errors import ProtocolError

MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_SIZE_LINE: Final = 1024
_HEX: Final = re.compile(rb"[0-9A-Fa-f]{1,15}")


class Part(enum.Enum):
    HEAD = "head"
    LENGTH = "length"  # a body of known length
    SIZE = "size"  # a chunk's size line
    CHUNK = "chunk"  # its data and the line end behind it
    TRAILER = "trailer"
    DONE = "done"


class ResponseParser:
    """Feed it everything that arrives; ``done`` when the response is complete.  Raises ProtocolError."""

    def __init__(self) -> None:
        self.part = Part.HEAD
        self.status = 0
        self.keep_alive = True
        self._line = b""
        self._left = 0

    @property
    def done(self) -> bool:
        return self.part is Part.DONE

    def feed(self, data: bytes) -> int:
        """How many bytes of ``data`` are the response's."""
        at = 0
        while at < len(data) and not self.done:
            at = self._skip(data, at) if self.part in (Part.LENGTH, Part.CHUNK) else self._take_line(data, at)
        return at

    def _skip(self, data: bytes, at: int) -> int:
        n = min(self._left, len(data) - at)
        self._left -= n
        if self._left == 0:
            self.part = Part.SIZE if self.part is Part.CHUNK else Part.DONE
        return at + n

    def _take_line(self, data: bytes, at: int) -> int:
        """One line of a chunked body, or the whole head."""
        mark = b"\r\n\r\n" if self.part is Part.HEAD else b"\r\n"
        limit = MAX_HEAD_BYTES if self.part is Part.HEAD else _MAX_SIZE_LINE
        before = len(self._line)
        joined = self._line + data[at:]
        end = joined.find(mark)
        if end < 0:
            if len(joined) > limit:
                raise ProtocolError(f"the container's {self.part.value} is longer than {limit} bytes")
            self._line = joined
            return len(data)
        self._line = b""
        line = joined[:end]
        if self.part is Part.HEAD:
            self._head(line)
        elif self.part is Part.SIZE:
            self._size(line)
        elif not line:
            self.part = Part.DONE
        return at + end + len(mark) - before

    def _head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        words = first.split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise ProtocolError(f"not an HTTP response: {first!r:.80}")
        self.status = int(words[1])
        headers = {k.strip().lower(): v.strip().lower() for k, _, v in (line.partition(b":") for line in lines)}
        self.keep_alive = headers.get(b"connection") != b"close" and words[0] != b"HTTP/1.0"
        if headers.get(b"transfer-encoding") == b"chunked":
            self.part = Part.SIZE
            return
        length = headers.get(b"content-length", b"0" if self.status in (204, 304) else b"")
        if not length.isdigit():
            raise ProtocolError("the container's response has neither a length nor chunks")
        self._left = int(length)
        self.part = Part.LENGTH if self._left else Part.DONE

    def _size(self, line: bytes) -> None:
        digits = line.partition(b";")[0].strip()
        if not _HEX.fullmatch(digits):  # int() would also take a sign, 0x and underscores
            raise ProtocolError(f"not a chunk size: {line!r:.40}")
        size = int(digits, 16)
        self._left = size + 2
        self.part = Part.CHUNK if size else Part.TRAILER
