"""Where an HTTP/1.1 response ends, while its bytes are passed on as they are.  Pure.

The data port forwards a container's answer unbuffered and must know its end, to keep both connections alive.  A head
and a chunk's size are held back until they are whole and right: the gateway must not read of them what is refused here.
"""

from __future__ import annotations

import enum
import io
from typing import Final

from relay.clients.http11 import BrokenExchange, chunk_size, read_answer_head
from thaw.errors import ProtocolError

MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_SIZE_LINE: Final = 32


class Part(enum.Enum):
    HEAD = "head"
    LENGTH = "length"  # a body of known length
    SIZE = "size"  # a chunk's size line
    CHUNK = "chunk"  # its data and the line end behind it
    LAST = "last"  # the empty line behind the last chunk
    DONE = "done"


class ResponseParser:
    """Feed it everything that arrives; ``done`` when the response is complete.  Raises ProtocolError."""

    def __init__(self) -> None:
        self.part = Part.HEAD
        self.status = 0
        self.keep_alive = True
        self._held = b""  # the beginning of a head or a line
        self._left = 0

    @property
    def done(self) -> bool:
        return self.part is Part.DONE

    def feed(self, data: bytes) -> bytes:
        """What can be passed on now; nothing of what is behind the response's end."""
        if self._held:
            data, self._held = self._held + data, b""
        at = 0
        while at < len(data) and not self.done:
            took = self._skip(data, at) if self.part in (Part.LENGTH, Part.CHUNK) else self._take_line(data, at)
            if not took:
                self._held = data[at:]
                break
            at += took
        return data[:at]

    def _skip(self, data: bytes, at: int) -> int:
        n = min(self._left, len(data) - at)
        self._left -= n
        if self._left == 0:
            self.part = Part.SIZE if self.part is Part.CHUNK else Part.DONE
        return n

    def _take_line(self, data: bytes, at: int) -> int:
        """The length of one line of a chunked body, or of the whole head; 0 while it is not whole."""
        mark = b"\r\n\r\n" if self.part is Part.HEAD else b"\r\n"
        limit = MAX_HEAD_BYTES if self.part is Part.HEAD else _MAX_SIZE_LINE
        end = data.find(mark, at, at + limit)
        if end < 0:
            if len(data) - at >= limit:
                raise ProtocolError(f"the container's {self.part.value} is longer than {limit} bytes")
            return 0
        line = data[at:end]
        try:
            self._read(line, mark)
        except BrokenExchange as e:
            raise ProtocolError(f"the container's {self.part.value}: {e}: {line!r:.80}") from e
        return len(line) + len(mark)

    def _read(self, line: bytes, mark: bytes) -> None:
        if self.part is Part.HEAD:
            head = read_answer_head(io.BytesIO(line + mark))
            self.status, self.keep_alive = head.status, head.keep_alive
            self._left = head.n_bytes or 0
            self.part = Part.SIZE if head.n_bytes is None else Part.LENGTH if self._left else Part.DONE
        elif self.part is Part.SIZE:
            size = chunk_size(line)
            self._left = size + 2
            self.part = Part.CHUNK if size else Part.LAST
        elif line:
            raise ProtocolError(f"something behind the last chunk: {line!r:.40}")
        else:
            self.part = Part.DONE
