"""A hub, as the command line reads it: the files of a model's repository, and a copy of them in a directory.

``HF_ENDPOINT`` and ``HF_TOKEN`` of the shell say which hub it is and who asks.  ``requests`` follows the redirects to
the hub's stores, and sends the token to no other host.  When a connection breaks, the next one goes on at its byte.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

from thaw.checkpoints import checkpoint
from thaw.cli.model_stores.multipart_push import Content
from thaw.cli.model_stores.stored_object import Stored
from thaw.errors import BadRequest, Conflict, ModelCorrupt, ModelNotFound, ModelUnsupported, StoreUnavailable
from thaw.hub.answers import (
    MOST_LIST_BYTES,
    MOST_PAGES,
    HubFile,
    Refusal,
    file_path,
    files_of,
    list_path,
    next_page,
    refusal,
    too_long,
)
from thaw.hub.links import Link, endpoint_of, link_of
from thaw.hub.models import HubModel, is_commit
from thaw.model import CHUNK_BYTES, ModelFile, ModelIndex
from thaw.model_uri import ModelUri

_TIMEOUT_S: Final = (5, 60)  # to connect, and between two pieces of an answer
_FIRST_BYTES: Final = 64 * 1024
"""The first read of a weights file: a small header comes with its length in one request."""
_ATTEMPTS: Final = 4
"""So many requests in a row may bring nothing."""
_MOST_PAUSE_S: Final = 60.0
"""A hub that asks for a longer pause is asked once in between."""
_PIECE_BYTES: Final = 1 << 20
_RANGE: Final = re.compile(r"bytes ([0-9]+)-[0-9]+/([0-9]+)")


class HubStore:
    """One commit of a repository; it cannot be written.  ``uri`` names the commit."""

    def __init__(self, uri: str) -> None:
        """Ask the hub which commit ``uri`` means.  Raises ModelNotFound, StoreUnavailable, BadRequest."""
        self._model = HubModel.of(ModelUri.parse(uri))
        self._endpoint = endpoint_of(os.environ.get("HF_ENDPOINT", ""))
        self._token = os.environ.get("HF_TOKEN", "")
        self._http = _session()
        with self._errors():
            head = self._http.head(self._url("config.json"), auth=self._sign, timeout=_TIMEOUT_S)
        commit = head.headers.get("X-Repo-Commit", "")
        if head.status_code >= 400 or not is_commit(commit):
            self._refuse(head, "config.json")
        self._model = HubModel(self._model.repository, commit)
        self.uri = str(self._model)
        self._files: dict[str, HubFile] | None = None
        self._index: ModelIndex | None = None

    @property
    def files(self) -> dict[str, HubFile]:
        if self._files is None:
            self._files = self._list()
        return self._files

    def write(self, name: str, content: bytes) -> None:
        self.check_writable()

    def write_file(self, name: str, content: Content) -> None:
        self.check_writable()

    def delete(self, name: str) -> None:
        self.check_writable()

    def delete_place(self) -> None:
        self.check_writable()

    def objects(self) -> Mapping[str, Stored]:
        self._refuse_versions()

    def versions(self) -> list[str]:
        self._refuse_versions()

    def _refuse_versions(self) -> NoReturn:
        page = f"{self._endpoint}/{self._model.repository}"
        raise BadRequest(f"{self.uri}: a hub keeps the revisions of its models itself", hint=f"they are at {page}")

    def check_writable(self) -> None:
        raise BadRequest(f"{self.uri} is read only", hint="push to s3:// or file:// instead")

    def size(self, name: str) -> int | None:
        found = self.files.get(name)
        return found.n_bytes if found else None

    def read(self, name: str) -> Iterator[bytes]:
        pending = bytearray()
        for piece in self.pieces(name, 0, self._file(name).n_bytes):
            pending += piece
            while len(pending) >= CHUNK_BYTES:
                yield bytes(pending[:CHUNK_BYTES])
                del pending[:CHUNK_BYTES]
        if pending:
            yield bytes(pending)

    def pieces(self, name: str, first: int, n_bytes: int) -> Iterator[bytes]:
        """``n_bytes`` of a file from byte ``first`` on, in one request unless the connection breaks.  Raises
        ModelNotFound, ModelCorrupt, ModelUnsupported, StoreUnavailable."""
        import requests

        end, fruitless = first + n_bytes, 0
        while first < end:
            fruitless += 1
            try:
                for piece in self._ask(name, first, end):
                    first, fruitless = first + len(piece), 0
                    yield piece
            except requests.RequestException as e:
                if fruitless >= _ATTEMPTS:
                    raise self._silent(e) from e

    def _ask(self, name: str, first: int, end: int) -> Iterator[bytes]:
        headers = {"Range": f"bytes={first}-{end - 1}", "Accept-Encoding": "identity"}
        with self._errors():
            answer = self._http.get(self._url(name), headers=headers, auth=self._sign, timeout=_TIMEOUT_S, stream=True)
        with answer:
            if answer.status_code not in (200, 206):
                self._refuse(answer, name)
            n_bytes = self._file(name).n_bytes
            if answer.status_code == 200 and (first, end) != (0, n_bytes):
                raise ModelUnsupported(f"{self.uri}/{name}: the hub's store does not serve ranges", hint="HF_ENDPOINT")
            found = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            if answer.status_code == 206 and (found is None or (int(found[1]), int(found[2])) != (first, n_bytes)):
                raise ModelCorrupt(f"{self.uri}/{name}: the hub's store gives other bytes than were asked for")
            for piece in answer.iter_content(_PIECE_BYTES):
                first += len(piece)
                if first > end:
                    raise ModelCorrupt(f"{self.uri}/{name}: the hub's store gives more bytes than were asked for")
                yield piece
        if first < end:
            raise ModelCorrupt(f"{self.uri}/{name}: the hub's store ends {end - first} bytes early")

    def index(self) -> ModelIndex:
        """The index that the files' headers give, without checksums of chunks.  Raises what :meth:`pieces` raises."""
        if self._index is None:
            self._index = self._read_index()
        return self._index

    def _read_index(self) -> ModelIndex:
        weights = self._weights()
        names = [n for n in checkpoint.SIDECAR_NAMES if n in self.files] + weights
        files = [ModelFile(n, self._file(n).n_bytes, n not in weights) for n in names]
        tensors = [t for name in weights for t in checkpoint.parse_header(name, *self._header(name))]
        return checkpoint.build_index(files, tensors)

    def copy(self, directory: Path, advance: Callable[[int], None]) -> None:
        """Copy the files of the model, and go on where an earlier copy stopped.  Raises what :meth:`pieces` raises, and
        ModelCorrupt for a file that is not what the hub lists."""
        directory.mkdir(parents=True, exist_ok=True)
        also = [n for n in (checkpoint.SHARDS_NAME,) if n in self.files]
        for name in [f.name for f in self.index().files] + also:
            if (directory / name).exists():
                advance(self._file(name).n_bytes)
            else:
                self._copy(name, directory / name, advance)

    def _copy(self, name: str, path: Path, advance: Callable[[int], None]) -> None:
        path.parent.mkdir(exist_ok=True)
        part, file = path.with_name(f"{path.name}.part"), self._file(name)
        done = part.stat().st_size if part.exists() else 0
        advance(done)
        with part.open("ab") as f:
            for piece in self.pieces(name, done, file.n_bytes - done):
                f.write(piece)
                advance(len(piece))
        if file.oid_of(_chunks_of(part)) != file.oid:
            part.unlink()
            raise ModelCorrupt(f"{self.uri}/{name} is not the file that the hub lists", hint="the same command again")
        part.replace(path)

    def _weights(self) -> list[str]:
        if checkpoint.SHARDS_NAME in self.files:
            return checkpoint.shard_names(b"".join(self.read(checkpoint.SHARDS_NAME)))
        if checkpoint.WEIGHTS_NAME in self.files:
            return [checkpoint.WEIGHTS_NAME]
        raise ModelUnsupported(
            f"{self.uri} has no weights in safetensors", hint="name a repository with model.safetensors or its shards"
        )

    def _header(self, name: str) -> tuple[bytes, int]:
        n_bytes = self._file(name).n_bytes
        head = b"".join(self.pieces(name, 0, min(n_bytes, _FIRST_BYTES)))
        end = checkpoint.LENGTH_BYTES + checkpoint.header_bytes(name, head, n_bytes)
        head += b"".join(self.pieces(name, len(head), max(0, end - len(head))))
        return head[checkpoint.LENGTH_BYTES : end], n_bytes

    def _file(self, name: str) -> HubFile:
        found = self.files.get(name)
        if found is None:
            raise ModelNotFound(f"there is no {name} in {self.uri}")
        return found

    def _list(self) -> dict[str, HubFile]:
        page: Link | Refusal | None = link_of(f"{self._endpoint}{list_path(self._model)}")
        found = dict[str, HubFile]()
        for _ in range(MOST_PAGES):
            if not isinstance(page, Link):
                break
            with self._errors(), self._http.get(page.url, auth=self._sign, timeout=_TIMEOUT_S, stream=True) as answer:
                if not answer.ok:
                    self._refuse(answer, "list of files")
                body = answer.raw.read(MOST_LIST_BYTES + 1, decode_content=True)
            if len(body) > MOST_LIST_BYTES:
                raise ModelCorrupt(f"{self._model}: the hub's list of its files is too long", hint="HF_ENDPOINT")
            found |= files_of(body, self._model)
            page = next_page(answer.headers, page)
        if page is not None:
            why = too_long(self._model) if isinstance(page, Link) else page
            raise ModelNotFound(why.sentence, hint=why.hint)
        return found

    def _sign(self, request: Any) -> Any:
        """Add the token.  Given as ``auth``, so that no entry of ~/.netrc takes its place."""
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request

    def _url(self, name: str) -> str:
        return f"{self._endpoint}{file_path(self._model, name)}"

    def _refuse(self, answer: Any, file: str) -> NoReturn:
        if answer.status_code >= 500 or answer.status_code == 429:
            raise StoreUnavailable(f"{self._model}: the hub answered {answer.status_code}", hint="try again later")
        found = refusal(
            answer.status_code,
            answer.headers,
            self._model,
            self._endpoint,
            file,
            has_token=bool(self._token),
            how="set HF_TOKEN",
        )
        raise ModelNotFound(found.sentence, hint=found.hint)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        import requests
        from urllib3.exceptions import HTTPError

        try:
            yield
        except (requests.RequestException, HTTPError, ValueError) as e:  # ValueError: a token that cannot be a header
            raise self._silent(e) from e

    def _silent(self, e: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"{self._endpoint} does not answer: {type(e).__name__}", hint="HF_ENDPOINT")


@contextmanager
def copied(store: HubStore, cache: Path, advance: Callable[[int], None]) -> Iterator[Path]:
    """A copy of the model in ``cache``, for as long as the block lasts; after an error the copy stays, so that the next
    one goes on with it.  Raises Conflict while another process has it, and what :meth:`HubStore.copy` raises."""
    directory = cache / store.uri.removeprefix("hf://").replace("/", "--")
    directory.mkdir(parents=True, exist_ok=True)
    with (cache / f"{directory.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"another process copies {store.uri} into {directory}", hint="wait for it") from None
        store.copy(directory, advance)
        yield directory
        shutil.rmtree(directory)


def _session() -> Any:
    """Asks again after a short pause, or after the one that the hub wants, while it is busy or away."""
    import requests
    from urllib3 import BaseHTTPResponse, Retry

    class Patience(Retry):
        def get_retry_after(self, response: BaseHTTPResponse) -> float | None:
            found = super().get_retry_after(response)
            return None if found is None else min(found, _MOST_PAUSE_S)

    patience = Patience(
        _ATTEMPTS - 1,
        status_forcelist=(429, 500, 502, 503, 504),
        backoff_factor=0.2,
        raise_on_status=False,
    )
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=patience))
    return session


def _chunks_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as f:
        while chunk := f.read(CHUNK_BYTES):
            yield chunk
