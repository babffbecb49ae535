"""Finds the end of a request in the bytes of a connection (RFC 9112).  Pure.

Only this file decides where a request ends; gunicorn's parser then reads the head, and refuses text that is not HTTP.
Requests that two readers could interpret differently are refused here: two lengths, a length beside chunks, another
coding.
"""

from __future__ import annotations

import enum
import io
import re
from http import HTTPStatus
from typing import Final

from relay.protocol.http1 import BrokenExchange, chunk_size
from thaw.errors import BadRequest

MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_DIGITS: Final = 15
_MAX_CHUNK_LINE: Final = 1024
_MAX_TRAILER_BYTES: Final = 8 * 1024
_FRAMING: Final = re.compile(rb"\r\n(content-length|transfer-encoding|expect)[ \t]*:[ \t]*([^\r\n]*)", re.I)
_AUTHORIZATION: Final = re.compile(rb"\r\nauthorization:[ \t]*([^\r\n]*)", re.I)
_TRAILER: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")
_FRAMING_TRAILER: Final = re.compile(rb"(?:content-length|transfer-encoding):", re.I)
_EXTENSION: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_BARE_LF: Final = re.compile(rb"(?<!\r)\n")


class BrokenRequest(BadRequest):
    """Bytes that are not a request of HTTP/1.1.  Where the next request begins is unknown, so the connection ends."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.http_status = status


class RequestReader:
    """Feed it all arriving bytes until it is complete; ``rest`` then has the bytes behind the request."""

    __slots__ = ("_body", "_chunks", "_head", "_scanned", "complete", "expects", "head", "n_bytes", "n_read", "rest")

    def __init__(self) -> None:
        self.head = b""
        """The head with its empty line, once it is complete."""
        self.n_bytes: int | None = 0
        """The announced length of the body; None if it comes in chunks."""
        self.n_read = 0
        self.expects = False
        """The client sends the body when it has read ``100 Continue``."""
        self.complete = False
        self.rest = b""
        self._head = bytearray()
        self._scanned = 0
        self._body = io.BytesIO()
        self._chunks: _Chunks | None = None

    @property
    def n_body(self) -> int:
        """The bytes of the body that have arrived."""
        return self._body.tell()

    @property
    def authorization(self) -> str:
        """The value of the header, of several the first."""
        found = _AUTHORIZATION.search(self.head)
        return found[1].decode("latin-1") if found else ""

    @property
    def is_web(self) -> bool:
        """Whether a web action is called, which the state server may have to be asked for."""
        return b"/api/v1/web/" in self.head.partition(b"\r\n")[0]

    def feed(self, data: bytes) -> bool:
        """Return whether the request is complete.  Raises BrokenRequest."""
        self.n_read += len(data)
        if not self.head:
            rest = self._feed_head(data)
            if rest is None:
                return False
            data = rest
        self.complete = self._feed_body(data)
        return self.complete

    def body(self) -> io.BytesIO:
        """Return the part of the body that has arrived.  The reader keeps nothing of it, so the caller can free the
        memory."""
        body, self._body = self._body, io.BytesIO()
        return io.BytesIO(body.getvalue())

    def _feed_head(self, data: bytes) -> bytes | None:
        """Return the bytes behind the head, None while it is incomplete."""
        if self._head:
            self._head += data
            data = b"" if self._head.find(b"\r\n\r\n", self._scanned) < 0 else bytes(self._head)
        end = data.find(b"\r\n\r\n", self._scanned)
        if end < 0:
            self._keep_head(data)
            return None
        begin = 2 if data.startswith(b"\r\n") else 0  # section 2.2: an empty line before a request is ignored
        if end < begin or end > MAX_HEAD_BYTES:
            self._refuse_head(end)
        self.head, self._head = data[begin : end + 4], bytearray()
        self._frame()
        return data[end + 4 :]

    def _keep_head(self, data: bytes) -> None:
        self._head += data
        if len(self._head) > MAX_HEAD_BYTES:
            self._refuse_head(len(self._head))
        if _BARE_LF.search(self._head, self._scanned):
            raise BrokenRequest("a line of the head does not end in CR LF")
        self._scanned = max(0, len(self._head) - 3)

    def _refuse_head(self, n_bytes: int) -> None:
        if n_bytes <= MAX_HEAD_BYTES:
            raise BrokenRequest("the head is empty")
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        raise BrokenRequest(f"the head is longer than {MAX_HEAD_BYTES} bytes", status)

    def _frame(self) -> None:
        lengths: list[bytes] = []
        codings: list[bytes] = []
        for name, value in _FRAMING.findall(self.head):
            known = name.lower()
            if known == b"expect":
                newer = not self.head.partition(b"\r\n")[0].endswith(b"HTTP/1.0")  # section 10.1.1 of RFC 9110
                self.expects = newer and value.strip().lower() == b"100-continue"
            else:
                (lengths if known == b"content-length" else codings).append(value.strip(b" \t"))
        if len(lengths) + len(codings) > 1:
            raise BrokenRequest("the body has more than one length")
        if codings:
            if codings[0].lower() != b"chunked":
                raise BrokenRequest("the only transfer coding here is chunked", HTTPStatus.NOT_IMPLEMENTED)
            self.n_bytes, self._chunks = None, _Chunks(self._body)
        elif lengths:
            if not lengths[0].isdigit() or len(lengths[0]) > _MAX_DIGITS:
                raise BrokenRequest("Content-Length is not a number of bytes")
            self.n_bytes = int(lengths[0])

    def _feed_body(self, data: bytes) -> bool:
        if self._chunks is not None:
            rest = self._chunks.feed(data)
            if rest is None:
                return False
            self.rest = rest
            return True
        left = (self.n_bytes or 0) - self._body.tell()
        self._body.write(data if len(data) <= left else data[:left])
        self.rest = data[left:]
        return len(data) >= left


class _Part(enum.Enum):
    SIZE = "a chunk's size"
    END = "the line end behind a chunk"
    TRAILER = "the trailer"


class _Chunks:
    """Takes the framing off a body in chunks.  Extensions and trailers are left out."""

    def __init__(self, body: io.BytesIO) -> None:
        self._body = body
        self._part = _Part.SIZE
        self._held = b""  # the beginning of an incomplete line
        self._left = 0
        self._n_framing = self._n_trailer = 0

    def feed(self, data: bytes) -> bytes | None:
        """Return the bytes behind the body, None while it is incomplete.  Raises BrokenRequest."""
        if self._held:
            data, self._held = self._held + data, b""
        at = 0
        while True:
            if self._left:
                n = min(self._left, len(data) - at)
                self._body.write(data[at : at + n])
                at += n
                self._left -= n
                if self._left:
                    return None
            end = data.find(b"\r\n", at, at + _MAX_CHUNK_LINE)
            if end < 0:
                if len(data) - at >= _MAX_CHUNK_LINE:
                    raise BrokenRequest(f"{self._part.value} is longer than {_MAX_CHUNK_LINE} bytes")
                self._held = data[at:]
                return None
            line, at = data[at:end], end + 2
            self._n_framing += len(line) + 2
            if self._is_last(line):
                return data[at:]

    def _is_last(self, line: bytes) -> bool:
        if self._part is _Part.TRAILER:
            self._n_trailer += len(line)
            if self._n_trailer > _MAX_TRAILER_BYTES:
                raise BrokenRequest(f"the trailer is longer than {_MAX_TRAILER_BYTES} bytes")
            if line and (not _TRAILER.fullmatch(line) or _FRAMING_TRAILER.match(line)):
                raise BrokenRequest(f"not a field of a trailer: {line!r:.40}")
            return not line
        if self._part is _Part.END:
            if line:
                raise BrokenRequest("a chunk is longer than its size")
            self._part = _Part.SIZE
            return False
        self._begin_chunk(line)
        return False

    def _begin_chunk(self, line: bytes) -> None:
        if self._n_framing > 64 * 1024 + self._body.tell() // 8:
            raise BrokenRequest("the chunks are too small")  # each costs as much time as a kilobyte
        size, _, extension = line.partition(b";")
        if not _EXTENSION.fullmatch(extension):
            raise BrokenRequest(f"not an extension of a chunk: {line!r:.40}")
        try:
            self._left = chunk_size(size.rstrip(b" \t"))
        except BrokenExchange as e:
            raise BrokenRequest(f"{e}: {line!r:.40}") from e
        self._part = _Part.END if self._left else _Part.TRAILER
