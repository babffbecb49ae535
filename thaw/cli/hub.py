"""A hub, as the command line reads it: what a model's repository holds, and a copy of it in a directory.

``HF_ENDPOINT`` and ``HF_TOKEN`` of the shell say which hub it is and who asks.  ``requests`` follows the redirects to
the hub's stores, and sends the token to no other host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn
from urllib.parse import urljoin

from thaw import checkpoint
from thaw.cli.multipart import Content
from thaw.errors import BadRequest, ModelCorrupt, ModelNotFound, ModelUnsupported, StoreUnavailable
from thaw.hub import HubModel, is_commit
from thaw.hub_answers import HubFile, file_path, files_of, list_path, next_page, refusal
from thaw.model import CHUNK_BYTES, ModelFile, ModelIndex
from thaw.model_uri import ModelUri

_ENDPOINT: Final = "https://huggingface.co"
_TIMEOUT_S: Final = (5, 60)  # to connect, and between two pieces of an answer
_FIRST_BYTES: Final = 64 * 1024
"""The first read of a weights file: a small header comes with its length in one request."""


class HubStore:
    """One commit of a repository; it cannot be written.  ``uri`` names the commit."""

    def __init__(self, uri: str) -> None:
        """Ask the hub which commit ``uri`` means.  Raises ModelNotFound, StoreUnavailable, BadRequest."""
        import requests

        self._model = HubModel.of(ModelUri.parse(uri))
        self._endpoint = os.environ.get("HF_ENDPOINT", _ENDPOINT).rstrip("/")
        self._token = os.environ.get("HF_TOKEN", "")
        self._http = requests.Session()
        with self._errors():
            head = self._http.head(self._url("config.json"), headers=self._headers(), timeout=_TIMEOUT_S)
        commit = head.headers.get("X-Repo-Commit", "")
        if head.status_code >= 400 or not is_commit(commit):
            self._refuse(head)
        self._model = HubModel(self._model.repository, commit)
        self.uri = str(self._model)
        self._files: dict[str, HubFile] | None = None

    @property
    def files(self) -> dict[str, HubFile]:
        if self._files is None:
            self._files = self._list()
        return self._files

    def write(self, name: str, content: bytes) -> None:
        self.check_writable()

    def write_file(self, name: str, content: Content) -> None:
        self.check_writable()

    def check_writable(self) -> None:
        raise BadRequest(f"{self.uri} is read only", hint="push to s3:// or file:// instead")

    def size(self, name: str) -> int | None:
        found = self.files.get(name)
        return found.n_bytes if found else None

    def read(self, name: str) -> Iterator[bytes]:
        n_bytes = self._file(name).n_bytes
        for first in range(0, n_bytes, CHUNK_BYTES):
            yield self.piece(name, first, min(CHUNK_BYTES, n_bytes - first))

    def piece(self, name: str, first: int, n_bytes: int) -> bytes:
        """``n_bytes`` of a file from byte ``first`` on.  Raises ModelNotFound, ModelCorrupt, StoreUnavailable."""
        if not n_bytes:
            return b""
        headers = {**self._headers(), "Range": f"bytes={first}-{first + n_bytes - 1}", "Accept-Encoding": "identity"}
        with self._errors():
            answer = self._http.get(self._url(name), headers=headers, timeout=_TIMEOUT_S)
        if answer.status_code not in (200, 206):
            self._refuse(answer)
        if len(answer.content) != n_bytes:
            raise ModelCorrupt(f"{self.uri}/{name}: asked for {n_bytes} bytes, got {len(answer.content)}")
        return answer.content

    def index(self) -> ModelIndex:
        """What the files are, by their headers; without checksums of chunks.  Raises what :meth:`piece` raises, and
        ModelUnsupported."""
        weights = self._weights()
        names = [n for n in checkpoint.SIDECAR_NAMES if n in self.files] + weights
        files = [ModelFile(n, self._file(n).n_bytes, n not in weights, self._file(n).sha256) for n in names]
        tensors = [t for name in weights for t in checkpoint.parse_header(name, *self._header(name))]
        return checkpoint.build_index(files, tensors)

    def copy(self, directory: Path, advance: Callable[[int], None]) -> None:
        """Copy the files of the model, and go on where an earlier copy stopped.  Raises what :meth:`piece` raises, and
        ModelCorrupt for a file that is not what the hub lists."""
        directory.mkdir(parents=True, exist_ok=True)
        also = [n for n in (checkpoint.SHARDS_NAME,) if n in self.files]
        for name in [f.name for f in self.index().files] + also:
            if (directory / name).exists():
                advance(self._file(name).n_bytes)
            else:
                self._copy(name, directory / name, advance)

    def _copy(self, name: str, path: Path, advance: Callable[[int], None]) -> None:
        part, file = path.with_name(f"{name}.part"), self._file(name)
        done = part.stat().st_size if part.exists() else 0
        advance(done)
        with part.open("ab") as f:
            for first in range(done, file.n_bytes, CHUNK_BYTES):
                data = self.piece(name, first, min(CHUNK_BYTES, file.n_bytes - first))
                f.write(data)
                advance(len(data))
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
        head = self.piece(name, 0, min(n_bytes, _FIRST_BYTES))
        end = checkpoint.LENGTH_BYTES + checkpoint.header_bytes(name, head, n_bytes)
        head += self.piece(name, len(head), max(0, end - len(head)))
        return head[checkpoint.LENGTH_BYTES : end], n_bytes

    def _file(self, name: str) -> HubFile:
        found = self.files.get(name)
        if found is None:
            raise ModelNotFound(f"there is no {name} in {self.uri}")
        return found

    def _list(self) -> dict[str, HubFile]:
        page, found = f"{self._endpoint}{list_path(self._model)}", dict[str, HubFile]()
        while page:
            with self._errors():
                answer = self._http.get(page, headers=self._headers(), timeout=_TIMEOUT_S)
            if not answer.ok:
                self._refuse(answer)
            found |= files_of(answer.content, self._model)
            link = next_page(answer.headers.get("Link", ""))
            page = urljoin(page, link) if link.startswith((f"{self._endpoint}/", "/")) else ""
        return found

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def _url(self, name: str) -> str:
        return f"{self._endpoint}{file_path(self._model, name)}"

    def _refuse(self, answer: Any) -> NoReturn:
        if answer.status_code >= 500 or answer.status_code == 429:
            raise StoreUnavailable(f"{self._model}: the hub answered {answer.status_code}", hint="try again later")
        found = refusal(
            answer.status_code,
            answer.headers,
            self._model,
            self._endpoint,
            has_token=bool(self._token),
            how="set HF_TOKEN",
        )
        raise ModelNotFound(found.sentence, hint=found.hint)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        import requests

        try:
            yield
        except (requests.RequestException, ValueError) as e:  # ValueError: a token that cannot be a header
            raise StoreUnavailable(f"{self._endpoint} does not answer: {type(e).__name__}", hint="HF_ENDPOINT") from e


def _chunks_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as f:
        while chunk := f.read(CHUNK_BYTES):
            yield chunk
