"""The initializer's client of a node's model port (invoker/model_port/port.py has the requests)."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlencode, urlsplit

from thaw import wire
from thaw.checkpoints import checkpoint
from thaw.errors import ErrorInfo, ProtocolError, Unavailable, from_info
from thaw.settings import SettingError

_ANSWER_S: Final = 120.0
"""The port answers within a minute and a half, or with the reason why it cannot."""
_MOST_BYTES: Final = 16 * 1024 * 1024
"""The digests of a file of two terabytes."""


@dataclass(frozen=True, slots=True)
class File:
    name: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Listing:
    """One version of a model.  A model that is not ``verified`` has no index, so nobody knows its digests."""

    version: str
    verified: bool
    files: tuple[File, ...]


@dataclass(frozen=True, slots=True)
class _Digests:
    chunks_blake3: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Refused:
    error: str
    info: ErrorInfo


class ModelPortClient:
    """Raises the port's errors, Unavailable when it does not answer, and ProtocolError."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme != "http" or not parts.hostname or not port or parts.path.strip("/") or parts.query:
            raise SettingError(f"THAW_MODEL_PORT_URL={url!r:.200} is not the URL of a port", hint="http://host:port")
        self._host, self._port, self._key = parts.hostname, port, key

    def listing(self, name: str) -> Listing:
        """The newest version.  Raises ModelCorrupt for files with names that no checkpoint has."""
        found = wire.loads(Listing, self._text("/model", name=name))
        for file in found.files:
            checkpoint.check_name(file.name)
        return found

    def digests(self, name: str, version: str, file: str) -> tuple[str, ...]:
        return wire.loads(_Digests, self._text("/digests", name=name, version=version, file=file)).chunks_blake3

    @contextmanager
    def bytes_of(self, name: str, version: str, file: File, offset: int) -> Iterator[Body]:
        """The bytes from ``offset`` to the end of the file."""
        asked = {"name": name, "version": version, "file": file.name, "from": str(offset)}
        with self._answer("/file", asked) as answer:
            if answer.length != file.n_bytes - offset:
                raise ProtocolError(f"{file.name}: the model port announces {answer.length} bytes from {offset} on")
            yield Body(answer)

    def _text(self, path: str, **asked: str) -> bytes:
        with self._answer(path, asked) as answer:
            return _whole(answer)

    @contextmanager
    def _answer(self, path: str, asked: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_ANSWER_S)
        try:
            with _translated():
                headers = {"Authorization": f"Bearer {self._key}"}
                connection.request("GET", f"{path}?{urlencode(asked)}", headers=headers)
                answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise _error(answer.status, _whole(answer))
            yield answer
        finally:
            connection.close()


class Body:
    """The rest of a file."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer

    def read(self, n_bytes: int) -> bytes:
        """Raises Unavailable when the answer ends before ``n_bytes``."""
        with _translated():
            data = self._answer.read(n_bytes)
        if len(data) < n_bytes:
            raise Unavailable("the model port's answer ended early", hint="the next request gets the reason")
        return data


def _whole(answer: http.client.HTTPResponse) -> bytes:
    with _translated():
        data = answer.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ProtocolError(f"the model port's answer has more than {_MOST_BYTES} bytes")
    return data


def _error(status: int, body: bytes) -> Exception:
    try:
        return from_info(wire.loads(_Refused, body).info)
    except ProtocolError:
        return Unavailable(f"the model port answered {status}", hint="is THAW_MODEL_PORT_URL that of a model port?")


@contextmanager
def _translated() -> Iterator[None]:
    """OSError and HTTPException → Unavailable."""
    try:
        yield
    except (OSError, http.client.HTTPException) as e:
        hint = "does a pod of Thaw run on this node, and may this pod reach it?"
        raise Unavailable(f"the model port does not answer: {e or type(e).__name__}", hint=hint) from e
