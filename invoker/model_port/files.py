"""A model's files, read through this host's fetchd: which bytes are fetched together, and their way to a reader.

::

    config.json tokenizer.json …     one piece: all small files together, because each piece takes whole slabs
    model-00001.safetensors          ├─ piece 0 ─┼─ piece 1 ─┼─ 2 ─┤      one after the other

A piece is one fetch into one segment of fetchd's pool.  So a reader holds one piece at a time, however large the model
is, and a second reader of the same piece finds it in the pool.  A reader that leaves does not cancel its fetch: whoever
comes back finds what has arrived meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from relay.clients.fetch import DescriptorClient, FetchClient
from relay.protocol.messages import FILE_READER, FetchStart
from relay.protocol.segment import SegmentReader
from thaw.checkpoints import checkpoint, versions
from thaw.errors import BadRequest, ModelChanged, NotFound, ThawError
from thaw.ids import GroupId, InstanceId, Namespace, random_hex_id
from thaw.logs import Log
from thaw.model import FileRange, ModelFacts
from thaw.model_uri import ModelUri
from thaw.plan import PlanModel

_SHA256_DIGITS: Final = 64
_GRANT_S: Final = 60.0


def uri_of(store: str, name: str) -> str:
    """The URI of the model that ``name`` means.  Raises BadRequest for a name that leads out of the store."""
    uri = f"{store}{name}" if store.endswith("/") else f"{store}/{name}"
    below, root = ModelUri.parse(uri), ModelUri.parse_prefix(store)
    if not name.strip("/") or name.startswith("/") or not below.is_below(root) or below.path == root.path:
        raise BadRequest(f"{name!r:.200} is not the name of a model", hint="write it as thaw://NAME")
    return uri


def piece_at(files: Mapping[str, int], file: str, offset: int, piece_bytes: int) -> tuple[FileRange, ...]:
    """The ranges that are fetched together with byte ``offset`` of ``file``."""
    if checkpoint.is_sidecar(file):
        return tuple(FileRange(name, 0, n) for name, n in files.items() if checkpoint.is_sidecar(name) and n)
    begin = offset - offset % piece_bytes
    return (FileRange(file, begin, min(piece_bytes, files[file] - begin)),)


@dataclass(frozen=True, slots=True)
class Arriving:
    """Bytes of one file from ``offset`` to ``end``, which are in ``reader`` as they arrive."""

    reader: SegmentReader
    file: str
    offset: int
    end: int

    def take(self, offset: int, n_bytes: int, deadline_s: float) -> memoryview:
        """Wait for ``n_bytes`` from ``offset`` on, at most as far as :attr:`end`.  Raises the fetch's error."""
        n_bytes = min(n_bytes, self.end - offset)
        at = self.reader.locate(self.file, offset)
        self.reader.wait(at + n_bytes, deadline_s)
        return self.reader.view(at, n_bytes)


class ModelFiles:
    """``epoch``: returns the newest scheduler's, because fetchd refuses older ones."""

    def __init__(self, fetch: FetchClient, epoch: Callable[[], int], piece_bytes: int, log: Log) -> None:
        self._fetch, self._epoch, self._piece_bytes, self._log = fetch, epoch, piece_bytes, log

    def close_left(self) -> None:
        """Close the descriptor sockets of a predecessor that was killed."""
        for instance_id in self._fetch.descriptor_sockets():
            if instance_id.startswith(FILE_READER):
                self._fetch.close_descriptor_socket(instance_id)

    def newest(self, uri: str, namespace: Namespace) -> ModelFacts:
        """Raises what :meth:`FetchClient.inspect` raises."""
        return self._fetch.inspect(uri, (namespace,))

    def version(self, uri: str, version: str, namespace: Namespace) -> ModelFacts:
        """Return one version, also if it is not the newest any more.  Raises ModelChanged when it is gone."""
        facts = self.newest(uri, namespace)
        if facts.version != version and len(version) == _SHA256_DIGITS and not versions.pinned(uri):
            facts = self.newest(versions.pin(uri, version), namespace)
        if facts.version != version:
            raise ModelChanged(f"{uri} has changed while it was read", hint="read it again from its first byte")
        return facts

    def digests(self, facts: ModelFacts, file: str) -> tuple[str, ...]:
        _check_file(facts, file)
        return self._fetch.digests(facts.uri, facts.version, file)

    @contextmanager
    def arriving(self, facts: ModelFacts, file: str, offset: int, namespace: Namespace) -> Iterator[Arriving]:
        """The piece of ``file`` at ``offset``, which is held while the block lasts.

        Raises NotFound, PoolFull, MemoryTooSmall, Throttled, and what a fetch raises.
        """
        if offset >= _check_file(facts, file):
            raise BadRequest(f"{file} has no byte {offset}")
        ranges = piece_at(facts.files, file, offset, self._piece_bytes)
        group_id, reader_id = GroupId(random_hex_id()), InstanceId(f"{FILE_READER}{random_hex_id()}")
        model = PlanModel(facts.uri, facts.sha256, facts.etag, facts.n_bytes)
        path = self._fetch.open_descriptor_socket(reader_id)
        try:
            started = self._fetch.start(FetchStart(group_id, 0, self._epoch(), model, ranges, namespace=namespace))
            self._fetch.grant_segment(reader_id, started.segment_id, group_id, 0)
            descriptors = DescriptorClient.connect(path)
            try:
                reader = descriptors.segment(deadline_s=_GRANT_S)
                (own,) = [r for r in ranges if r.file == file]
                try:
                    yield Arriving(reader, file, offset, own.offset + own.n_bytes)
                finally:
                    reader.close()
            finally:
                descriptors.close()
        finally:
            self._let_go(reader_id)

    def _let_go(self, reader_id: InstanceId) -> None:
        try:
            self._fetch.close_descriptor_socket(reader_id)
        except ThawError as e:  # fetchd has ended: it holds nothing when it comes back
            self._log.event("descriptor_socket_left", error=e.message)


def _check_file(facts: ModelFacts, file: str) -> int:
    """Return the file's length.  Raises NotFound."""
    n_bytes = facts.files.get(file)
    if n_bytes is None:
        raise NotFound(f"{facts.asked_for} has no file {file!r:.200}")
    return n_bytes
