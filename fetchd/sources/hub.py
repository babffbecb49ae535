"""``hf://org/name@revision``: a repository of a hub that speaks Hugging Face's API (thaw/hub/models.py has the words).

::

    HEAD hub/org/name/resolve/main/config.json    ──▶ X-Repo-Commit: the commit that the name means; we may read it
    GET  hub/api/models/org/name/tree/<commit>    ──▶ names, lengths and checksums of its files
    GET  hub/org/name/resolve/<commit>/<file>     ──▶ the bytes, or 302 ──▶ GET store/…?signature, with ranges

Everything behind the first line names the commit, so files of two commits never mix.  The token goes to the hub and
nowhere else.  The operator has chosen the hub, and the hub says where its bytes are.  That address is judged like one
that a tenant has named (decision 28).  A signed URL serves until a read from it fails, then the hub signs another one.
"""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from fetchd.address_gate import gate_of
from fetchd.credentials import Identity, credentials_of
from fetchd.marks import connect_marked
from fetchd.settings import FetchdSettings
from fetchd.sources.base import Busy, Connection, ObjectInfo, Refused, Target, Throttle
from fetchd.sources.http_client import HttpClient, check_range
from fetchd.sources.hub_api import busy_or_down, refusal, told
from thaw.errors import ModelCorrupt, ModelNotFound, PlatformError, StoreUnavailable
from thaw.hub.answers import (
    MOST_LIST_BYTES,
    MOST_PAGES,
    HubFile,
    Refusal,
    file_path,
    files_of,
    list_path,
    next_page,
    too_long,
)
from thaw.hub.links import Link, endpoint_of, link_of
from thaw.hub.models import HubModel, is_commit
from thaw.model_uri import ModelUri

_MOST_HOPS: Final = 4
"""Redirects within the hub, which gives small files from a cache at another path, and from one store to the next."""
_MOST_NOTE_BYTES: Final = 64 * 1024
"""The longest body of a redirect, which says again where to go."""
_SAID: Final = {"Accept-Encoding": "identity", "User-Agent": "thaw-fetchd"}
"""The headers of every request.  A hub counts and helps clients by their names."""
_TOKEN: Final = re.compile(r"[\x21-\x7e]{1,500}")


def open_hub(uri: ModelUri, settings: FetchdSettings, *, huge: bool) -> HubSource:
    identity = credentials_of(settings).of(uri)
    hub = _hub(endpoint_of(settings.hub_endpoint), identity, settings.read_timeout_s)
    return HubSource(HubModel.of(uri), hub, gate_of(settings).connect)


class Hub:
    """One hub, and who we are there.  The models of one identity share it: the hub counts their requests together."""

    def __init__(self, endpoint: str, identity: Identity, timeout_s: float) -> None:
        parts = urlsplit(endpoint)
        self.endpoint, self.timeout_s, self._identity = endpoint, timeout_s, identity
        self.origin, self.base_path = f"{parts.scheme}://{parts.netloc}", parts.path
        self.host = parts.hostname or ""
        self._busy_until_s = 0.0  # monotonic

    def token(self) -> str:
        """The token for one request; empty: anonymous.  A file is read each time, because tokens are renewed in their
        files.  Raises PlatformError."""
        path, text = self._identity.token_file, self._identity.token
        if path:
            try:
                text = Path(path).read_text().strip()
            except (OSError, UnicodeError) as e:
                why = e.strerror if isinstance(e, OSError) else "it is not text"
                raise PlatformError(
                    f"the hub's token cannot be read from {path}: {why}", hint="see THAW_FETCHD_CREDENTIALS"
                ) from None
        if text and not _TOKEN.fullmatch(text):  # http.client would refuse it, and repeat it in the error
            raise PlatformError("what THAW_FETCHD_CREDENTIALS names is no token of a hub", hint="it is one word")
        return text

    def rest(self, after_s: float) -> None:
        """Let no caller ask the hub anything for this long."""
        self._busy_until_s = max(self._busy_until_s, time.monotonic() + after_s)

    def check_rested(self, what: str) -> None:
        """Raises Busy while the hub wants to be left alone."""
        left_s = self._busy_until_s - time.monotonic()
        if left_s > 0:
            raise Busy(f"{what}: the hub wants no request for {left_s:.0f} s", left_s, hint="retry later")


@lru_cache(maxsize=64)
def _hub(endpoint: str, identity: Identity, timeout_s: float) -> Hub:
    return Hub(endpoint, identity, timeout_s)


class HubSource:
    kind = "hf"

    def __init__(self, model: HubModel, hub: Hub, connect_elsewhere: Callable[..., socket.socket]) -> None:
        """``connect_elsewhere`` makes the connections to the hub's stores."""
        self.model, self.hub, self.host = model, hub, hub.host
        self.revision = model.commit
        self._connect_elsewhere = connect_elsewhere
        self._lock = threading.Lock()
        self._files: dict[str, HubFile] | None = None
        self._signed: dict[str, Link] = {}  # by file

    def connect(self) -> HubConnection:
        return HubConnection(self)

    def newest(self, connection: Connection) -> str:
        """The URI of the commit that the model's revision means now.  Raises ModelNotFound when this identity may not
        read it, and StoreUnavailable."""
        return self.model.at(_of_hub(connection).commit())

    def client(self, origin: str) -> HttpClient:
        connect = connect_marked if origin == self.hub.origin else self._connect_elsewhere
        return HttpClient(origin, self.hub.timeout_s, connect, told)

    def look_through(self, connection: Connection) -> None:
        self._all_files(_of_hub(connection))

    def file(self, name: str, connection: HubConnection) -> HubFile:
        """The file as the commit has it.  Raises ModelNotFound."""
        found = self._all_files(connection).get(name)
        if found is None:
            raise ModelNotFound(f"{self.model} has no {name}", hint="check the repository and the revision")
        return found

    def signed(self, name: str) -> Link | None:
        return self._signed.get(name)

    def keep_signed(self, name: str, place: Link) -> None:
        with self._lock:
            self._signed[name] = place

    def forget_signed(self, name: str, place: Link) -> None:
        with self._lock:
            if self._signed.get(name) == place:  # another connection may have a new one already
                del self._signed[name]

    def _all_files(self, connection: HubConnection) -> dict[str, HubFile]:
        """The list is read once."""
        with self._lock:
            if self._files is None:
                self._files = connection.list_files()
            return self._files


class HubConnection:
    """A connection to the hub, and one to each store that it leads to."""

    def __init__(self, source: HubSource) -> None:
        self._source, self._hub, self._model = source, source.hub, source.model
        self._lock = threading.Lock()
        self._clients: dict[str, HttpClient] = {}  # by origin
        self._interrupted = False

    def commit(self) -> str:
        """The commit that the revision means now, if we may read it."""
        response = self._ask_hub("HEAD", self._path("config.json").path, {}, str(self._model))
        response.read()
        found = response.getheader("X-Repo-Commit", "")
        if response.status >= 400 or (response.status != 200 and not found):
            raise self._refusal(response, "config.json")
        if not is_commit(found) or self._model.commit not in ("", found):
            raise Refused(f"{self._model}: the hub does not say which commit this is", hint="is HF_ENDPOINT a hub?")
        return found

    def list_files(self) -> dict[str, HubFile]:
        """The files of the source's commit."""
        page: Link | Refusal | None = Link(self._hub.origin, self._hub.base_path + list_path(self._model))
        found, what, client = dict[str, HubFile](), f"{self._model}: its files", self._client(self._hub.origin)
        for _ in range(MOST_PAGES):
            if not isinstance(page, Link):
                break
            response = self._ask_hub("GET", page.path, {}, what)
            if response.status != 200:
                client.close()
                raise self._refusal(response, "list of files")
            found |= files_of(client.whole(response, MOST_LIST_BYTES, what), self._model)
            page = next_page(response.msg, page)
        if page is None:
            return found
        why = too_long(self._model) if isinstance(page, Link) else page
        raise Refused(why.sentence, hint=why.hint)

    def stat(self, name: str) -> ObjectInfo:
        found = self._source.file(name, self)
        return ObjectInfo(found.n_bytes, found.oid)

    def read_into(self, name: str, offset: int, target: Target, throttle: Throttle, etag: str) -> str:
        file = self._source.file(name, self)
        if etag not in ("", file.oid):
            raise ModelCorrupt(f"{self._model}/{name} has changed since it was inspected", hint="start again")
        if target.left:
            signed = self._source.signed(name)
            if signed is None or not self._read_signed(name, signed, offset, target, throttle):
                self._read(name, file.oid, offset, target, throttle)
        if target.n_bytes == file.n_bytes and file.oid_of(target.pieces) != file.oid:
            raise ModelCorrupt(f"{self._model}/{name} is not the file that the hub lists", hint="start again")
        return file.oid

    def interrupt(self) -> None:
        with self._lock:
            self._interrupted = True
            clients = list(self._clients.values())
        for client in clients:
            client.interrupt()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _read(self, name: str, oid: str, offset: int, target: Target, throttle: Throttle) -> None:
        """Ask the hub for the bytes, and go where it leads."""
        place, what = self._path(name), f"{self._model}/{name}"
        for _ in range(_MOST_HOPS):
            first = offset + target.done
            response = self._ask_hub("GET", place.path, {"Range": f"bytes={first}-{first + target.left - 1}"}, what)
            client, status = self._client(self._hub.origin), response.status
            location = response.getheader("Location", "") if 300 <= status < 400 else ""
            if status not in (200, 206) and not location:
                client.close()
                raise self._refusal(response, name)
            self._check_same(name, oid, response)
            if not location:
                _check_range(client, response, first, target, what)
                client.receive(response, target, throttle, what)
                return
            client.whole(response, _MOST_NOTE_BYTES, what)
            place = _led(place, location, what)
            if place.origin == self._hub.origin:
                continue
            if not self._read_signed(name, place, offset, target, throttle):
                raise StoreUnavailable(
                    f"{what}: the hub's store refuses the URL that the hub has just signed",
                    hint="retry later; are the clocks of the hub and its store right?",
                )
            return
        raise Refused(f"{what}: the hub leads from one place to the next", hint="is HF_ENDPOINT of fetchd a hub?")

    def _read_signed(self, name: str, signed: Link, offset: int, target: Target, throttle: Throttle) -> bool:
        """Return False if the store refuses this URL, which has probably expired.  The URL is kept only while reads
        from it succeed: after any failure, the hub may know a better place next time."""
        first, what, is_good = offset + target.done, f"{self._model}/{name}", False
        try:
            found = self._ask_stores(signed, first, target, what)
            if found is not None:
                client, response = found
                _check_range(client, response, first, target, what)
                self._source.keep_signed(name, signed)
                client.receive(response, target, throttle, what)
                is_good = True
        finally:
            if not is_good:
                self._source.forget_signed(name, signed)
        return is_good

    def _ask_stores(
        self, place: Link, first: int, target: Target, what: str
    ) -> tuple[HttpClient, http.client.HTTPResponse] | None:
        """The answer with the bytes, from the store at ``place`` or one to which it leads; None when it refuses."""
        headers = {"Range": f"bytes={first}-{first + target.left - 1}", **_SAID}
        for _ in range(_MOST_HOPS):
            client = self._client(place.origin)
            response = client.ask("GET", place.path, headers, what)
            if response.status in (200, 206):
                return client, response
            client.close()
            if (error := busy_or_down(response, what)) is not None:
                raise error
            if response.status == 416:
                raise ModelCorrupt(f"{what}: it is shorter than the hub says (416)", hint="ask the model's authors")
            location = response.getheader("Location", "") if 300 <= response.status < 400 else ""
            if not location:
                return None
            place = _led(place, location, what)
            if place.origin == self._hub.origin:
                break
        raise StoreUnavailable(f"{what}: the hub's store leads from one place to the next", hint="retry later")

    def _check_same(self, name: str, oid: str, response: http.client.HTTPResponse) -> None:
        """Raises ModelCorrupt for an answer that is about another commit, or another content than the list's."""
        commit = response.getheader("X-Repo-Commit", "")
        linked = response.getheader("X-Linked-Etag", "").removeprefix("W/").strip('"')
        if commit not in ("", self._model.revision) or linked not in ("", oid):
            self._client(self._hub.origin).close()
            raise ModelCorrupt(f"{self._model}/{name}: the hub gives another file than it lists", hint="start again")

    def _ask_hub(self, method: str, path: str, headers: dict[str, str], what: str) -> http.client.HTTPResponse:
        self._hub.check_rested(what)
        client, token = self._client(self._hub.origin), self._hub.token()
        signed = {"Authorization": f"Bearer {token}"} if token else {}
        response = client.ask(method, path, {**headers, **signed, **_SAID}, what)
        if (error := busy_or_down(response, what)) is not None:
            client.close()
            if isinstance(error, Busy) and response.status == 429:  # about us; others are about this model
                self._hub.rest(error.after_s)
            raise error
        return response

    def _client(self, origin: str) -> HttpClient:
        with self._lock:
            client = self._clients.get(origin)
            if client is None:
                client = self._clients[origin] = self._source.client(origin)
                if self._interrupted:
                    client.interrupt()
        return client

    def _refusal(self, response: http.client.HTTPResponse, file: str) -> Exception:
        return refusal(response, self._model, self._hub.endpoint, file, has_token=bool(self._hub.token()))

    def _path(self, name: str) -> Link:
        return Link(self._hub.origin, self._hub.base_path + file_path(self._model, name))


def _of_hub(connection: Connection) -> HubConnection:
    if not isinstance(connection, HubConnection):
        raise TypeError(f"{connection!r} is no connection to a hub")
    return connection


def _led(place: Link, location: str, what: str) -> Link:
    """Return the address to which an answer from ``place`` redirects.  Its text may be a secret, so no error contains
    it."""
    found = link_of(location, place)
    if found is None:
        raise StoreUnavailable(f"{what}: the hub leads to a place that is no URL", hint="retry later")
    if place.is_safe and not found.is_safe:
        raise Refused(f"{what}: the hub leads to http://, which is not as safe as https://")
    return found


def _check_range(client: HttpClient, response: http.client.HTTPResponse, first: int, target: Target, what: str) -> None:
    try:
        check_range(response, first, target.left, what)
    except Exception:
        client.close()
        raise
