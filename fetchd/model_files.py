"""Reads one model's description from its store: ``thaw-index.json``, or the headers of its weights.

Everything here may be an attacker's: its bytes are counted before they are read, over all files together, and one
large text is in memory at a time (LargeTexts).
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

from fetchd.chunks import digest
from fetchd.deadline import Deadline
from fetchd.lanes import LANES, Lanes
from fetchd.sources.base import AccessRefused, Connection, ObjectInfo, Source, Target, Unthrottled, read_bytes
from thaw.checkpoints import checkpoint, model_json
from thaw.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from thaw.hub import models as hub
from thaw.model import INDEX_NAME, ModelFile, ModelIndex, TensorInfo

T = TypeVar("T")

_MAX_CONFIG_BYTES: Final = 4 * 1024 * 1024
_SPECULATIVE_BYTES: Final = 64 * 1024
"""The first read of a weights file, which begins with 8 bytes of length: a small header comes in one round trip."""


class LargeTexts:
    """Lets only one large text at a time be read and parsed on this host.  Small texts never wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def place(self, n_bytes: int, uri: str, deadline: Deadline) -> Iterator[None]:
        """Raises StoreUnavailable when no place becomes free in time."""
        with deadline.holding(self._lock, uri) if n_bytes > model_json.LARGE_BYTES else nullcontext():
            yield


class _Head(NamedTuple):
    """The length of a file's header, and the part of it that the first read brought."""

    file: str
    n_bytes: int
    begin: bytes


class Description:
    """One model's description, on one connection, and on several for a model of many files.

    ``objects`` has the store's answers for the inspected objects.
    """

    def __init__(self, uri: str, source: Source, connection: Connection, large: LargeTexts, deadline: Deadline) -> None:
        self._uri, self._source, self._connection = uri, source, connection
        self._large, self._deadline = large, deadline
        self.objects: dict[str, ObjectInfo] = {}
        self._refused: AccessRefused | None = None

    def index(self, root: str) -> ModelIndex:
        """``root``: (the first digits of) the root that the hash tree of the index must have; empty for a directory.

        Raises ModelNotFound, ModelCorrupt, ModelUnsupported, StoreUnavailable.
        """
        return self._index_beside(root) or (self._no_version() if root else self._index_by_structure())

    def _no_version(self) -> NoReturn:
        raise self._refused or ModelNotFound(
            f"{self._uri}: there is no such version",
            hint="it was never pushed, or its push did not end: thaw model list shows what there is",
        )

    def config(self, index: ModelIndex) -> dict[str, Any]:
        """The content of config.json, which a verified index binds.  Raises what :meth:`index` raises."""
        file = self._named(lambda: checkpoint.config_file(index))
        if index.verified:
            data = self._bound_config(file)
        else:
            info = self._connection.stat(file.name)
            self._check_size(file.name, info.n_bytes, _MAX_CONFIG_BYTES)
            data = read_bytes(self._connection, file.name, 0, info.n_bytes, info.etag)
        try:
            plain = model_json.config(data)
        except model_json.Unreadable as e:
            raise ModelCorrupt(f"{self._uri}: config.json is not JSON that can be used: {e}") from None
        if not isinstance(plain, dict):
            raise ModelCorrupt(f"{self._uri}: config.json is not a JSON object")
        return plain

    def _bound_config(self, file: ModelFile) -> bytes:
        self._check_size(file.name, file.n_bytes, _MAX_CONFIG_BYTES)
        data = read_bytes(self._connection, file.name, 0, file.n_bytes)
        self._named(lambda: checkpoint.check_config(file, data, lambda piece: digest([memoryview(piece)])))
        return data

    def _index_beside(self, root: str) -> ModelIndex | None:
        info = self._find(INDEX_NAME)
        if info is None:
            return None
        self._check_size(INDEX_NAME, info.n_bytes, model_json.MAX_TEXT_BYTES)
        with self._large.place(info.n_bytes, self._uri, self._deadline):
            return self._named(lambda: checkpoint.read_index(self._text(INDEX_NAME, info), root))

    def _index_by_structure(self) -> ModelIndex:
        weights = self._weight_names()
        with Lanes(self._source, self._deadline) as lanes:
            is_adapter = checkpoint.ADAPTER_CONFIG_NAME in self.objects
            sidecars = (checkpoint.ADAPTER_CONFIG_NAME,) if is_adapter else checkpoint.SIDECAR_NAMES
            lanes.map(self._find_on, (*sidecars, *weights))
            for name in (sidecars[0], *weights):
                if name not in self.objects:
                    raise ModelNotFound(f"{self._uri} has no {name}", hint="upload the whole checkpoint")
            tensors = self._all_tensors(weights, lanes)
        files = [
            ModelFile(n, info.n_bytes, checkpoint.is_sidecar(n))
            for n, info in self.objects.items()
            if checkpoint.is_fetchable(n)
        ]
        return checkpoint.build_index(files, tensors, etag=combined_etag(self.objects))

    def _weight_names(self) -> list[str]:
        shards = self._find(checkpoint.SHARDS_NAME)
        if shards is not None:
            self._check_size(checkpoint.SHARDS_NAME, shards.n_bytes, model_json.MAX_TEXT_BYTES)
            with self._large.place(shards.n_bytes, self._uri, self._deadline):
                return self._named(lambda: checkpoint.shard_names(self._text(checkpoint.SHARDS_NAME, shards)))
        if self._find(checkpoint.WEIGHTS_NAME) is not None:
            return [checkpoint.WEIGHTS_NAME]
        if self._find(checkpoint.ADAPTER_CONFIG_NAME) is not None:
            return [checkpoint.ADAPTER_WEIGHTS_NAME]
        for name in checkpoint.FOREIGN_NAMES:
            if self._find(name) is not None:
                raise ModelUnsupported(
                    f"{self._uri} holds {name} and no safetensors",
                    hint="convert it: save_pretrained(dir, safe_serialization=True), then thaw model push",
                )
        if self._refused is not None:
            raise self._refused
        if hub.is_hub(self._uri):
            raise ModelNotFound(
                f"{self._uri} holds no weights in safetensors",
                hint=f"name a repository with {checkpoint.WEIGHTS_NAME} or its shards at the top",
            )
        raise ModelNotFound(
            f"{self._uri} holds no model: neither {INDEX_NAME} nor {checkpoint.WEIGHTS_NAME}",
            hint="check the uri, or push the model: thaw model push DIR URI",
        )

    def _all_tensors(self, names: Sequence[str], lanes: Lanes) -> list[TensorInfo]:
        """Read the headers of all files, some at once.  Raises ModelCorrupt when they are too long together."""
        tensors: list[TensorInfo] = []
        n_bytes = 0
        with ExitStack() as place:
            for at in range(0, len(names), LANES):
                some = names[at : at + LANES]
                was_small = n_bytes <= model_json.LARGE_BYTES
                heads = lanes.map(self._read_head, some)
                n_bytes += sum(head.n_bytes for head in heads)
                self._check_headers(n_bytes, some[-1])
                if was_small:
                    place.enter_context(self._large.place(n_bytes, self._uri, self._deadline))
                for head, header in zip(heads, lanes.map(self._read_header, heads), strict=True):
                    n_bytes += model_json.header_cost(header) - head.n_bytes
                    self._check_headers(n_bytes, head.file)
                    tensors += self._tensors(head.file, header)
                    if len(tensors) > model_json.MAX_TENSORS:
                        raise ModelCorrupt(f"{self._uri}: it has more than {model_json.MAX_TENSORS} tensors")
        return tensors

    def _check_headers(self, n_bytes: int, name: str) -> None:
        if n_bytes > model_json.MAX_HEADERS_BYTES:
            raise ModelCorrupt(
                f"{self._uri}: its headers have {n_bytes} bytes up to {name}; "
                f"at most {model_json.MAX_HEADERS_BYTES} make sense"
            )

    def _read_head(self, connection: Connection, name: str) -> _Head:
        info = self.objects[name]
        begin = read_bytes(connection, name, 0, min(info.n_bytes, _SPECULATIVE_BYTES), info.etag)
        n_bytes = self._named(lambda: checkpoint.header_bytes(name, begin, info.n_bytes))
        return _Head(name, n_bytes, begin[checkpoint.LENGTH_BYTES :][:n_bytes])

    def _read_header(self, connection: Connection, head: _Head) -> bytes:
        if len(head.begin) == head.n_bytes:
            return head.begin
        return read_bytes(connection, head.file, checkpoint.LENGTH_BYTES, head.n_bytes, self.objects[head.file].etag)

    def _tensors(self, name: str, header: bytes) -> tuple[TensorInfo, ...]:
        return self._named(lambda: checkpoint.parse_header(name, header, self.objects[name].n_bytes))

    def _named(self, parse: Callable[[], T]) -> T:
        """Call ``parse``, and raise its error with the model's name and without its frames, which hold all that was
        read: soon the next text is read."""
        try:
            return parse()
        except (ModelCorrupt, ModelUnsupported) as e:
            kind, message, hint = type(e), f"{self._uri}: {e.message}", e.hint
        raise kind(message, hint=hint)

    def _find(self, name: str) -> ObjectInfo | None:
        return self._find_on(self._connection, name)

    def _find_on(self, connection: Connection, name: str) -> ObjectInfo | None:
        try:
            info = connection.stat(name)
        except AccessRefused as e:
            self._refused = self._refused or e
            return None
        except ModelNotFound:
            return None
        self.objects[name] = info
        return info

    def _check_size(self, name: str, n_bytes: int, most: int) -> None:
        if n_bytes > most:
            raise ModelCorrupt(f"{self._uri}: {name} has {n_bytes} bytes; at most {most} make sense")

    def _text(self, name: str, info: ObjectInfo) -> str:
        """Read a whole text.  Bytes that have not arrived take no memory: a store may announce a length and send
        nothing."""
        if not info.n_bytes:
            return ""
        view = memoryview(mmap.mmap(-1, info.n_bytes))
        self._connection.read_into(name, 0, Target([view]), Unthrottled(), info.etag)
        try:
            return str(view, "utf-8" if info.n_bytes <= model_json.LARGE_BYTES else "ascii")
        except UnicodeDecodeError as e:
            raise ModelCorrupt(f"{name} is not {e.encoding.upper()}: {e.reason}") from None


def combined_etag(objects: Mapping[str, ObjectInfo]) -> str:
    """The version of a model without an index: it tells stores' objects apart, and does not bind their bytes."""
    lines = "".join(f"{info.etag} {info.n_bytes} {name}\n" for name, info in sorted(objects.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:32]
