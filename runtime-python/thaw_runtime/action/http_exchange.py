"""One request to the HTTP server in an image, and its answer: whole if it is short, else in parts as they come.

An answer in parts is a stream of frames, as an LLM's is (u32-LE length + one JSON message in each): RunHead, RunPart
for each part of the body, and RunFinished, or RunFailed if the server breaks off.  The messages are defined in
relay/protocol/container_messages.py, a package that the image of this program does not contain.
"""

from __future__ import annotations

import http.client
import io
import json
import re
import select
import socket
import struct
from base64 import b64encode
from collections.abc import Iterator, Mapping
from typing import Any, Final

from thaw_runtime.action.http_server import Request, named_headers

STREAM_TYPE: Final = "application/x-thaw-stream"
STREAM_HEAD: Final = (f"HTTP/1.1 200 OK\r\nContent-Type: {STREAM_TYPE}\r\nTransfer-Encoding: chunked\r\n\r\n").encode()
LAST_CHUNK: Final = b"0\r\n\r\n"
PART_BYTES: Final = 48 * 1024
"""The longest part of a body; in base64 it has 64 KiB."""
_WHOLE: Final = re.compile(r";\s*whole=([0-9]{1,15})\b")
_MOST_QUOTED: Final = 500
_ERRORS: Final = (OSError, http.client.HTTPException, ValueError)


class Failed(Exception):
    """The image breaks the contract.  The message is for the developer."""


class CallerGone(OSError):
    """The caller has closed its connection, so nobody reads the answer."""


def whole_bytes(accept: str) -> int | None:
    """The longest result that the caller wants whole; None if it wants every answer whole."""
    if not accept.startswith(STREAM_TYPE):
        return None
    named = _WHOLE.search(accept)
    return int(named[1]) if named is not None else 0


class Exchange:
    """``status`` and ``headers`` are those of the answer.  ``n_bytes`` is the announced length of its body; None if it
    comes in chunks, or ends with its connection."""

    def __init__(self, port: int, request: Request, caller: socket.socket, timeout_s: float) -> None:
        """Send the request and read the head of the answer.  Raises Failed, CallerGone."""
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        self._port = port
        try:
            self._response = self._begin(request, caller, timeout_s)
        except CallerGone:
            self.close()
            raise
        except _ERRORS as e:
            self.close()
            said = f"{type(e).__name__} {e}"[:_MOST_QUOTED]
            raise Failed(f"The image's server gave no answer that can be read: {said}") from e
        self.status = self._response.status
        self.headers = named_headers(self._response.getheaders())
        self.n_bytes = self._response.length

    def _begin(self, request: Request, caller: socket.socket, timeout_s: float) -> http.client.HTTPResponse:
        connection = self._connection
        connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
        ours = {"content-length": str(len(request.body)), "connection": "close"}
        for name, text in {"host": "localhost", **request.headers, **ours}.items():
            connection.putheader(name, text)
        connection.endheaders(request.body)
        source: Any = _Source(connection.sock, caller, timeout_s)  # it has what HTTPResponse takes from a socket
        response = http.client.HTTPResponse(source, method=request.method)
        response.begin()
        return response

    def parts(self) -> Iterator[bytes]:
        """The body as it comes.  Raises Failed when the server breaks off, CallerGone."""
        n_read = 0
        try:
            while n_read != self.n_bytes:
                most = PART_BYTES if self.n_bytes is None else min(PART_BYTES, self.n_bytes - n_read)
                part = self._response.read1(most)
                if not part:
                    break
                n_read += len(part)
                yield part
        except CallerGone:
            raise
        except _ERRORS as e:
            said = f"{type(e).__name__} {e}"[:_MOST_QUOTED]
            raise Failed(f"The image's server broke off its answer after {n_read} bytes: {said}") from e
        self._check_end(n_read)

    def _check_end(self, n_read: int) -> None:
        """Raises Failed.  A body that ends with its connection may have lost its server, too."""
        is_short = self.n_bytes is not None and n_read < self.n_bytes
        if is_short or (self.n_bytes is None and not self._response.chunked and not listens(self._port)):
            raise Failed(f"The image's server broke off its answer after {n_read} bytes.")

    def whole(self, most_bytes: int) -> bytes:
        """The whole body.  Raises Failed, CallerGone."""
        data = bytearray()
        for part in self.parts():
            data += part
            if len(data) > most_bytes:
                raise Failed(f"The image's server answered with more than {most_bytes} bytes.")
        return bytes(data)

    def chunks(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        """The answer as chunks of HTTP, each with a message.  The last one says if the server broke off.  Raises
        CallerGone."""
        head = {"status": self.status, "headers": self.headers, "n_bytes": self.n_bytes}
        yield _chunk("RunHead", head)
        try:
            for part in parts:
                yield _chunk("RunPart", {"data": b64encode(part).decode()})
        except Failed as e:
            info = {"code": "DeveloperError", "message": str(e), "hint": ""}
            yield _chunk("RunFailed", {"error": info}) + LAST_CHUNK
            return
        finished = {"reason": "stop", "prompt_tokens": 0, "completion_tokens": 0}
        yield _chunk("RunFinished", finished) + LAST_CHUNK

    def close(self) -> None:
        self._connection.close()


class _Source:
    """The socket from which http.client reads an answer.  While it waits, it also watches the caller."""

    def __init__(self, sock: socket.socket, caller: socket.socket, timeout_s: float) -> None:
        self._sock, self._caller, self._timeout_s = sock, caller, timeout_s

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Watched(self._sock, self._caller, self._timeout_s))


class _Watched(io.RawIOBase):
    def __init__(self, sock: socket.socket, caller: socket.socket, timeout_s: float) -> None:
        self._sock, self._caller, self._timeout_ms = sock, caller.fileno(), timeout_s * 1000
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(caller, select.POLLRDHUP)

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        ready = {fd for fd, _ in self._poll.poll(self._timeout_ms)}
        if self._caller in ready:
            raise CallerGone
        if not ready:
            raise TimeoutError("timed out")
        return self._sock.recv_into(into)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5.0).close()
    except OSError:
        return False
    return True


def _chunk(kind: str, fields: Mapping[str, object]) -> bytes:
    data = json.dumps({"t": kind, **fields}).encode()
    frame = struct.pack("<I", len(data)) + data
    return b"%x\r\n%b\r\n" % (len(frame), frame)
