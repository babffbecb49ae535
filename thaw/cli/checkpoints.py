"""Push, read and verify a checkpoint: its files, and ``thaw-index.json`` beside them.

A push reads every file once.  It hashes each chunk of 8 MiB (xxh3 of the chunk and of the tensors' edges in it, sha256
of the file) and writes it to the store.  It removes an older index first and writes the new one last: a push that was
interrupted leaves a model without an index, never an index that describes other bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from thaw import checkpoint
from thaw.cli.stores import Store
from thaw.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from thaw.model import CHUNK_BYTES, INDEX_NAME, ModelFacts, ModelFile, ModelIndex, TensorInfo

Advance = Callable[[int], None]
"""A callback that gets the number of bytes of each step of progress."""


def _xxh3(chunk: bytes) -> str:
    import xxhash

    return str(xxhash.xxh3_64_hexdigest(chunk))


def files_of(directory: Path) -> list[Path]:
    """The files that a push uploads: known sidecars and safetensors.  Raises ModelNotFound, ModelUnsupported,
    ModelCorrupt.
    """
    if not directory.is_dir():
        raise ModelNotFound(f"{directory} is not a directory", hint="give the directory that holds config.json")
    names = [p.name for p in directory.iterdir() if p.is_file() and checkpoint.is_fetchable(p.name)]
    weights = [n for n in names if n.endswith(".safetensors")]
    if not weights:
        foreign = [n for n in checkpoint.FOREIGN_NAMES if (directory / n).exists()]
        raise ModelUnsupported(
            f"{directory} has no safetensors file" + (f", only {foreign[0]}" if foreign else ""),
            hint="convert it: save_pretrained(..., safe_serialization=True)",
        )
    if "config.json" not in names:
        raise ModelCorrupt(f"{directory} has no config.json", hint="give the directory that save_pretrained wrote")
    shards = directory / checkpoint.SHARDS_NAME
    if shards.exists():
        missing = sorted(set(checkpoint.shard_names(shards.read_bytes())) - set(weights))
        if missing:
            raise ModelCorrupt(
                f"{directory}: {missing[0]} is named in {checkpoint.SHARDS_NAME} but does not exist",
                hint=f"{len(missing)} of the shards are missing: download the model again",
            )
    return [directory / name for name in checkpoint.fetch_order(names)]


def tensors_of(path: Path) -> tuple[TensorInfo, ...]:
    """The tensors of a file, parsed from its header and checked against its length.  Raises ModelCorrupt."""
    n_bytes = path.stat().st_size
    with path.open("rb") as f:
        prefix = f.read(checkpoint.LENGTH_BYTES)
        header = f.read(checkpoint.header_bytes(path.name, prefix, n_bytes))
    return checkpoint.parse_header(path.name, header, n_bytes)


def push(directory: Path, store: Store, advance: Advance) -> ModelIndex:
    paths = files_of(directory)
    sums = {p: checkpoint.TensorSums(tensors_of(p) if p.suffix == ".safetensors" else (), _xxh3) for p in paths}
    _read_config((directory / "config.json").read_bytes())
    store.check_writable()
    store.delete(INDEX_NAME)
    files = [_push_file(p, sums[p], store, advance) for p in paths]
    index = checkpoint.build_index(files, [t for p in paths for t in sums[p].tensors()])
    content = checkpoint.write_index(index)
    store.write(INDEX_NAME, iter([content]), len(content))
    return index


def _push_file(path: Path, sums: checkpoint.TensorSums, store: Store, advance: Advance) -> ModelFile:
    whole, digests, n_bytes = hashlib.sha256(), list[str](), 0

    def chunks() -> Iterator[bytes]:
        nonlocal n_bytes
        with path.open("rb") as f:
            while chunk := f.read(CHUNK_BYTES):
                whole.update(chunk)
                digests.append(_xxh3(chunk))
                sums.update(chunk)
                n_bytes += len(chunk)
                advance(len(chunk))
                yield chunk

    store.write(path.name, chunks(), path.stat().st_size)
    return ModelFile(path.name, n_bytes, path.name in checkpoint.SIDECAR_NAMES, whole.hexdigest(), tuple(digests))


def read_index(store: Store) -> ModelIndex:
    """The model's index in the store.  Raises ModelNotFound when the model was never pushed."""
    try:
        data = b"".join(store.read(INDEX_NAME))
    except ModelNotFound as e:
        raise ModelNotFound(f"{store.uri} has no {INDEX_NAME}", hint=f"push it: thaw model push DIR {store.uri}") from e
    return checkpoint.read_index(data)


def read_facts(store: Store, index: ModelIndex) -> ModelFacts:
    return checkpoint.facts_of(store.uri, index, _read_config(b"".join(store.read("config.json"))))


def verify(store: Store, advance: Advance) -> ModelIndex:
    """Read all files again and compare every chunk.  Raises ModelCorrupt, which names the file and the byte."""
    index = read_index(store)
    for expected in index.files:
        done = 0
        for number, chunk in enumerate(store.read(expected.name)):
            if number >= len(expected.chunks_xxh3) or _xxh3(chunk) != expected.chunks_xxh3[number]:
                raise ModelCorrupt(
                    f"{store.uri}/{expected.name}: chunk {number} at byte {done} is not what was pushed",
                    hint="push the model again",
                )
            done += len(chunk)
            advance(len(chunk))
        if done != expected.n_bytes:
            raise ModelCorrupt(
                f"{store.uri}/{expected.name} has {done} bytes, {expected.n_bytes} were pushed",
                hint="push the model again",
            )
    return index


def _read_config(data: bytes) -> dict[str, Any]:
    try:
        config = json.loads(data)
    except ValueError as e:
        raise ModelCorrupt(f"config.json is not JSON: {e}") from None
    if not isinstance(config, dict):
        raise ModelCorrupt("config.json is not a JSON object")
    return config
