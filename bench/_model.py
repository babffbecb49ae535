"""A model of a chosen size whose bytes do not compress.  It is valid for fetchd, but an engine cannot run it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from thaw.checkpoints import checkpoint, hash_tree
from thaw.model import CHUNK_BYTES, INDEX_NAME, FileRange, ModelIndex, TensorInfo

_LAYERS = 24
_BLOCK = 64 * 1024 * 1024


def write_random(directory: Path, n_bytes: int, per_layer: int = 1) -> ModelIndex:
    """Write ``config.json``, ``model.safetensors`` with about ``n_bytes`` of random weights, and the index."""
    names = [f"model.layers.{i}.w{j}.weight" for i in range(_LAYERS) for j in range(per_layer)]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": _LAYERS, "architectures": ["Random"]}))
    each = n_bytes // len(names) // 4096 * 4096
    header = json.dumps(
        {
            name: {"dtype": "BF16", "shape": [each // 2], "data_offsets": [i * each, (i + 1) * each]}
            for i, name in enumerate(names)
        }
    ).encode()
    block = os.urandom(_BLOCK)
    with (directory / checkpoint.WEIGHTS_NAME).open("wb") as f:
        f.write(len(header).to_bytes(8, "little") + header)
        total = each * len(names)
        for at in range(0, total, _BLOCK):
            # write the same random block again and again: no client deduplicates, and urandom is slow
            f.write(block[: min(_BLOCK, total - at)])
    return write_index(directory)


def write_index(directory: Path) -> ModelIndex:
    """Write ``thaw-index.json`` for the checkpoint in ``directory``, as ``thaw model push`` would write it."""
    paths = (p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    names = [name for name in paths if checkpoint.is_fetchable(name)]
    files = [checkpoint.describe_file(n, _chunks(directory / n), _digest) for n in names]
    tensors = [t for n in names if n.endswith(".safetensors") for t in _tensors(directory / n)]
    index = checkpoint.build_index(files, tensors)
    (directory / INDEX_NAME).write_bytes(checkpoint.write_index(index))
    return index


def whole(index: ModelIndex) -> tuple[FileRange, ...]:
    """Every file in fetch order, as a plan of one stage requests them."""
    return tuple(FileRange(f.name, 0, f.n_bytes) for f in index.files)


def _digest(piece: bytes | memoryview) -> str:
    return str(blake3(piece).hexdigest())


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as f:
        while chunk := f.read(CHUNK_BYTES):
            yield chunk


def _tensors(path: Path) -> tuple[TensorInfo, ...]:
    with path.open("rb") as f:
        n_header = checkpoint.header_bytes(path.name, f.read(8), path.stat().st_size)
        plain = checkpoint.parse_header(path.name, f.read(n_header), path.stat().st_size)
    sums = hash_tree.TensorDigests(plain, _digest)
    for chunk in _chunks(path):
        sums.update(chunk)
    return sums.tensors()
