"""HTTP/1.1 as the platform's own processes read it: heads, chunk sizes, and the end of a response.  Pure.

An invoker forwards a container's answer.  It must find the same end of the answer as the gateway, whatever bytes user
code made the container send.  So both use this file, and it refuses everything that two readers could interpret
differently: lines that do not end in CR LF or hold more than printable ASCII, chunk extensions, trailers.

The proxy of Python functions cannot import this file, because its image holds thaw_runtime and the standard library
alone.  Its reader is thaw_runtime/action/lean_http.py, and one test gives both the same requests.
"""

from __future__ import annotations

import enum
import io
import re
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Final, NamedTuple

from thaw.errors import ProtocolError

_MAX_LINE: Final = 64 * 1024
_MAX_HEADERS: Final = 100
_LINE: Final = re.compile(rb"[\t -~]*\r\n")
_HEX: Final = re.compile(rb"[0-9A-Fa-f]{1,15}")
_STATUS: Final = re.compile(rb"[0-9]{3}")
_MAX_DIGITS: Final = 15
_VERSIONS: Final = ("HTTP/1.1", "HTTP/1.0")
MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_SIZE_LINE: Final = 32


class BrokenExchange(ConnectionError):
    """The peer closed in the middle of a message, or sent something that is not HTTP/1.1."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    status: int
    keep_alive: bool
    n_bytes: int | None  # length of the body; None if it comes in chunks


class RequestHead(NamedTuple):
    method: str
    target: str
    version: str
    headers: dict[str, str]
    keep_alive: bool


def read_request_head(first_line: bytes, file: BufferedIOBase) -> RequestHead:
    """Read a head up to the empty line.  ``first_line`` includes its line end.  A body must have a length.  Raises
    BrokenExchange.
    """
    words = first_line[:-2].decode("latin-1").split(" ")
    if not _LINE.fullmatch(first_line) or len(words) != 3 or not all(words) or words[2] not in _VERSIONS:
        raise BrokenExchange("not an HTTP request")
    headers = read_headers(file)
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not length.isdigit() or len(length) > _MAX_DIGITS:
        raise BrokenExchange("a request whose body has no length")  # its body would be taken for the next request
    keep_alive = words[2] == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
    return RequestHead(words[0], words[1], words[2], headers, keep_alive)


def read_answer_head(file: BufferedIOBase) -> AnswerHead:
    """Read a head up to the empty line.  Raises BrokenExchange."""
    words = read_line(file).split(b" ", 2)
    if len(words) < 2 or words[0] not in (b"HTTP/1.1", b"HTTP/1.0") or not _STATUS.fullmatch(words[1]):
        raise BrokenExchange("not an HTTP response")
    status, headers = int(words[1]), read_headers(file)
    keep_alive = words[0] == b"HTTP/1.1" and headers.get("connection", "").lower() != "close"
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return AnswerHead(status, keep_alive, None)
    length = headers.get("content-length", "0" if status in (204, 304) else "")
    if not length.isdigit() or len(length) > _MAX_DIGITS:
        raise BrokenExchange("a response without a length or chunks")
    return AnswerHead(status, keep_alive, int(length))


def chunk_size(line: bytes) -> int:
    """The size in a chunk's size line.  Raises BrokenExchange."""
    if not _HEX.fullmatch(line):  # int() would also accept a sign, 0x and underscores
        raise BrokenExchange("not a chunk size")
    return int(line, 16)


def read_headers(file: BufferedIOBase) -> dict[str, str]:
    """Read the headers up to the empty line.  Names are in lower case; the last value of a repeated name counts.
    Raises BrokenExchange.
    """
    headers: dict[str, str] = {}
    for _ in range(_MAX_HEADERS + 1):
        line = read_line(file)
        if not line:
            return headers
        name, colon, value = line.decode("ascii").partition(":")
        if not colon:
            raise BrokenExchange("not a header")
        headers[name.strip().lower()] = value.strip()
    raise BrokenExchange(f"more than {_MAX_HEADERS} headers")


def read_line(file: BufferedIOBase) -> bytes:
    """Read one line, and return it without its line end.  Raises BrokenExchange."""
    line = file.readline(_MAX_LINE + 1)
    if not _LINE.fullmatch(line):
        raise BrokenExchange("the peer closed before its answer's end, or sends what is no line of ASCII text")
    return line[:-2]


class Part(enum.Enum):
    HEAD = "head"
    LENGTH = "length"  # a body of known length
    SIZE = "size"  # a chunk's size line
    CHUNK = "chunk"  # a chunk's data and the line end after it
    LAST = "last"  # the empty line after the last chunk
    DONE = "done"


class ResponseParser:
    """Finds the end of a response, while the caller forwards its bytes unchanged.

    Feed it everything that arrives; ``done`` is True when the response is complete.  It holds back a head or a chunk's
    size until that is complete and valid, so no later reader gets bytes that are refused here.  Raises ProtocolError.
    """

    def __init__(self) -> None:
        self.part = Part.HEAD
        self.status = 0
        self.keep_alive = True
        self._held = b""  # the beginning of an incomplete head or line
        self._left = 0

    @property
    def done(self) -> bool:
        return self.part is Part.DONE

    def feed(self, data: bytes) -> bytes:
        """The bytes that can be forwarded now; none from behind the response's end."""
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
        """Read one line of a chunked body, or the whole head.  Return its length, 0 while it is incomplete."""
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
