"""``http(s)://host/dir``: ranged GETs on kept-alive connections, received straight into the slabs.

The same reader serves S3, which only adds a signature.  http.client reads an answer's head; the body of a plain
connection is received past it, because its ``readinto`` runs Python code for every 100 KB (docs/lab-log.md).
"""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from fetchd.gate import gate_of
from fetchd.marks import connect_marked
from fetchd.settings import FetchdSettings
from fetchd.sources.base import AccessRefused, ObjectInfo, Refused, Target, Throttle, not_a_uri
from thaw.errors import ModelCorrupt, ModelNotFound, ModelUnsupported, StoreUnavailable, ThawError

_FIRST_READ_BYTES: Final = 16 * 1024
"""The first read of an answer is short, so that the first byte is seen when it comes and not a megabyte later."""
_READ_BYTES: Final = 8 * 1024 * 1024
"""Each read hands the interpreter lock over once: fewer, larger reads disturb the other connections less."""
_SLOW_READ_S: Final = 0.05
"""On a slow link reads stay short, so that progress is seen, and a changed rank obeyed, about this soon."""
_GROWTH: Final = 8
"""A read is at most this many times longer than the last one: bytes that were already buffered come at once and say
nothing about the link."""
_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
_BUSY: Final = (408, 425, 429)
_HIDDEN: Final = (401, 403)
_MISSING: Final = (404, 410)
_DROPPED: Final = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)

Signer = Callable[[str, str, dict[str, str]], dict[str, str]]
"""(method, url, headers) → the headers to send."""


def unsigned(_method: str, _url: str, headers: dict[str, str]) -> dict[str, str]:
    return headers


def open_http(uri: str, settings: FetchdSettings, *, huge: bool) -> HttpSource:
    parts = urlsplit(uri)
    if not parts.hostname or "@" in parts.netloc:  # a name and password would go into logs
        raise not_a_uri(uri, f"{parts.scheme}://host/directory")
    base_url = f"{parts.scheme}://{parts.netloc}{parts.path}"
    return HttpSource(base_url, settings.read_timeout_s, connect=gate_of(settings).connect)


class HttpSource:
    """A directory of objects under ``base_url`` (no trailing slash)."""

    def __init__(
        self,
        base_url: str,
        timeout_s: float,
        *,
        kind: str = "http",
        sign: Signer = unsigned,
        connect: Callable[..., socket.socket] = connect_marked,
        refused_hint: str = "check uri and credentials",
    ) -> None:
        """``connect`` makes every connection, as socket.create_connection.  ``refused_hint``: what to check when the
        store refuses access."""
        self.connect_socket, self.refused_hint = connect, refused_hint
        self.kind, self.base_url, self.timeout_s, self.sign = kind, base_url.rstrip("/"), timeout_s, sign
        self.host = urlsplit(base_url).hostname or ""

    def connect(self) -> HttpConnection:
        return HttpConnection(self)


class HttpConnection:
    def __init__(self, source: HttpSource) -> None:
        self._source = source
        parts = urlsplit(source.base_url)
        self._path = quote(unquote(parts.path), safe="/~-._")
        self._origin = f"{parts.scheme}://{parts.netloc}"
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "https":
            context = ssl.create_default_context()
            self._http: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=source.timeout_s, context=context
            )
        else:
            self._http = http.client.HTTPConnection(host, port, timeout=source.timeout_s)
        # The mark must be set before the SYN; subclasses of HTTPConnection replace this function too.
        self._http._create_connection = self._connect_socket  # type: ignore[attr-defined]
        self._most = _FIRST_READ_BYTES
        self._interrupted = False
        self._early: socket.socket | None = None
        self._socket: socket.socket | None = None  # http.client forgets it when the answer ends the connection

    def _connect_socket(self, *args: Any) -> socket.socket:
        """While TLS shakes hands, http.client's own socket is in nobody's hands, so another descriptor of it is."""
        sock = self._source.connect_socket(*args)
        self._early = sock.dup()
        if self._interrupted:  # while it connected; interrupt() sets this before it looks for a socket
            sock.close()
            raise ConnectionAbortedError("interrupted")
        return sock

    def stat(self, name: str) -> ObjectInfo:
        response = self._ask("HEAD", name, {})
        response.read()
        if response.status != 200:
            raise self._refusal(name, response)
        length = response.getheader("Content-Length", "")
        if not _LENGTH.fullmatch(length):
            raise ModelUnsupported(f"{self._url(name)}: the store does not say how long it is", hint="use another")
        return ObjectInfo(int(length), _etag(response))

    def read_into(self, name: str, offset: int, target: Target, throttle: Throttle, etag: str) -> str:
        first = offset + target.done
        if not target.left:
            return etag
        response = self._ask("GET", name, {"Range": f"bytes={first}-{first + target.left - 1}"})
        try:
            self._check_answer(name, response, first, target.left)
            found = _etag(response)
            if etag and found != etag:
                raise ModelCorrupt(f"{self._url(name)} has changed since it was inspected", hint="start again")
            self._receive(name, response, target, throttle)
        finally:
            if target.left:
                self.close()  # unread bytes would be taken for the next answer
            else:
                response.close()
        return found

    def interrupt(self) -> None:
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

    def _url(self, name: str) -> str:
        return f"{self._origin}{self._path}/{quote(name, safe='~-._')}"

    def _ask(self, method: str, name: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Send a request and read the answer's head.  A kept-alive connection that the server closed is renewed."""
        reused = self._http.sock is not None
        try:
            return self._ask_once(method, name, headers)
        except _DROPPED as e:
            self.close()
            if not reused or self._interrupted:
                raise self._unavailable(name, e) from e
        except (OSError, http.client.HTTPException) as e:
            self.close()
            raise self._unavailable(name, e) from e
        try:
            return self._ask_once(method, name, headers)
        except (OSError, http.client.HTTPException) as e:
            self.close()
            raise self._unavailable(name, e) from e

    def _ask_once(self, method: str, name: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        url = self._url(name)
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
        signed = self._source.sign(method, url, {**headers, "Accept-Encoding": "identity"})
        self._http.request(method, url[len(self._origin) :], headers=signed)
        return self._http.getresponse()

    def _receive(self, name: str, response: http.client.HTTPResponse, target: Target, throttle: Throttle) -> None:
        body = _Body(response, self._socket, self._source.timeout_s)
        most = _FIRST_READ_BYTES
        while target.left:
            piece = target.next(throttle.quantum(most))
            throttle.before_read(len(piece))
            began = time.monotonic()
            try:
                count = body.read_into(piece)
            except (OSError, http.client.HTTPException, ValueError) as e:  # ValueError: interrupted, file closed
                raise self._unavailable(name, e) from e
            if count == 0:
                raise StoreUnavailable(f"{self._url(name)}: the connection broke {target.left} bytes early")
            target.advance(count)
            throttle.after_read(count)
            took = time.monotonic() - began
            fitting = max(_FIRST_READ_BYTES, int(count * _SLOW_READ_S / max(took, 1e-9)))
            most = self._most = min(_READ_BYTES, fitting, _GROWTH * self._most)

    def _check_answer(self, name: str, response: http.client.HTTPResponse, first: int, n_bytes: int) -> None:
        if response.status == 200 and first == 0 and response.length == n_bytes:
            return  # the whole object was wanted: a server without ranges will do
        if response.status == 200:
            raise ModelUnsupported(
                f"{self._url(name)}: the server does not serve ranges",
                hint="serve the model from nginx, S3 or another that has Range",
            )
        if response.status != 206:
            raise self._refusal(name, response)
        found = _CONTENT_RANGE.fullmatch(response.getheader("Content-Range", ""))
        if found is None:
            raise ModelCorrupt(f"{self._url(name)}: 206 without a usable Content-Range")
        begin, last, total = (int(g) for g in found.groups())
        if begin != first or last != first + n_bytes - 1 or response.length != n_bytes:
            got = f"[{begin}, +{last + 1 - begin}) of {total} bytes"
            raise ModelCorrupt(
                f"{self._url(name)}: asked for [{first}, +{n_bytes}), got {got}",
                hint="the object is shorter than it was: push it again",
            )

    def _refusal(self, name: str, response: http.client.HTTPResponse) -> ThawError:
        status, url = response.status, self._url(name)
        if status in _MISSING:
            return ModelNotFound(f"{url}: no such object ({status})", hint="check the model's uri")
        if status in _HIDDEN:
            return AccessRefused(f"{url}: the store refuses access ({status})", hint=self._source.refused_hint)
        if status == 416:
            return ModelCorrupt(f"{url}: it is shorter than it was (416)", hint="push the model again")
        if status >= 500 or status in _BUSY:
            return StoreUnavailable(f"{url}: the store answered {status}", hint="retry later; check the store")
        if 300 <= status < 400:
            place = response.getheader("Location", "elsewhere")
            return Refused(f"{url}: moved to {place:.200} ({status})", hint="use that uri (S3: check AWS_REGION)")
        also = "; S3: check the region, and whether a session token has expired" if status == 400 else ""
        return Refused(f"{url}: the store answered {status}", hint=f"check the model's uri{also}")

    def _unavailable(self, name: str, e: Exception) -> StoreUnavailable:
        if isinstance(e, TimeoutError):
            return StoreUnavailable(f"{self._url(name)}: the store was silent for {self._source.timeout_s:g} s")
        return StoreUnavailable(f"{self._url(name)}: {type(e).__name__}: {e}", hint="is the store up and reachable?")


class _Body:
    """The bytes of an answer: first what http.client has buffered behind the head, then the socket itself."""

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


def _etag(response: http.client.HTTPResponse) -> str:
    """Return the etag without its mark for weak etags: many servers send a weak one to HEAD and a strong one to GET."""
    tag = response.getheader("ETag") or response.getheader("Last-Modified") or ""
    return tag.removeprefix("W/").strip('"')
