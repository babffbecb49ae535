"""Push, read and verify a checkpoint: its files, and ``thaw-index.json`` beside them.

A push reads every file twice.  First it digests each chunk of 8 MiB and the tensors' edges in it (BLAKE3),
which gives the model's version.  Then it writes the files to the place of that version
(checkpoints/versions.py), the index behind them, and last the pointer that makes the plain name mean it.  A push that
was interrupted therefore changes nothing for those who read the plain name, and the next push of the same files goes
on where this one stopped.  Chunks that the newest version has are copied within the store (multipart_push.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thaw.checkpoints import checkpoint, hash_tree, versions
from thaw.checkpoints.leaf_digest import digest
from thaw.cli.model_stores import guards, near_misses
from thaw.cli.model_stores.multipart_push import Content, Held
from thaw.cli.model_stores.stores import Store, open_store
from thaw.errors import BadRequest, Conflict, ModelCorrupt, ModelNotFound, ModelUnsupported
from thaw.hub.models import is_hub
from thaw.model import CHUNK_BYTES, INDEX_NAME, ModelFacts, ModelFile, ModelIndex, TensorInfo

Advance = Callable[[int], None]
"""A callback that gets the number of bytes of each step of progress."""


def files_of(directory: Path) -> list[Path]:
    """The files that a push uploads: known sidecars, and the weights that belong to the model; the two files of an
    adapter.  Raises ModelNotFound, ModelUnsupported, ModelCorrupt.
    """
    if not directory.is_dir():
        raise ModelNotFound(f"{directory} is not a directory", hint="give the directory that holds config.json")
    if is_adapter(directory):
        return [directory / name for name in (checkpoint.ADAPTER_CONFIG_NAME, checkpoint.ADAPTER_WEIGHTS_NAME)]
    weights = _weights_of(directory)
    sidecars = [n for n in checkpoint.SIDECAR_NAMES if (directory / n).is_file()]
    if "config.json" not in sidecars:
        raise ModelCorrupt(f"{directory} has no config.json", hint="give the directory that save_pretrained wrote")
    paths = [directory / name for name in checkpoint.fetch_order([*sidecars, *weights])]
    for path in paths:
        near_misses.check_not_pointer(path)
    return paths


def is_adapter(directory: Path) -> bool:
    """Whether it holds an adapter and no model.  An adapter beside a model is no part of it."""
    names = {p.name for p in directory.iterdir()} if directory.is_dir() else set()
    both = {checkpoint.ADAPTER_CONFIG_NAME, checkpoint.ADAPTER_WEIGHTS_NAME}
    return both <= names and not names & {checkpoint.WEIGHTS_NAME, checkpoint.SHARDS_NAME}


def _weights_of(directory: Path) -> list[str]:
    """The files that the index of the shards names, or the plain file.  Other safetensors files (an adapter, the same
    weights in another layout) are not the model."""
    shards = directory / checkpoint.SHARDS_NAME
    if shards.is_file():
        names = checkpoint.shard_names(shards.read_bytes())
        missing = [n for n in names if not (directory / n).is_file()]
        if missing:
            raise ModelCorrupt(
                f"{directory}: {missing[0]} is named in {checkpoint.SHARDS_NAME} but does not exist",
                hint=f"{len(missing)} of the shards are missing: download the model again",
            )
        return names
    if (directory / checkpoint.WEIGHTS_NAME).is_file():
        return [checkpoint.WEIGHTS_NAME]
    raise near_misses.without_weights(directory)


def tensors_of(path: Path) -> tuple[TensorInfo, ...]:
    """The tensors of a file, parsed from its header and checked against its length.  Raises ModelCorrupt."""
    n_bytes = path.stat().st_size
    with path.open("rb") as f:
        prefix = f.read(checkpoint.LENGTH_BYTES)
        header = f.read(checkpoint.header_bytes(path.name, prefix, n_bytes))
    return checkpoint.parse_header(path.name, header, n_bytes)


@dataclass(frozen=True, slots=True)
class Hashed:
    """A checkpoint in a directory, and the index that describes it."""

    directory: Path
    index: ModelIndex


def check(directory: Path) -> int:
    """Check the checkpoint without reading its weights; return its bytes.  Raises what :func:`files_of` and
    :func:`tensors_of` raise."""
    paths = files_of(directory)
    _tensors(paths)
    _read_config(paths[0].read_bytes())
    return sum(p.stat().st_size for p in paths)


def _tensors(paths: list[Path]) -> dict[Path, tuple[TensorInfo, ...]]:
    return {p: tensors_of(p) if p.suffix == ".safetensors" else () for p in paths}


def hash_files(directory: Path, advance: Advance) -> Hashed:
    """Read the whole checkpoint.  Raises what :func:`check` raises."""
    check(directory)
    paths = files_of(directory)
    sums = {p: hash_tree.TensorDigests(tensors, digest) for p, tensors in _tensors(paths).items()}
    files = [_hash_file(directory, p, sums[p], advance) for p in paths]
    return Hashed(directory, checkpoint.build_index(files, [t for p in paths for t in sums[p].tensors()]))


def _hash_file(directory: Path, path: Path, sums: hash_tree.TensorDigests, advance: Advance) -> ModelFile:
    def chunks() -> Iterator[bytes]:
        for chunk in _chunks_of(path):
            sums.update(chunk)
            advance(len(chunk))
            yield chunk

    return checkpoint.describe_file(path.relative_to(directory).as_posix(), chunks(), digest)


@dataclass(slots=True)
class Pushed:
    """A push that has ended.  Of the bytes of its files, ``sent_bytes`` went over the network."""

    index: ModelIndex
    sent_bytes: int = 0


def push(directory: Path, store: Store, advance: Advance) -> ModelIndex:
    """Hash and upload; ``advance`` hears of the upload."""
    before = pointer(store)
    return upload(hash_files(directory, lambda _: None), store, advance, before).index


def check_pushable(store: Store) -> None:
    """Raises BadRequest for the URI of one version, and the errors of ``store`` when it cannot be written."""
    if versions.pinned(store.uri):
        raise BadRequest(
            f"{store.uri} is one version of a model, and a version never changes",
            hint=f"push to the plain name: {versions.plain_name(store.uri)}",
        )
    store.check_writable()


def upload(
    hashed: Hashed,
    store: Store,
    advance: Advance,
    before: bytes | None = None,
    approve: Callable[[str], None] = lambda uri: None,
) -> Pushed:
    """Write the files that the version's place lacks, its index, and the pointer.  ``before``: the pointer at the
    push's begin.  ``approve`` is told the version's URI before the name means it, and raises to keep the name as it is.

    Raises ModelUnsupported for a model that no host would read, ModelCorrupt for a file that has changed since it was
    hashed, and Conflict when another push has moved the name meanwhile.  The check and the write are two requests, so
    two pushes that end at once may both move it.
    """
    text = _index_text(hashed)
    check_pushable(store)
    before = pointer(store) if before is None else before
    index, directory = hashed.index, hashed.directory
    version, pushed, held = open_store(versions.pin(store.uri, index.sha256)), Pushed(index), _held(store)

    def sent(n_bytes: int) -> None:
        pushed.sent_bytes += n_bytes
        advance(n_bytes)

    stamp = guards.begin_push(version)
    for file in index.files:
        if version.size(file.name) == file.n_bytes:  # only a push of this version writes here, and whole files only
            advance(file.n_bytes)
        else:
            version.write_file(file.name, _content(directory / file.name, file, held, sent, advance))
    shards = directory / checkpoint.SHARDS_NAME
    if shards.is_file():  # no host reads it; it makes the place a checkpoint that other programs can load
        version.write(checkpoint.SHARDS_NAME, shards.read_bytes())
    version.write(INDEX_NAME, text)
    try:
        approve(version.uri)
        ours = versions.write_pointer(index.sha256)
        if pointer(store) not in (before, ours):
            raise Conflict(
                f"somebody else has pushed {store.uri} meanwhile, and the name means that version now",
                hint=f"yours is there as {version.uri}; to make the name mean it, push again (nothing is sent twice)",
            )
        store.write(versions.POINTER_NAME, ours)
    finally:  # an unfinished version keeps its stamp, so it stays for a day
        guards.end_push(version, stamp)
    return pushed


def _index_text(hashed: Hashed) -> bytes:
    """The content of the version's index.  Raises ModelUnsupported when no host would read it."""
    text = checkpoint.write_index(hashed.index)
    try:
        checkpoint.read_index(text)
    except ModelCorrupt as e:
        raise ModelUnsupported(
            f"{hashed.directory}: no host would read the index of this model: {e.message}",
            hint="docs/formats/checkpoint-index.md has the bounds",
        ) from None
    return text


def pointer(store: Store) -> bytes:
    """The object that says which version the name means; empty without one."""
    try:
        return b"".join(store.read(versions.POINTER_NAME))
    except ModelNotFound:
        return b""


def _held(store: Store) -> dict[tuple[str, int], Held]:
    """The chunks of the newest version, by digest and length."""
    try:
        place = newest(store)
        if place is store:
            return {}  # other directories may be changed by anybody at any time
        files = read_index(place).files
    except (ModelNotFound, ModelCorrupt, ModelUnsupported):
        return {}  # this push repairs a damaged or an older pointer or index
    return {
        (digest, min(CHUNK_BYTES, f.n_bytes - i * CHUNK_BYTES)): Held(place.uri, f.name, i * CHUNK_BYTES)
        for f in files
        for i, digest in enumerate(f.chunks_blake3)
    }


def _content(
    path: Path, file: ModelFile, held: Mapping[tuple[str, int], Held], sent: Advance, there: Advance
) -> Content:
    def chunk(number: int) -> bytes:
        with path.open("rb") as f:
            f.seek(number * CHUNK_BYTES)
            data = f.read(CHUNK_BYTES)
            is_longer = number == len(file.chunks_blake3) - 1 and f.read(1)
        if digest(data) != file.chunks_blake3[number] or is_longer:
            raise ModelCorrupt(f"{path} changed while it was pushed", hint="push it again when nobody writes it")
        return data

    def held_at(number: int) -> Held | None:
        n_bytes = min(CHUNK_BYTES, file.n_bytes - number * CHUNK_BYTES)
        return held.get((file.chunks_blake3[number], n_bytes))

    return Content(file.n_bytes, chunk, held_at, sent, there)


def _chunks_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as f:
        while chunk := f.read(CHUNK_BYTES):
            yield chunk


def newest(store: Store) -> Store:
    """The place of the newest version of a plain name; ``store`` itself for a pin, or for a model without versions."""
    return resolve(store)[0]


def resolve(store: Store) -> tuple[Store, str]:
    """The place of the version that the store's URI means, and (the first digits of) its root.  Without versions it is
    ``store`` itself, and the root is empty."""
    if digits := versions.pinned(store.uri):
        place = versions.place(store.uri)
        return (store if store.uri == place else open_store(place)), digits
    try:
        found = b"".join(store.read(versions.POINTER_NAME))
    except ModelNotFound:
        return store, ""
    root = versions.read_pointer(store.uri, found)
    return open_store(versions.pin(store.uri, root)), root


def read_index(store: Store, root: str = "") -> ModelIndex:
    """The model's index in the store.  ``root``: (the first digits of) the one that its hash tree must have.

    Raises ModelNotFound when the model was never pushed, and ModelCorrupt.
    """
    try:
        data = b"".join(store.read(INDEX_NAME))
    except ModelNotFound as e:
        command = f"thaw model push {store.uri} s3://…" if is_hub(store.uri) else f"thaw model push DIR {store.uri}"
        raise ModelNotFound(f"{store.uri} has no {INDEX_NAME}", hint=f"a push makes one: {command}") from e
    return checkpoint.read_index(data, root or versions.pinned(store.uri))


def has_index(store: Store) -> bool:
    try:
        next(iter(store.read(INDEX_NAME)), b"")
    except ModelNotFound:
        return False
    return True


def read_architecture(store: Store) -> str:
    """The model's name in config.json.  Without an index, no version binds it.  Raises ModelNotFound, ModelCorrupt."""
    architectures = _read_config(b"".join(store.read("config.json"))).get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else ""


def index_of(store: Store, root: str = "") -> ModelIndex:
    """As :func:`read_index`; for a hub, which has no index of ours, an index made from its files."""
    from thaw.cli.model_stores.hub import HubStore

    return store.index() if isinstance(store, HubStore) else read_index(store, root)


def read_facts(store: Store, index: ModelIndex) -> ModelFacts:
    """Raises ModelCorrupt, also for a config.json that is not the one of a verified index, and ModelNotFound."""
    file = checkpoint.config_file(index)
    config = b"".join(store.read(file.name))
    if index.verified:
        checkpoint.check_config(file, config, digest)
    return checkpoint.facts_of(store.uri, index, _read_config(config))


def verify(store: Store, index: ModelIndex, advance: Advance) -> None:
    """Read all files again and compare every chunk with ``index``, whose hash tree :func:`read_index` has compared with
    the version.  Raises ModelCorrupt, which names the file and the byte."""
    for expected in index.files:
        done = 0
        for number, chunk in enumerate(store.read(expected.name)):
            if number >= len(expected.chunks_blake3) or digest(chunk) != expected.chunks_blake3[number]:
                raise ModelCorrupt(
                    f"{store.uri}/{expected.name}: chunk {number} at byte {done} is not what was pushed",
                    hint="somebody has changed it at the store, or it is damaged: push the model again",
                )
            done += len(chunk)
            advance(len(chunk))
        if done != expected.n_bytes:
            raise ModelCorrupt(
                f"{store.uri}/{expected.name} has {done} bytes, {expected.n_bytes} were pushed",
                hint="push the model again",
            )


def _read_config(data: bytes) -> dict[str, Any]:
    try:
        config = json.loads(data)
    except ValueError as e:
        raise ModelCorrupt(f"config.json is not JSON: {e}") from None
    if not isinstance(config, dict):
        raise ModelCorrupt("config.json is not a JSON object")
    return config
