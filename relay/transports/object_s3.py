"""``s3://bucket/prefix``: thaw/s3.py signs requests and reads XML, and http.client transfers the bytes.

An object store sends no notifications, so a receiver lists it again and again.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import quote, urlencode, urlsplit

from relay.transports.object import Entry
from thaw.errors import PlatformError, ProtocolError, StoreUnavailable
from thaw.s3 import S3Access, read_listing, read_refusal

POLL_S: Final = (0.002, 0.25)
"""The first and the longest pause between two listings.  An idle receiver lists four times a second; a thousand
listings cost about half a cent.
"""
_TIMEOUT_S: Final = 10.0
_MOST_LISTED_BYTES: Final = 16 * 1024 * 1024


class S3Store:
    def __init__(self, uri: str, access: S3Access) -> None:
        parts = urlsplit(uri)
        if parts.scheme != "s3" or not parts.netloc:
            raise PlatformError(f"{uri!r} is no s3://bucket/prefix")
        self._bucket, self._prefix, self._access = parts.netloc, parts.path.strip("/"), access

    def session(self) -> S3Session:
        return S3Session(self._bucket, self._prefix, self._access)


class S3Session:
    """See object.Session.  It has one kept-alive connection."""

    def __init__(self, bucket: str, prefix: str, access: S3Access) -> None:
        self._bucket, self._prefix, self._access = bucket, prefix, access
        parts = urlsplit(access.endpoint)
        connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._http = connection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._interrupted = threading.Event()
        self._pause_s = POLL_S[0]

    def put(self, folder: str, name: str, parts: Sequence[bytes | memoryview]) -> None:
        self._ask("PUT", self._path(folder, name), {}, b"".join(parts), (200,))

    def get(self, folder: str, name: str, most_bytes: int) -> bytes | None:
        status, body = self._ask("GET", self._path(folder, name), {}, b"", (200, 404), most_bytes)[:2]
        return body if status == 200 else None

    def delete(self, folder: str, name: str) -> None:
        self._ask("DELETE", self._path(folder, name), {}, b"", (200, 204, 404))

    def list(self, folder: str, prefix: str = "") -> list[Entry]:
        begin, found, after = self._key(folder, ""), list[Entry](), ""
        while True:
            query = {"list-type": "2", "prefix": begin + prefix} | ({"start-after": after} if after else {})
            _, body, now = self._ask("GET", f"/{self._bucket}", query, b"", (200,), _MOST_LISTED_BYTES)
            page, more = read_listing(body)
            found += [Entry(o.key.removeprefix(begin), o.n_bytes, now - o.modified_wall_s) for o in page]
            if not more or not page:
                return sorted(found, key=lambda e: e.name)
            after = page[-1].key

    def wait(self, folder: str, timeout_s: float, *, eager: bool) -> None:
        self._pause_s = POLL_S[0] if eager else min(2 * self._pause_s, POLL_S[1])
        self._interrupted.wait(min(timeout_s, self._pause_s))

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        self._http.close()

    def _key(self, folder: str, name: str) -> str:
        return "/".join(part for part in (self._prefix, folder) if part) + "/" + name

    def _path(self, folder: str, name: str) -> str:
        return f"/{self._bucket}/{quote(self._key(folder, name), safe='/~-._')}"

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: bytes,
        wanted: tuple[int, ...],
        most_bytes: int = 1024 * 1024,
    ) -> tuple[int, bytes, float]:
        """Return (status, body, time by the store's clock).  If the server closed the connection meanwhile, the request
        is sent once more on a new one.
        """
        target = path + ("?" + urlencode(sorted(query.items()), quote_via=quote, safe="-_.~") if query else "")
        for attempt in range(2):
            fresh = self._http.sock is None
            try:
                return self._ask_once(method, target, body, wanted, most_bytes)
            except (OSError, http.client.HTTPException) as e:
                self._http.close()
                if fresh or attempt:
                    raise StoreUnavailable(
                        f"{self._origin}{path}: {type(e).__name__}: {e}", hint="is the store up and reachable?"
                    ) from e
        raise AssertionError  # the second attempt returns or raises

    def _ask_once(
        self, method: str, target: str, body: bytes, wanted: tuple[int, ...], most_bytes: int
    ) -> tuple[int, bytes, float]:
        headers = self._access.sign(method, self._origin + target, {}, body)
        self._http.request(method, target, body=body or None, headers=headers)
        response = self._http.getresponse()
        if (response.length or 0) > most_bytes:
            self._http.close()
            raise ProtocolError(f"{target}: {response.length} bytes; the limit is {most_bytes}")
        answer = response.read(most_bytes + 1)
        if len(answer) > most_bytes:
            self._http.close()
            raise ProtocolError(f"{target}: more than {most_bytes} bytes")
        if response.status not in wanted:
            raise StoreUnavailable(
                f"{method} {self._origin}{target}: {response.status} {read_refusal(answer)}".rstrip(),
                hint="check THAW_S3_ENDPOINT, the bucket and the credentials (docs/fetchd.md)",
            )
        date = response.getheader("Date", "")
        return response.status, answer, parsedate_to_datetime(date).timestamp() if date else time.time()
