"""The model port: a tenant's programs on this host read models through fetchd.  HTTP/1.1, read only.

``GET /model?name=N``                               the newest version, and the names and sizes of its files
``GET /digests?name=N&version=V&file=F``            the digests of a file's chunks, from the model's index
``GET /file?name=N&version=V&file=F&from=OFFSET``   the bytes of a file from OFFSET to its end
``GET /health``                                     needs no key

Every other request carries a tenant's API key (``Bearer uuid:key``).  Its namespace may read what it may also deploy.
A name stands for a model of the platform's own store, so no request chooses where bytes come from.  An answer whose
bytes stop coming ends early, without its last byte; the reader asks again from there and then gets the reason.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from invoker.model_port.files import Arriving, ModelFiles, uri_of
from invoker.ports.guarded import GuardedServer
from relay.clients import http11
from relay.state.allowed_models import ModelLeave
from relay.state.api_keys import ApiKeys, digest_of
from thaw import wire
from thaw.errors import BadRequest, NotFound, ThawError, Throttled, Unauthorized
from thaw.ids import Namespace
from thaw.logs import Log
from thaw.model import CHUNK_BYTES, ModelFacts
from thaw.process import lasting

MOST: Final = 64
"""Files that are read at once; each has a thread."""
IDLE_S: Final = 60.0
"""A connection ends after it: one that is silent, or whose client does not take a chunk in this time."""
ARRIVAL_S: Final = 90.0
"""A chunk that has not come in this time is not waited for any longer; its fetch goes on."""


@dataclass(frozen=True, slots=True)
class Places:
    """How many files one namespace, and all of them, may read at once."""

    of_one: int
    of_all: int


def places(pool_bytes: int, piece_bytes: int) -> Places:
    """Each file that is read holds a piece of fetchd's pool.  Readers that are slow must leave room for the starts of
    models, so all of them hold half of the pool at most, and one namespace half of that."""
    of_all = max(1, min(MOST, pool_bytes // 2 // piece_bytes))
    return Places(max(1, of_all // 2), of_all)


class ModelPort(GuardedServer):
    def __init__(
        self, bind: str, store: str, files: ModelFiles, most: Places, keys: ApiKeys, leave: ModelLeave, log: Log
    ) -> None:
        self.store, self.files, self.log = store, files, log
        self._most = most
        self._keys, self._leave = keys, leave
        self._reading = Counter[Namespace]()
        self._count = threading.Lock()
        super().__init__(bind, Handler, "model-port", log)

    def namespace(self, authorization: str) -> Namespace:
        """The namespace of the key.  Raises Unauthorized, and Unavailable while the state server is away."""
        scheme, _, key = authorization.partition(" ")
        owner = self._keys.subject(digest_of(key.strip())) if scheme.lower() == "bearer" else None
        if owner is None:
            raise Unauthorized("this port takes requests with a tenant's API key", hint="thaw key create --namespace N")
        return owner.namespace

    def uri(self, name: str, namespace: Namespace) -> str:
        """Raises BadRequest, and Forbidden for a model that the namespace may not run."""
        uri = uri_of(self.store, name)
        self._leave.check_uri(namespace, uri)
        return uri

    @contextmanager
    def place(self, namespace: Namespace) -> Iterator[None]:
        """Raises Throttled when the namespace, or all together, read as many files as they may."""
        with self._count:
            if self._reading[namespace] >= self._most.of_one or self._reading.total() >= self._most.of_all:
                raise Throttled("too many files are read on this host", hint="wait until some have been read")
            self._reading[namespace] += 1
        try:
            yield
        finally:
            with self._count:
                self._reading[namespace] -= 1
                if not self._reading[namespace]:
                    del self._reading[namespace]


class Handler(http11.Handler):
    timeout = IDLE_S
    server: ModelPort

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path == "/health":
            self._reply(*lasting.health())
            return
        serve = {"/model": self._model, "/digests": self._digests, "/file": self._file}.get(parts.path)
        try:
            namespace = self._caller()
            if serve is None:
                raise NotFound(f"no {parts.path:.200}")
            serve(namespace, _Asked(parts.query))
        except ThawError as e:
            self._reply(e.http_status, {"error": e.message, "info": wire.to_plain(e.info())})

    def _caller(self) -> Namespace:
        try:
            namespace = self.server.namespace(self.headers.get("authorization") or "")
        except ThawError:
            self.close_connection = True
            raise
        if (self.headers.get("content-length") or "0").strip("0"):
            self.close_connection = True
            raise BadRequest("a request to this port has no body")
        self.server.knows(self.connection)
        return namespace

    def _model(self, namespace: Namespace, asked: _Asked) -> None:
        facts = self.server.files.newest(self.server.uri(asked["name"], namespace), namespace)
        files = [{"name": name, "n_bytes": n_bytes} for name, n_bytes in facts.files.items()]
        self._reply(200, {"version": facts.version, "verified": facts.verified, "files": files})

    def _digests(self, namespace: Namespace, asked: _Asked) -> None:
        facts = self._version(namespace, asked)
        self._reply(200, {"chunks_blake3": self.server.files.digests(facts, asked["file"])})

    def _version(self, namespace: Namespace, asked: _Asked) -> ModelFacts:
        uri = self.server.uri(asked["name"], namespace)
        return self.server.files.version(uri, asked["version"], namespace)

    def _file(self, namespace: Namespace, asked: _Asked) -> None:
        file, offset = asked["file"], asked.number("from")
        with self.server.place(namespace):
            facts = self._version(namespace, asked)
            begun = False

            def begin() -> None:
                nonlocal begun
                begun = True
                head = f"Content-Type: application/octet-stream\r\nContent-Length: {facts.files[file] - offset}\r\n"
                self.wfile.write(f"HTTP/1.1 200 OK\r\n{head}\r\n".encode("latin-1"))

            try:
                at = self._piece(facts, file, offset, namespace, begin)
                while at < facts.files[file]:
                    at = self._piece(facts, file, at, namespace, lambda: None)
            except ThawError as e:
                if not begun:
                    raise
                self.close_connection = True
                self.server.log.event("file_cut", namespace=namespace, uri=facts.uri, file=file, error=e.message)
            else:
                n_bytes = at - offset
                self.server.log.event("file_read", namespace=namespace, uri=facts.uri, file=file, n_bytes=n_bytes)

    def _piece(self, facts: ModelFacts, file: str, offset: int, namespace: Namespace, begin: Callable[[], None]) -> int:
        """Send the rest of the piece at ``offset``; return where the next one begins.  ``begin`` is called when the
        first bytes are there."""
        with self.server.files.arriving(facts, file, offset, namespace) as arriving:
            for at, data in _chunks(arriving):
                if at == offset:
                    begin()
                self.connection.sendall(data)
            return arriving.end

    def _reply(self, status: int, value: object) -> None:
        try:
            self.reply(status, json.dumps(value).encode())
        except OSError:
            self.close_connection = True


class _Asked:
    """The parameters of a request.  Every one that is asked for must be there once."""

    def __init__(self, query: str) -> None:
        try:
            self._given = parse_qs(query, keep_blank_values=True, strict_parsing=True, max_num_fields=8)
        except ValueError:
            raise BadRequest("the parameters cannot be read") from None

    def __getitem__(self, name: str) -> str:
        given = self._given.get(name, [])
        if len(given) != 1:
            raise BadRequest(f"give {name} once")
        return given[0]

    def number(self, name: str) -> int:
        text = self[name]
        if not (text.isascii() and text.isdigit() and len(text) < 18):
            raise BadRequest(f"{name} is no number of bytes")
        return int(text)


def _chunks(arriving: Arriving) -> Iterator[tuple[int, Any]]:
    at = arriving.offset
    while at < arriving.end:
        data = arriving.take(at, CHUNK_BYTES, ARRIVAL_S)
        yield at, data
        at += len(data)
