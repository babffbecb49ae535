"""The model stores that the CLI writes and reads: S3, a directory, or (read only) a web server or a hub.

fetchd has its own sources, which are made for speed and for resuming; these stores are made to be simple.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import quote

from thaw.checkpoints import pooling, versions
from thaw.cli.model_stores import multipart_push
from thaw.cli.model_stores.multipart_push import Content
from thaw.cli.model_stores.stored_object import Stored
from thaw.errors import BadRequest, ModelNotFound, PlatformError, StoreUnavailable
from thaw.model import CHUNK_BYTES
from thaw.model_uri import FORMS, ModelUri


class Store(Protocol):
    """The place of one model in a store.  Names are file names, of which pooling.POOLING_NAME is in a folder."""

    uri: str

    def write(self, name: str, content: bytes) -> None: ...

    def write_file(self, name: str, content: Content) -> None:
        """Raises ModelCorrupt for a file that has changed since it was hashed; there is no object of this name then."""
        ...

    def read(self, name: str) -> Iterator[bytes]:
        """Yield pieces of CHUNK_BYTES; the last one may be shorter.  Raises ModelNotFound."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of the object; None when there is none."""
        ...

    def check_writable(self) -> None: ...

    def objects(self) -> Mapping[str, Stored]:
        """The objects of this place by name, without those of places below it other than a model's own folder."""
        ...

    def delete(self, name: str) -> None:
        """Nothing happens when there is no such object."""
        ...

    def delete_place(self) -> None:
        """Remove the place itself where stores have such a thing, if it is empty."""
        ...

    def versions(self) -> list[str]:
        """The URIs of the versions beside this plain name, finished or not."""
        ...


def open_store(uri: str) -> Store:
    """The store of a model's URI.  Raises BadRequest for a URI that names no store, and the errors of a hub."""
    model = ModelUri.parse(uri)
    open_one = _STORES.get(model.scheme)
    if open_one is None:
        raise BadRequest(f"{uri!r:.300} is not the URI of a model: this command knows no such store", hint=FORMS)
    return open_one(model)


def _open_hub(model: ModelUri) -> Store:
    from thaw.cli.model_stores.hub import HubStore

    return HubStore(str(model))


class DirectoryStore:
    def __init__(self, model: ModelUri) -> None:
        self.uri, self._model, self._directory = str(model), model, Path(model.directory)

    def write(self, name: str, content: bytes) -> None:
        self._write(name, iter([content]))

    def write_file(self, name: str, content: Content) -> None:
        self._write(name, map(content.chunk, range(content.n_chunks)))
        content.sent(content.n_bytes)

    def _write(self, name: str, chunks: Iterator[bytes]) -> None:
        """Write under a temporary name first, so that a reader never sees half a file.  The file is on the disk when
        this returns: a power cut must not leave a pointer to a version whose bytes it took."""
        path = self._directory / name
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with _os_errors(self.uri):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("wb") as f:
                    f.writelines(chunks)
                    f.flush()
                    os.fsync(f.fileno())
                temporary.replace(path)
                for directory in {path.parent, self._directory}:
                    _sync_directory(directory)
            finally:
                temporary.unlink(missing_ok=True)

    def read(self, name: str) -> Iterator[bytes]:
        try:
            with (self._directory / name).open("rb") as f:
                while chunk := f.read(CHUNK_BYTES):
                    yield chunk
        except (FileNotFoundError, NotADirectoryError):
            raise ModelNotFound(f"there is no {name} in {self._directory}") from None

    def size(self, name: str) -> int | None:
        try:
            return (self._directory / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def objects(self) -> Mapping[str, Stored]:
        found = {}
        names = [path.name for path in self._directory.iterdir()] if self._directory.is_dir() else []
        for name in (*names, pooling.POOLING_NAME):
            with suppress(FileNotFoundError, NotADirectoryError):  # somebody else removes files, too
                status = (self._directory / name).stat()
                if stat.S_ISREG(status.st_mode):
                    found[name] = Stored(status.st_size, status.st_mtime)
        return found

    def delete(self, name: str) -> None:
        path = self._directory / name
        with _os_errors(self.uri):
            path.unlink(missing_ok=True)
            if path.parent != self._directory:
                with suppress(OSError):  # it has other files, which are somebody else's
                    path.parent.rmdir()

    def delete_place(self) -> None:
        with suppress(OSError):  # not empty, or gone
            self._directory.rmdir()

    def versions(self) -> list[str]:
        parent = self._directory.parent
        names = [p.name for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []
        return _versions_of(self._model, names)

    def check_writable(self) -> None:
        with _os_errors(self.uri):
            self._directory.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self._directory).free < CHUNK_BYTES:
                raise StoreUnavailable(f"{self._directory} has no free space")


class HttpStore:
    """Any web server that has the files below one path."""

    def __init__(self, model: ModelUri) -> None:
        self.uri, self._url = str(model), f"{model.scheme}://{model.place}{model.url_path}"

    def write(self, name: str, content: bytes) -> None:
        self.check_writable()

    def write_file(self, name: str, content: Content) -> None:
        self.check_writable()

    def size(self, name: str) -> int | None:
        self.check_writable()
        return None

    def objects(self) -> Mapping[str, Stored]:
        self.check_writable()
        return {}

    def delete(self, name: str) -> None:
        self.check_writable()

    def delete_place(self) -> None:
        self.check_writable()

    def versions(self) -> list[str]:
        self.check_writable()
        return []

    def check_writable(self) -> None:
        raise BadRequest(f"{self.uri} is read only", hint="push to s3:// or file:// instead")

    def read(self, name: str) -> Iterator[bytes]:
        import requests

        try:
            with requests.get(f"{self._url}/{quote(name)}", stream=True, timeout=(5, 60)) as response:
                if response.status_code == 404:
                    raise ModelNotFound(f"there is no {name} at {self.uri}")
                if not response.ok:
                    raise StoreUnavailable(f"{self.uri}/{name}: HTTP {response.status_code}")
                yield from _in_chunks(response.raw)
        except requests.RequestException as e:
            raise StoreUnavailable(f"{self.uri} does not answer: {e}") from e


class S3Store:
    def __init__(self, model: ModelUri) -> None:
        from thaw.cli.model_stores.s3 import client

        self.uri, self._model, self._bucket, self._prefix = str(model), model, model.place, model.key
        self._s3 = client()

    def write(self, name: str, content: bytes) -> None:
        with self._errors(name):
            self._s3.put_object(**self._at(name), Body=content)

    def write_file(self, name: str, content: Content) -> None:
        if content.n_chunks <= 1:
            self.write(name, content.chunk(0) if content.n_chunks else b"")
            content.sent(content.n_bytes)
            return
        with self._errors(name):
            multipart_push.write(self._s3, self._at(name), content)

    def read(self, name: str) -> Iterator[bytes]:
        with self._errors(name):
            body = self._s3.get_object(**self._at(name))["Body"]
            try:
                yield from _in_chunks(body)
            finally:
                body.close()

    def size(self, name: str) -> int | None:
        try:
            with self._errors(name):
                return int(self._s3.head_object(**self._at(name))["ContentLength"])
        except ModelNotFound:
            return None

    def objects(self) -> Mapping[str, Stored]:
        prefix = f"{self._prefix}/"
        return {
            entry["Key"].removeprefix(prefix): Stored(entry["Size"], entry["LastModified"].timestamp())
            for below in (prefix, f"{prefix}{pooling.POOLING_NAME}")
            for page in self._pages(below)
            for entry in page.get("Contents", [])
            if entry["Key"] != prefix
        }

    def delete(self, name: str) -> None:
        with self._errors(name):
            self._s3.delete_object(**self._at(name))

    def delete_place(self) -> None:
        """A store of objects has no places."""

    def versions(self) -> list[str]:
        beside = [p["Prefix"] for page in self._pages(f"{self._prefix}@") for p in page.get("CommonPrefixes", [])]
        return _versions_of(self._model, [prefix.rstrip("/").rpartition("/")[2] for prefix in beside])

    def _pages(self, prefix: str) -> Iterator[Any]:
        with self._errors(""):
            pages = self._s3.get_paginator("list_objects_v2")
            yield from pages.paginate(Bucket=self._bucket, Prefix=prefix, Delimiter="/")

    def check_writable(self) -> None:
        with self._errors(""):
            self._s3.head_bucket(Bucket=self._bucket)

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": f"{self._prefix}/{name}"}

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError, CredentialRetrievalError

        from thaw.s3 import credential_error, refusal

        where = f"{self.uri}/{name}".rstrip("/")
        try:
            yield
        except ClientError as e:
            code = refusal(e)
            if code in ("NoSuchKey", "NoSuchBucket", "404"):
                raise ModelNotFound(
                    f"{where}: there is no such {'bucket' if not name else 'object'}",
                    hint="thaw model list; a bucket must exist before a push",
                ) from e
            raise PlatformError(
                f"{where}: the store refused: {code}", hint="see 'Credentials for S3' in docs/fetchd.md"
            ) from e
        except CredentialRetrievalError as e:
            raise credential_error(e) from None
        except BotoCoreError as e:
            raise StoreUnavailable(
                f"{where}: the store does not answer: {e}", hint="is THAW_S3_ENDPOINT right?  thaw dev status"
            ) from e


_STORES: Final[Mapping[str, Callable[[ModelUri], Store]]] = {
    "s3": S3Store,
    "hf": _open_hub,
    "file": DirectoryStore,
    "http": HttpStore,
    "https": HttpStore,
}


def _versions_of(model: ModelUri, names: Iterable[str]) -> list[str]:
    """The URIs of the versions of a plain name among the ``names`` beside it."""
    found = []
    for name in names:
        with suppress(BadRequest):  # somebody else's, which no URI can name
            found.append(str(model.beside(name)))
    return sorted(uri for uri in found if versions.pinned(uri) and versions.plain_name(uri) == str(model))


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _in_chunks(body: Any) -> Iterator[bytes]:
    """Regroup the bytes of a network stream into pieces of exactly CHUNK_BYTES."""
    pending = bytearray()
    while piece := body.read(1 << 20):
        pending += piece
        while len(pending) >= CHUNK_BYTES:
            yield bytes(pending[:CHUNK_BYTES])
            del pending[:CHUNK_BYTES]
    if pending:
        yield bytes(pending)


@contextmanager
def _os_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise StoreUnavailable(f"{uri} cannot be written: {e.strerror or e}", hint="check its owner and space") from e
