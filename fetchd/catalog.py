"""The catalogue: what each of the models used last consists of.

A model's description is read once and remembered while the store still has that version.  A plain name leads to its
newest version through a small object, the pointer (thaw/versions.py), which every inspection reads anew; what a pin
names never changes, so it is read once.  A hub is asked each time, because it also says whether we may read the model.

With ``thaw-index.json`` beside the model everything is known and verified.  Without it the safetensors headers are
read and checked, the model counts as unverified, and its version is a hash of the store's etags; the checksums of its
chunks are learned at the first fetch, so that at least no later fetch can differ from it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn, TypeVar

from fetchd.backoff import pause_s
from fetchd.sources.base import (
    AccessRefused,
    Connection,
    ObjectInfo,
    Refused,
    Revisions,
    Source,
    SourceOpener,
    read_bytes,
)
from thaw import checkpoint, hub, versions
from thaw.errors import (
    ModelChanged,
    ModelCorrupt,
    ModelNotFound,
    ModelUnsupported,
    StoreUnavailable,
    ThawError,
)
from thaw.model import INDEX_NAME, ModelFacts, ModelFile, ModelIndex, TensorInfo

T = TypeVar("T")

_MAX_INDEX_BYTES: Final = 64 * 1024 * 1024
_MAX_CONFIG_BYTES: Final = 4 * 1024 * 1024
_MOST_MODELS: Final = 128
"""A plain name and the pin that it leads to count as two."""
_PATIENCE_S: Final = 20.0
"""The pauses of one inspection together.  Those who wait for it wait half a minute, so a store that wants to be asked
only later has failed."""
_LANES: Final = 8
"""How many connections compare the objects of a model with the store's."""
_SPECULATIVE_BYTES: Final = 64 * 1024
"""The first read of a weights file, which begins with 8 bytes of length: a small header comes in one round trip."""


@dataclass(slots=True)
class Entry:
    """One version of one model.  ``learned`` maps (file, offset, n_bytes) to the xxh3 first seen there."""

    source: Source
    index: ModelIndex
    objects: Mapping[str, ObjectInfo]
    """The store's answers for the inspected objects: with an index beside the model, for the index alone."""
    learned: dict[tuple[str, int, int], str] = field(default_factory=dict)
    facts: ModelFacts | None = None
    """Set by :meth:`Catalog.inspect` only: a start that was planned elsewhere need not read config.json."""

    @property
    def version(self) -> str:
        return self.index.sha256 or self.index.etag


class _Place:
    """The source and the entry of one uri, and the lock that the reader of the entry holds."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.source: Source | None = None
        self.entry: Entry | None = None
        self.has_versions = False  # a pointer was read here


class _Patience:
    """How long one question to the catalogue may still pause, between all its requests."""

    def __init__(self) -> None:
        self._left_s = _PATIENCE_S

    def takes(self, pause_s: float) -> bool:
        self._left_s -= pause_s
        return self._left_s >= 0


class Catalog:
    """Thread-safe; loads of one uri wait for each other, loads of different ones do not."""

    def __init__(self, opener: SourceOpener, retries: int, stopping: threading.Event) -> None:
        self._open, self._retries, self._stopping = opener, retries, stopping
        self._lock = threading.Lock()
        self._places: dict[str, _Place] = {}  # by uri, least recently used first

    def inspect(self, uri: str) -> ModelFacts:
        """Return the facts of the version that the store has now: of a plain name, the newest one."""
        patience = _Patience()
        found_at = self._newest(uri, patience)
        place = self._place(found_at)
        with place.lock:
            if place.entry is None or not (versions.pinned(found_at) or _is_current(place.entry)):
                place.entry = self._load(found_at, place, patience)
            entry = place.entry
            if entry.facts is None:
                config = self._persist(
                    entry.source, lambda connection: _Loader(found_at, connection).config(), patience
                )
                entry.facts = checkpoint.facts_of(found_at, entry.index, config)
            return entry.facts if found_at == uri else replace(entry.facts, name=uri)

    def _newest(self, uri: str, patience: _Patience) -> str:
        """Return the pin that a plain name leads to now, or ``uri`` itself: a pin, or a directory without versions."""
        if versions.pinned(uri):
            return uri
        place = self._place(uri)
        source = self._source(uri, place)
        if isinstance(source, Revisions):
            return self._persist(source, source.newest, patience)
        try:
            data = self._persist(
                source, _read_pointer, patience
            )  # no lock: a store that is away must hold up nobody else
        except AccessRefused:
            if place.has_versions or not self._persist(source, _hides_what_is_missing, patience):
                raise  # the directory may hold older weights beside the pointer
            return uri
        except Refused:
            raise
        except ModelNotFound:
            return uri
        place.has_versions = True
        return versions.pin(uri, versions.read_pointer(uri, data))

    def planned(self, uri: str, version: str) -> Entry:
        """Return the version that was planned.  Raises ModelChanged when the store now has another one."""
        place = self._place(uri)
        with place.lock:
            if place.entry is None or place.entry.version != version:
                place.entry = self._load(uri, place, _Patience())
            entry = place.entry
        if entry.version != version:
            raise ModelChanged(
                f"{uri} has changed: version {version[:12]} was planned, the store has {entry.version[:12]}",
                hint="nothing to do: the next start plans with the new version",
            )
        return entry

    def stamp(self, uri: str, version: str) -> str:
        """Return a value that changes when somebody writes the files of a version on this machine.

        Bytes that were read before must not be used again then, although the index beside them still names the same
        version.  Empty for other stores, which would have to be asked, and for a model that cannot be read: its fetch
        says why.
        """
        try:
            source = self._source(uri, self._place(uri))  # no lock: whoever holds it may wait for a store that is away
            if source.host:
                return ""
            connection = source.connect()
            try:
                return _combined_etag({f.name: connection.stat(f.name) for f in self.planned(uri, version).index.files})
            finally:
                connection.close()
        except ThawError:
            return ""

    def check_unchanged(self, uri: str, version: str) -> None:
        """Read the model again after bytes failed a check.  Raises ModelChanged when the store has another version."""
        place = self._place(uri)
        with place.lock:
            place.entry = None
        self.planned(uri, version)

    def _place(self, uri: str) -> _Place:
        """Return the place of ``uri``, evicting the least recently used one.

        A thread whose place is evicted meanwhile finishes with that place; the next caller reads the model again.
        """
        with self._lock:
            place = self._places.pop(uri, None) or _Place()
            self._places[uri] = place
            if len(self._places) > _MOST_MODELS:
                del self._places[next(iter(self._places))]
            return place

    def _load(self, uri: str, place: _Place, patience: _Patience) -> Entry:
        source = self._source(uri, place)
        return self._persist(source, lambda connection: _Loader(uri, connection).load(source), patience)

    def _source(self, uri: str, place: _Place) -> Source:
        if place.source is None:
            place.source = self._open(uri)
        return place.source

    def _persist(self, source: Source, read: Callable[[Connection], T], patience: _Patience) -> T:
        """Call ``read`` with a new connection; repeat it after a pause while the store is unavailable."""
        failures = 0
        while True:
            connection = source.connect()
            try:
                return read(connection)
            except StoreUnavailable as e:
                failures += 1
                after_s = pause_s(failures, e)
                if failures >= self._retries or not patience.takes(after_s) or self._stopping.wait(after_s):
                    raise StoreUnavailable(f"{e.message} (gave up after {failures} attempts)", hint=e.hint) from e
            finally:
                connection.close()


def _read_pointer(connection: Connection) -> bytes:
    return read_bytes(connection, versions.POINTER_NAME, 0, versions.POINTER_BYTES)


def _hides_what_is_missing(connection: Connection) -> bool:
    """True for a store that refuses access to what does not exist: S3 does so to whoever may not list the bucket."""
    try:
        connection.stat(f"{versions.POINTER_NAME}-{secrets.token_hex(8)}")
    except AccessRefused:
        return True
    except ModelNotFound:
        pass
    return False


def _is_current(entry: Entry) -> bool:
    """Compare the inspected objects with the store's, a few at a time: a model may have a hundred shards."""
    names = sorted(entry.objects)
    n_lanes = min(_LANES, len(names))
    with ThreadPoolExecutor(n_lanes) as pool:
        return all(pool.map(lambda lane: _are_current(entry, names[lane::n_lanes]), range(n_lanes)))


def _are_current(entry: Entry, names: Sequence[str]) -> bool:
    connection = entry.source.connect()
    try:
        return all(connection.stat(name) == entry.objects[name] for name in names)
    except (ModelNotFound, StoreUnavailable):
        return False  # the reload reports what is wrong
    finally:
        connection.close()


class _Loader:
    """Reads one model's description on one connection."""

    def __init__(self, uri: str, connection: Connection) -> None:
        self._uri, self._connection = uri, connection
        self._objects: dict[str, ObjectInfo] = {}
        self._refused: AccessRefused | None = None

    def load(self, source: Source) -> Entry:
        if isinstance(source, Revisions):
            source.look_through(self._connection)
        pinned = versions.pinned(self._uri)
        index = self._index_beside() or (self._no_version() if pinned else self._index_by_structure())
        if isinstance(source, Revisions):
            index = replace(index, etag=hub.version(source.revision, index.etag))
        if pinned != versions.short(index.sha256) and pinned:
            raise ModelCorrupt(
                f"{self._uri} holds another version, {versions.short(index.sha256)}",
                hint=f"push the model again: thaw model push DIR {versions.plain_name(self._uri)}",
            )
        return Entry(source, index, self._objects)

    def _no_version(self) -> NoReturn:
        raise self._refused or ModelNotFound(
            f"{self._uri}: there is no such version",
            hint="it was never pushed, or its push did not end: thaw model list shows what there is",
        )

    def config(self) -> dict[str, Any]:
        info = self._connection.stat("config.json")
        try:
            plain = json.loads(self._whole("config.json", info, _MAX_CONFIG_BYTES))
        except (ValueError, RecursionError) as e:
            raise ModelCorrupt(f"{self._uri}: config.json is not JSON: {e}") from None
        if not isinstance(plain, dict):
            raise ModelCorrupt(f"{self._uri}: config.json is not a JSON object")
        return plain

    def _index_beside(self) -> ModelIndex | None:
        info = self._find(INDEX_NAME)
        return None if info is None else checkpoint.read_index(self._whole(INDEX_NAME, info, _MAX_INDEX_BYTES))

    def _index_by_structure(self) -> ModelIndex:
        weights = self._weight_names()
        for name in (*checkpoint.SIDECAR_NAMES, *weights):
            if self._find(name) is None and (name in weights or name == "config.json"):
                raise ModelNotFound(f"{self._uri} has no {name}", hint="upload the whole checkpoint")
        files = [
            ModelFile(n, info.n_bytes, n in checkpoint.SIDECAR_NAMES)
            for n, info in self._objects.items()
            if checkpoint.is_fetchable(n)
        ]
        tensors = [t for name in weights for t in self._tensors(name)]
        return checkpoint.build_index(files, tensors, etag=_combined_etag(self._objects))

    def _weight_names(self) -> list[str]:
        shards = self._find(checkpoint.SHARDS_NAME)
        if shards is not None:
            return checkpoint.shard_names(self._whole(checkpoint.SHARDS_NAME, shards, _MAX_INDEX_BYTES))
        if self._find(checkpoint.WEIGHTS_NAME) is not None:
            return [checkpoint.WEIGHTS_NAME]
        if self._find("adapter_config.json") is not None:
            raise ModelUnsupported(
                f"{self._uri} holds an adapter and not a model",
                hint="merge it into its base model, then push the result: thaw model push DIR URI",
            )
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

    def _tensors(self, name: str) -> tuple[TensorInfo, ...]:
        info = self._objects[name]
        head = read_bytes(self._connection, name, 0, min(info.n_bytes, _SPECULATIVE_BYTES), info.etag)
        n_header = checkpoint.header_bytes(name, head, info.n_bytes)
        end = checkpoint.LENGTH_BYTES + n_header
        if end > len(head):
            head += read_bytes(self._connection, name, len(head), end - len(head), info.etag)
        return checkpoint.parse_header(name, head[checkpoint.LENGTH_BYTES : end], info.n_bytes)

    def _find(self, name: str) -> ObjectInfo | None:
        try:
            info = self._connection.stat(name)
        except AccessRefused as e:
            self._refused = self._refused or e
            return None
        except ModelNotFound:
            return None
        self._objects[name] = info
        return info

    def _whole(self, name: str, info: ObjectInfo, most: int) -> bytes:
        if info.n_bytes > most:
            raise ModelCorrupt(f"{self._uri}: {name} has {info.n_bytes} bytes; at most {most} make sense")
        return read_bytes(self._connection, name, 0, info.n_bytes, info.etag)


def _combined_etag(objects: Mapping[str, ObjectInfo]) -> str:
    lines = "".join(f"{info.etag} {info.n_bytes} {name}\n" for name, info in sorted(objects.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:32]
