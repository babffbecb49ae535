"""One kept-alive connection to a web server: requests with ranges, whose bodies are received into a target.

http.client reads an answer's head; the body of a plain connection is received past it, because its ``readinto`` runs
Python code for every 100 KB (docs/lab-log.md).
"""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import struct
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, Final
from urllib.parse import urlsplit

from fetchd.sources.base import Busy, Target, Throttle
from thaw.errors import ModelCorrupt, ModelUnsupported, StoreUnavailable

Connect = Callable[..., socket.socket]
"""Makes a connection, as socket.create_connection."""

_FIRST_READ_BYTES: Final = 16 * 1024
"""The first read of an answer is short, so that the first byte is seen when it comes and not a megabyte later."""
_READ_BYTES: Final = 8 * 1024 * 1024
"""Each read hands the interpreter lock over once: fewer, larger reads disturb the other connections less."""
_SLOW_READ_S: Final = 0.05
"""The time that one read should take.  On a slow link reads are short, so that progress is seen and a changed rank
takes effect about this soon."""
_GROWTH: Final = 8
"""A read is at most this many times longer than the last one: bytes that were already buffered come at once and say
nothing about the link."""
_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
_BUSY: Final = (408, 425, 429)
_DROPPED: Final = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    """The context is made once: to read the system's certificates takes 26 ms, and a fetch from a hub has eight
    connections."""
    return ssl.create_default_context()


def _in_full(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class HttpClient:
    """One thread uses it; any thread may call :meth:`interrupt`.  ``what`` is how errors call the object that a request
    is about."""

    def __init__(
        self, origin: str, timeout_s: float, connect: Connect, tell: Callable[[Exception], str] = _in_full
    ) -> None:
        """``origin`` is ``scheme://host:port``; ``connect`` makes every connection, ``tell`` says why one failed."""
        self.origin, self._timeout_s, self._connect, self._tell = origin, timeout_s, connect, tell
        parts = urlsplit(origin)
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "https":
            self._http: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=timeout_s, context=_tls()
            )
        else:
            self._http = http.client.HTTPConnection(host, port, timeout=timeout_s)
        # The mark must be set before the SYN; subclasses of HTTPConnection replace this function too.
        self._http._create_connection = self._connect_socket  # type: ignore[attr-defined]
        self._most = _FIRST_READ_BYTES
        self._interrupted = False
        self._early: socket.socket | None = None
        self._socket: socket.socket | None = None  # http.client forgets it when the answer ends the connection

    def interrupt(self) -> None:
        """Make a blocked read, and every later request, fail now."""
        self._interrupted = True  # set before the socket is read: _ask_once sets the socket and then reads this
        for sock in (self._socket, self._early):
            if sock is not None:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it was closed just now

    def close(self) -> None:
        self._http.close()
        self._socket = None

    def ask(self, method: str, path: str, headers: dict[str, str], what: str) -> http.client.HTTPResponse:
        """Send a request and read the answer's head.  A kept-alive connection that the server closed is renewed.
        Raises StoreUnavailable."""
        reused = self._http.sock is not None
        try:
            return self._ask_once(method, path, headers)
        except _DROPPED as e:
            self.close()
            if not reused or self._interrupted:
                raise self._unavailable(what, e) from e
        except (OSError, http.client.HTTPException) as e:
            self.close()
            raise self._unavailable(what, e) from e
        try:
            return self._ask_once(method, path, headers)
        except (OSError, http.client.HTTPException) as e:
            self.close()
            raise self._unavailable(what, e) from e

    def whole(self, response: http.client.HTTPResponse, most: int, what: str) -> bytes:
        """The body of a short answer.  Raises StoreUnavailable, and ModelCorrupt for more than ``most`` bytes."""
        try:
            body = response.read(most + 1)
        except (OSError, http.client.HTTPException, ValueError) as e:
            self.close()
            raise self._unavailable(what, e) from e
        if len(body) > most:
            self.close()
            raise ModelCorrupt(f"{what}: the answer has more than {most} bytes", hint="this is not what was asked for")
        return body

    def receive(self, response: http.client.HTTPResponse, target: Target, throttle: Throttle, what: str) -> None:
        """Fill ``target`` with the body.  A connection with unread bytes is closed: they would be taken for the next
        answer.  Raises StoreUnavailable, FetchCancelled."""
        try:
            self._receive(response, target, throttle, what)
        finally:
            if target.left:
                self.close()
            else:
                response.close()

    def _connect_socket(self, *args: Any) -> socket.socket:
        """While TLS shakes hands, http.client's own socket is in nobody's hands, so another descriptor of it is."""
        sock = self._connect(*args)
        self._early = sock.dup()
        if self._interrupted:  # while it connected; interrupt() sets this before it looks for a socket
            sock.close()
            raise ConnectionAbortedError("interrupted")
        return sock

    def _ask_once(self, method: str, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        if self._http.sock is None:
            try:
                self._http.connect()
                self._socket = self._http.sock
            finally:
                early, self._early = self._early, None
                if early is not None:
                    early.close()
        if self._interrupted:
            raise ConnectionAbortedError("interrupted")
        self._http.request(method, path, headers=headers)
        return self._http.getresponse()

    def _receive(self, response: http.client.HTTPResponse, target: Target, throttle: Throttle, what: str) -> None:
        body = _Body(response, self._socket, self._timeout_s)
        most = _FIRST_READ_BYTES
        while target.left:
            piece = target.next(throttle.quantum(most))
            throttle.before_read(len(piece))
            began = time.monotonic()
            try:
                count = body.read_into(piece)
            except (OSError, http.client.HTTPException, ValueError) as e:  # ValueError: interrupted, file closed
                raise self._unavailable(what, e) from e
            if count == 0:
                raise StoreUnavailable(f"{what}: the connection broke {target.left} bytes early")
            target.advance(count)
            throttle.after_read(count)
            took = time.monotonic() - began
            fitting = max(_FIRST_READ_BYTES, int(count * _SLOW_READ_S / max(took, 1e-9)))
            most = self._most = min(_READ_BYTES, fitting, _GROWTH * self._most)

    def _unavailable(self, what: str, e: Exception) -> StoreUnavailable:
        if isinstance(e, TimeoutError):
            return StoreUnavailable(f"{what}: the store was silent for {self._timeout_s:g} s")
        return StoreUnavailable(f"{what}: {self._tell(e)}", hint="is the store up and reachable?")


def check_range(response: http.client.HTTPResponse, first: int, n_bytes: int, what: str) -> None:
    """Check that an answer with status 200 or 206 has ``[first, +n_bytes)``.  Raises ModelCorrupt, ModelUnsupported."""
    if response.status == 200 and first == 0 and response.length == n_bytes:
        return  # the whole object was wanted: a server without ranges will do
    if response.status == 200:
        raise ModelUnsupported(
            f"{what}: the server does not serve ranges", hint="serve the model from nginx, S3 or another that has Range"
        )
    found = _CONTENT_RANGE.fullmatch(response.getheader("Content-Range", ""))
    if found is None:
        raise ModelCorrupt(f"{what}: 206 without a usable Content-Range")
    begin, last, total = (int(g) for g in found.groups())
    if begin != first or last != first + n_bytes - 1 or response.length != n_bytes:
        got = f"[{begin}, +{last + 1 - begin}) of {total} bytes"
        raise ModelCorrupt(
            f"{what}: asked for [{first}, +{n_bytes}), got {got}",
            hint="the object is shorter than it was: push it again",
        )


def passing(response: http.client.HTTPResponse, what: str) -> StoreUnavailable | None:
    """The error of a server that may answer in another way later; None for another answer."""
    if response.status < 500 and response.status not in _BUSY:
        return None
    text, hint = f"{what}: the store answered {response.status}", "retry later; check the store"
    after_s = _retry_after_s(response)
    return Busy(text, after_s, hint=hint) if after_s > 0 else StoreUnavailable(text, hint=hint)


def _retry_after_s(response: http.client.HTTPResponse) -> float:
    """The pause for which the server asks, in seconds or until a date; 0 if it asks for none."""
    text = response.getheader("Retry-After", "").strip()
    if re.fullmatch("[0-9]{1,9}", text):
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError, OSError):
        return 0.0


class _Body:
    """The bytes of an answer: first those that http.client has buffered behind the head, then those of the socket."""

    def __init__(self, response: http.client.HTTPResponse, sock: socket.socket | None, timeout_s: float) -> None:
        self._response, self._timeout_s = response, timeout_s
        self._sock = None if sock is None or isinstance(sock, ssl.SSLSocket) else sock  # TLS has its own buffers
        self._buffered: int | None = None  # None until the first read

    def read_into(self, piece: memoryview) -> int:
        """Return the number of bytes read, 0 at the end.  Raises OSError, TimeoutError when no byte came in time."""
        if self._sock is None:
            return self._response.readinto(piece)
        if self._buffered is None:
            self._buffered = len(self._response.fp.peek(1))
        if not self._buffered:
            return self._receive(self._sock, piece)
        count = self._response.readinto(piece[: self._buffered])
        self._buffered -= count
        return count

    def _receive(self, sock: socket.socket, piece: memoryview) -> int:
        """Fill ``piece``, or as much as comes before the end or the time limit.

        Python polls before every read of a socket with a timeout; a blocking one with the kernel's limit needs none.
        """
        seconds, rest = divmod(self._timeout_s, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
        sock.settimeout(None)
        try:
            return sock.recv_into(piece, len(piece), socket.MSG_WAITALL)
        except BlockingIOError:  # how the kernel says that its limit has passed
            raise TimeoutError from None
        finally:
            sock.settimeout(self._timeout_s)


def etag_of(response: http.client.HTTPResponse) -> str:
    """The etag without its mark for weak etags: many servers send a weak one to HEAD and a strong one to GET."""
    tag = response.getheader("ETag") or response.getheader("Last-Modified") or ""
    return tag.removeprefix("W/").strip('"')
