"""``http(s)://host/dir``: ranged GETs on kept-alive connections, received straight into the slabs.

The same reader serves S3, which only adds a signature.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Callable
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from fetchd.address_gate import gate_of
from fetchd.marks import connect_marked
from fetchd.settings import FetchdSettings
from fetchd.sources.base import AccessRefused, ObjectInfo, Refused, Target, Throttle
from fetchd.sources.http_client import Connect, HttpClient, check_range, etag_of, passing
from thaw.checkpoints import pooling
from thaw.errors import ModelCorrupt, ModelNotFound, ModelUnsupported, ThawError
from thaw.model_uri import ModelUri

_LENGTH: Final = re.compile(r"[0-9]{1,18}")
_HIDDEN: Final = (401, 403)
_MISSING: Final = (404, 410)

Signer = Callable[[str, str, dict[str, str]], dict[str, str]]
"""(method, url, headers) → the headers to send."""


def unsigned(_method: str, _url: str, headers: dict[str, str]) -> dict[str, str]:
    return headers


def open_http(uri: ModelUri, settings: FetchdSettings, *, huge: bool) -> HttpSource:
    base_url = f"{uri.scheme}://{uri.place}{uri.url_path}"
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
        connect: Connect = connect_marked,
        refused_hint: str = "check uri and credentials",
    ) -> None:
        """``connect`` makes every connection.  ``refused_hint``: what to check when the store refuses access."""
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
        self._client = HttpClient(f"{parts.scheme}://{parts.netloc}", source.timeout_s, source.connect_socket)

    def stat(self, name: str) -> ObjectInfo:
        response = self._ask("HEAD", name, {})
        response.read()
        if response.status != 200:
            raise self._refusal(name, response)
        length = response.getheader("Content-Length", "")
        if not _LENGTH.fullmatch(length):
            raise ModelUnsupported(f"{self._url(name)}: the store does not say how long it is", hint="use another")
        return ObjectInfo(int(length), etag_of(response))

    def read_into(self, name: str, offset: int, target: Target, throttle: Throttle, etag: str) -> str:
        first = offset + target.done
        if not target.left:
            return etag
        response = self._ask("GET", name, {"Range": f"bytes={first}-{first + target.left - 1}"})
        try:
            if response.status not in (200, 206):
                raise self._refusal(name, response)
            check_range(response, first, target.left, self._url(name))
            found = etag_of(response)
            if etag and found != etag:
                raise ModelCorrupt(f"{self._url(name)} has changed since it was inspected", hint="start again")
        except ThawError:
            self.close()  # unread bytes would be taken for the next answer
            raise
        self._client.receive(response, target, throttle, self._url(name))
        return found

    def interrupt(self) -> None:
        self._client.interrupt()

    def close(self) -> None:
        self._client.close()

    def _url(self, name: str) -> str:
        safe = "/~-._" if name == pooling.POOLING_NAME else "~-._"  # no other file of a model is in a folder
        return f"{self._client.origin}{self._path}/{quote(name, safe=safe)}"

    def _ask(self, method: str, name: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        url = self._url(name)
        signed = self._source.sign(method, url, {**headers, "Accept-Encoding": "identity"})
        return self._client.ask(method, url[len(self._client.origin) :], signed, url)

    def _refusal(self, name: str, response: http.client.HTTPResponse) -> ThawError:
        status, url = response.status, self._url(name)
        if status in _MISSING:
            return ModelNotFound(f"{url}: no such object ({status})", hint="check the model's uri")
        if status in _HIDDEN:
            return AccessRefused(f"{url}: the store refuses access ({status})", hint=self._source.refused_hint)
        if status == 416:
            return ModelCorrupt(f"{url}: it is shorter than it was (416)", hint="push the model again")
        if (error := passing(response, url)) is not None:
            return error
        if 300 <= status < 400:
            place = response.getheader("Location", "elsewhere")
            return Refused(f"{url}: moved to {place:.200} ({status})", hint="use that uri (S3: check AWS_REGION)")
        also = "; S3: check the region, and whether a session token has expired" if status == 400 else ""
        return Refused(f"{url}: the store answered {status}", hint=f"check the model's uri{also}")
