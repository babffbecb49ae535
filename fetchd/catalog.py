"""The catalogue: the descriptions of the models that were used last.

A model's description is read once and remembered while the store still has that version.  A plain name leads to its
newest version through a small object, the pointer (checkpoints/versions.py), which every inspection reads anew; a pin
always names the same files, so they are read once.  A hub is asked each time, because it also says whether we may read
the model.

With ``thaw-index.json`` beside the model everything is known and verified.  Without it the safetensors headers are
read and checked, the model counts as unverified, and its version is a hash of the store's etags; the checksums of its
chunks are learned at the first fetch, so that at least no later fetch can differ from it.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from fetchd.backoff import pause_s
from fetchd.deadline import CallLater, Deadline
from fetchd.lanes import Lanes
from fetchd.model_files import Description, LargeTexts, combined_etag
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
from thaw.checkpoints import adapter, checkpoint, versions
from thaw.errors import ModelChanged, ModelNotFound, ModelUnsupported, StoreUnavailable, ThawError
from thaw.hub import models as hub
from thaw.model import ModelFacts, ModelIndex

T = TypeVar("T")

_MOST_TENSORS: Final = 589_824
"""The remembered models have at most so many together: two of the largest that are published, some 350 MB."""
_MOST_RANGES: Final = 262_144
"""The parts of all remembered models have at most so many together: some 40 MB."""
_MOST_MODELS: Final = 128
"""A plain name and the pin that it leads to count as two."""


@dataclass(slots=True)
class Entry:
    """One version of one model.  ``learned`` maps (file, offset, n_bytes) to the digest first seen there."""

    source: Source
    index: ModelIndex
    objects: Mapping[str, ObjectInfo]
    """The store's answers for the inspected objects: with an index beside the model, for the index alone."""
    learned: dict[tuple[str, int, int], str] = field(default_factory=dict)
    facts: ModelFacts | None = None
    """Set by :meth:`Catalog.inspect` only: a start that was planned elsewhere need not read config.json."""
    is_whole: bool = True
    """False when the tensors were forgotten: they are most of an entry, and only a fetch needs them."""

    @property
    def version(self) -> str:
        return self.index.sha256 or self.index.etag

    @property
    def n_ranges(self) -> int:
        return self.facts.parts.n_ranges if self.facts is not None and self.facts.parts is not None else 0

    def without_tensors(self) -> Entry:
        return replace(self, index=replace(self.index, tensors=()), is_whole=False)


class _Place:
    """The source and the entry of one uri, and the lock that the reader of the entry holds."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.source: Source | None = None
        self.entry: Entry | None = None
        self.has_versions = False  # a pointer was read here


class Catalog:
    """Thread-safe; loads of one URI wait for each other, loads of different URIs do not."""

    def __init__(
        self,
        opener: SourceOpener,
        retries: int,
        stopping: threading.Event,
        call_later: CallLater | None = None,
        inspection_s: float = math.inf,
    ) -> None:
        """``inspection_s``: the time for everything that one call of a method reads and waits for."""
        self._open, self._retries, self._stopping = opener, retries, stopping
        self._call_later, self._inspection_s = call_later, inspection_s
        self._large = LargeTexts()
        self._lock = threading.Lock()
        self._places: dict[str, _Place] = {}  # by uri, least recently used first

    def inspect(self, uri: str) -> ModelFacts:
        """Return the facts of the version that the store has now; for a plain name, those of the newest version."""
        facts = self._inspect(uri)
        if adapter.is_one(facts.files):
            raise ModelUnsupported(
                f"{uri} holds an adapter and not a model",
                hint="name it as model.adapter, beside the model that it was trained on as model.base",
            )
        return facts

    def inspect_adapter(self, uri: str, base: str, max_rank: int) -> ModelFacts:
        """Do the same as :meth:`inspect` for an adapter.  With a ``base``, raises ModelUnsupported for an adapter that
        does not fit it, or that has a higher rank."""
        facts = self._inspect(uri)
        if not adapter.is_one(facts.files):
            raise ModelUnsupported(f"{uri} holds a model and not an adapter", hint="name it as model.uri")
        if base:
            of = self.inspect(base)
            tensors, theirs = (self.planned(f.uri, f.version).index.tensors for f in (facts, of))
            adapter.check(uri, tensors, base, theirs, max_rank)
        return facts

    def _inspect(self, uri: str) -> ModelFacts:
        deadline = self._deadline()
        found_at, root = self._newest(uri, deadline)
        place = self._place(found_at)
        with deadline.holding(place.lock, uri):
            entry = place.entry
            is_known = entry is not None and entry.version.startswith(root)
            is_fixed = bool(root) or hub.is_hub(found_at)  # a hub's root is a commit
            if entry is None or not is_known or not (is_fixed or _is_current(uri, entry, deadline)):
                entry = self._load(found_at, place, root, deadline)
            if entry.facts is None:
                if not entry.is_whole:
                    entry = self._load(found_at, place, root, deadline)
                entry.facts = self._facts(found_at, entry, deadline)
            return entry.facts if found_at == uri else replace(entry.facts, name=uri)

    def _newest(self, uri: str, deadline: Deadline) -> tuple[str, str]:
        """Return the place of the version that ``uri`` means now, and (the first digits of) its root.

        A directory without versions is its own place, and its root is empty.  So is the root of a hub's commit.
        """
        if digits := versions.pinned(uri):
            return versions.place(uri), digits
        place = self._place(uri)
        source = self._source(uri, place)
        if isinstance(source, Revisions):
            return self._persist(source, source.newest, uri, deadline), ""
        try:  # no lock: a store that is away must hold up nobody else
            data = self._persist(source, _read_pointer, uri, deadline)
        except AccessRefused:
            if place.has_versions or not self._persist(source, _hides_what_is_missing, uri, deadline):
                raise  # the directory may hold older weights beside the pointer
            return uri, ""
        except Refused:
            raise
        except ModelNotFound:
            return uri, ""
        place.has_versions = True
        root = versions.read_pointer(uri, data)
        return versions.pin(uri, root), root

    def planned(self, uri: str, version: str, deadline: Deadline | None = None) -> Entry:
        """Return the version that was planned.  Raises ModelChanged when the store now has another one."""
        return self._planned(uri, version, deadline or self._deadline(), whole=True)

    def digests(self, uri: str, version: str, file: str) -> tuple[str, ...]:
        """Return the digests of a file's chunks; none for a model without an index.  Raises ModelNotFound, and what
        :meth:`planned` raises."""
        index = self._planned(uri, version, self._deadline(), whole=False).index
        found = next((f for f in index.files if f.name == file), None)
        if found is None:
            raise ModelNotFound(f"{uri} has no file {file!r:.200}")
        return found.chunks_blake3

    def _planned(self, uri: str, version: str, deadline: Deadline, *, whole: bool) -> Entry:
        place = self._place(uri)
        with deadline.holding(place.lock, uri):
            entry = place.entry
            if entry is None or entry.version != version or (whole and not entry.is_whole):
                entry = self._load(uri, place, versions.pinned(uri), deadline)
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
        deadline = self._deadline()
        try:
            source = self._source(uri, self._place(uri))  # no lock: its holder may wait for a store that is away
            if source.host:
                return ""
            connection = source.connect()
            try:
                index = self._planned(uri, version, deadline, whole=False).index
                return combined_etag({f.name: connection.stat(f.name) for f in index.files})
            finally:
                connection.close()
        except ThawError:
            return ""

    def check_unchanged(self, uri: str, version: str) -> None:
        """Read the model again after bytes failed a check.  Raises ModelChanged when the store has another version."""
        deadline = self._deadline()
        place = self._place(uri)
        with deadline.holding(place.lock, uri):
            if place.entry is not None:  # the learned digests stay valid
                place.entry = place.entry.without_tensors()
        self.planned(uri, version, deadline)

    def _deadline(self) -> Deadline:
        return Deadline(self._inspection_s, self._call_later)

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

    def _load(self, uri: str, place: _Place, root: str, deadline: Deadline) -> Entry:
        """Read the description and remember it.  ``root``: (the first digits of) the root that its hash tree must
        have."""
        source = self._source(uri, place)
        before = place.entry  # the digests learned for bytes that no version binds stay while the store is away
        place.entry = before.without_tensors() if before is not None and not before.index.verified else None

        def load(connection: Connection) -> Entry:
            if isinstance(source, Revisions):
                source.look_through(connection)
            description = Description(uri, source, connection, self._large, deadline)
            index = description.index(root)
            if isinstance(source, Revisions):
                index = replace(index, etag=hub.version(source.revision, index.etag))
            return Entry(source, index, description.objects)

        entry = self._persist(source, load, uri, deadline)
        if before is not None and before.version == entry.version:
            entry.learned, entry.facts = before.learned, before.facts
        place.entry = entry
        self._forget_beyond(_MOST_TENSORS, _MOST_RANGES)
        return entry

    def _forget_beyond(self, tensors: int, ranges: int) -> None:
        """Forget each entry that has no room beside the models used more recently; smaller, older entries may stay."""
        with self._lock:
            for place in reversed(self._places.values()):
                entry = place.entry
                if entry is None:
                    continue
                if entry.n_ranges > ranges:
                    place.entry = None
                    continue
                ranges -= entry.n_ranges
                if len(entry.index.tensors) > tensors:
                    place.entry = entry.without_tensors()
                else:
                    tensors -= len(entry.index.tensors)

    def _facts(self, uri: str, entry: Entry, deadline: Deadline) -> ModelFacts:
        def config(connection: Connection) -> ModelFacts:
            found = Description(uri, entry.source, connection, self._large, deadline).config(entry.index)
            facts = checkpoint.facts_of(uri, entry.index, found)
            if adapter.is_one(facts.files):
                adapter.check_config(uri, found)
            return facts

        return self._persist(entry.source, config, uri, deadline)

    def _source(self, uri: str, place: _Place) -> Source:
        if place.source is None:
            place.source = self._open(uri)
        return place.source

    def _persist(self, source: Source, read: Callable[[Connection], T], uri: str, deadline: Deadline) -> T:
        """Call ``read`` with a new connection; repeat it after a pause while the store is unavailable."""
        failures = 0
        while True:
            deadline.check(uri)
            connection = source.connect()
            try:
                with deadline.guarding(connection):
                    return read(connection)
            except ThawError as e:
                deadline.check(uri)  # an answer that was cut may look like another error
                if not isinstance(e, StoreUnavailable):
                    raise
                failures += 1
                after_s = pause_s(failures, e)
                if failures >= self._retries or not deadline.allows(after_s) or self._stopping.wait(after_s):
                    raise StoreUnavailable(f"{e.message} (gave up after {failures} attempts)", hint=e.hint) from e
            finally:
                connection.close()


def _read_pointer(connection: Connection) -> bytes:
    return read_bytes(connection, versions.POINTER_NAME, 0, versions.POINTER_BYTES)


def _hides_what_is_missing(connection: Connection) -> bool:
    """True for a store that refuses access to an object that does not exist: S3 does so if the client may not list the
    bucket."""
    try:
        connection.stat(f"{versions.POINTER_NAME}-{secrets.token_hex(8)}")
    except AccessRefused:
        return True
    except ModelNotFound:
        pass
    return False


def _is_current(uri: str, entry: Entry, deadline: Deadline) -> bool:
    """Compare the inspected objects with the store's, a few at a time: a model may have a hundred shards.

    Raises StoreUnavailable when the deadline has passed.
    """
    names = sorted(entry.objects)
    try:
        with Lanes(entry.source, deadline) as lanes:
            return lanes.map(lambda connection, name: connection.stat(name), names) == [
                entry.objects[name] for name in names
            ]
    except ThawError as e:
        deadline.check(uri)  # an answer that was cut may look like another error
        if not isinstance(e, ModelNotFound | StoreUnavailable):
            raise
        return False  # the reload reports what is wrong
