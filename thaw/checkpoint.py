"""Checkpoints: safetensors headers, the index beside a model, and the facts that a scheduler needs about the model.

This module is pure: bytes in, values out.  The caller reads the bytes from a store (fetchd) or from a directory
(``thaw model push``).  An attacker may have written a header, so every length is checked against the file before the
code trusts it or allocates memory for it.  The format is described in docs/formats/checkpoint-index.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from thaw import wire
from thaw.errors import ModelCorrupt, ModelUnsupported, ProtocolError
from thaw.model import (
    CHUNK_BYTES,
    INDEX_VERSION,
    FileRange,
    ModelFacts,
    ModelFile,
    ModelIndex,
    ModelParts,
    TensorInfo,
)

MAX_HEADER_BYTES: Final = 100 * 1024 * 1024
"""The limit of safetensors itself; headers of the largest published checkpoints stay under 1 MiB per file."""
LENGTH_BYTES: Final = 8

SIDECAR_NAMES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""The files that an engine and a tokenizer open besides weights, in fetch order.  No file with another name is ever
fetched, so no code is fetched.
"""
WEIGHTS_NAME: Final = "model.safetensors"
SHARDS_NAME: Final = "model.safetensors.index.json"
FOREIGN_NAMES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.gguf", "tf_model.h5")

_DTYPE_BITS: Final = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
    "F4": 4,
}
_SAFE_NAME: Final = re.compile(r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\Z")
_LAYER: Final = re.compile(r"(?:\A|\.)(?:layers|h|blocks)\.(\d{1,4})\.")
_ENTRY: Final = re.compile(r"(?:embed(?!_out)|wte|wpe|project_in)")  # GPT-NeoX calls its head embed_out
_TOKEN_EMBEDDING: Final = re.compile(r"(?:embed_tokens|wte|word_embeddings|embed_in)\.weight\Z")
_HEAD: Final = re.compile(r"(?:lm_head|embed_out|output)\.")
_MAX_DIMENSIONS: Final = 16


def is_fetchable(name: str) -> bool:
    """Whether ``name`` may be requested from a store: a plain file name of a known sidecar or a safetensors file."""
    return _SAFE_NAME.match(name) is not None and (name in SIDECAR_NAMES or name.endswith(".safetensors"))


def fetch_order(names: Iterable[str]) -> list[str]:
    """Sidecars come first (config.json before all others), then weights by name, which is the order of their layers."""
    known = {name: i for i, name in enumerate(SIDECAR_NAMES)}
    return sorted(names, key=lambda n: (known.get(n, len(known)), n))


# ── safetensors ───────────────────────────────────────────────────────────────────────────────────────────────────


def header_bytes(file: str, prefix: bytes, file_bytes: int) -> int:
    """The length of the header that follows the first 8 bytes.  Raises ModelCorrupt for an impossible length."""
    if file_bytes < LENGTH_BYTES or len(prefix) < LENGTH_BYTES:
        raise ModelCorrupt(f"{file}: {file_bytes} bytes are no safetensors file", hint="upload the file again")
    n_bytes = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if n_bytes > MAX_HEADER_BYTES:
        raise ModelCorrupt(
            f"{file}: its header claims {n_bytes} bytes; the limit is {MAX_HEADER_BYTES}",
            hint="this is not a safetensors file, or it is damaged",
        )
    if n_bytes < 2 or LENGTH_BYTES + n_bytes > file_bytes:
        raise ModelCorrupt(
            f"{file}: its header claims {n_bytes} bytes, the file has {file_bytes}",
            hint="the file is truncated: upload it again",
        )
    return n_bytes


def parse_header(file: str, header: bytes, file_bytes: int) -> tuple[TensorInfo, ...]:
    """The tensors of one file, in order of offset.  Raises ModelCorrupt for a header that is inconsistent, and
    ModelUnsupported for an unknown dtype.

    ``header`` is the JSON alone.  Its tensors must tile the rest of the file exactly, without a gap, an overlap or a
    byte beyond the end, and every length must be the product of shape and dtype.
    """
    data_start = LENGTH_BYTES + len(header)
    try:
        plain = json.loads(header.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as e:
        raise ModelCorrupt(f"{file}: its header is not JSON: {e}") from None
    if not isinstance(plain, dict):
        raise ModelCorrupt(f"{file}: its header is not a JSON object")
    plain.pop("__metadata__", None)
    tensors = tuple(sorted((_tensor(file, n, entry, data_start) for n, entry in plain.items()), key=_place))
    _check_tiling(file, tensors, data_start, file_bytes)
    return tensors


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _place(tensor: TensorInfo) -> tuple[int, int, str]:
    return tensor.offset, tensor.n_bytes, tensor.name


def _tensor(file: str, name: str, entry: Any, data_start: int) -> TensorInfo:
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    shape: Any = fields.get("shape")
    span: Any = fields.get("data_offsets")
    if not (_are_sizes(shape) and _are_sizes(span) and len(shape) <= _MAX_DIMENSIONS and len(span) == 2):
        raise ModelCorrupt(f"{file}: tensor {name!r:.80} has no usable shape or data_offsets")
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise ModelUnsupported(
            f"{file}: tensor {name!r:.80} has dtype {dtype!r:.40}",
            hint=f"dtypes that can be loaded: {', '.join(_DTYPE_BITS)}",
        )
    begin, end = span
    needed, rest = divmod(math.prod(shape) * _DTYPE_BITS[dtype], 8)
    if rest or end - begin != needed:
        raise ModelCorrupt(f"{file}: tensor {name!r:.80} of shape {shape} and dtype {dtype} claims {end - begin} bytes")
    return TensorInfo(name, file, data_start + begin, needed, dtype, tuple(shape))


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**48 for v in value)


def _check_tiling(file: str, tensors: Sequence[TensorInfo], data_start: int, file_bytes: int) -> None:
    at = data_start
    for t in tensors:
        if t.offset != at:
            what = "overlaps the one before it" if t.offset < at else "leaves a gap before it"
            raise ModelCorrupt(f"{file}: tensor {t.name!r:.80} {what}")
        at += t.n_bytes
    if at != file_bytes:
        raise ModelCorrupt(
            f"{file}: its tensors end at byte {at}, the file has {file_bytes}",
            hint="the file is truncated or has a tail: upload it again",
        )


def shard_names(data: bytes) -> list[str]:
    """The files that ``model.safetensors.index.json`` names, in order.  Raises ModelCorrupt."""
    try:
        names = sorted(set(json.loads(data)["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as e:
        raise ModelCorrupt(f"{SHARDS_NAME}: no weight_map: {e}") from None
    for name in names:
        check_name(name)
    if not names:
        raise ModelCorrupt(f"{SHARDS_NAME}: its weight_map is empty")
    return names


def check_name(name: object) -> str:
    """Return ``name``.  Raises ModelCorrupt for a name that may not be fetched (a path, code, a pickle)."""
    if not isinstance(name, str) or not is_fetchable(name):
        raise ModelCorrupt(f"the checkpoint names the file {name!r:.100}, which is never fetched")
    return name


# ── the index ─────────────────────────────────────────────────────────────────────────────────────────────────────


def root_sha256(files: Sequence[ModelFile]) -> str:
    """The version of a verified model: a hash over one line per file, in order of name (see ModelIndex)."""
    lines = "".join(f"{f.sha256} {f.n_bytes} {f.name}\n" for f in sorted(files, key=lambda f: f.name))
    return hashlib.sha256(lines.encode()).hexdigest()


def describe_file(name: str, chunks: Iterable[bytes], xxh3: Callable[[bytes], str]) -> ModelFile:
    """Hash a file that is read in pieces of exactly CHUNK_BYTES (the last may be shorter)."""
    whole, digests, n_bytes = hashlib.sha256(), [], 0
    for chunk in chunks:
        whole.update(chunk)
        digests.append(xxh3(chunk))
        n_bytes += len(chunk)
    return ModelFile(name, n_bytes, name in SIDECAR_NAMES, whole.hexdigest(), tuple(digests))


def edges(tensor: TensorInfo) -> tuple[tuple[int, int], ...]:
    """``(offset, n_bytes)`` of the tensor's part of its first chunk and, if the tensor ends in another chunk, of its
    part of that last chunk.

    Between the two lie only whole chunks, which have checksums of their own.  So every byte of a fetch that begins and
    stops at tensors can be checked chunk by chunk, wherever the fetch cuts the file.
    """
    if tensor.n_bytes == 0:
        return ()
    end = tensor.offset + tensor.n_bytes
    border = (tensor.offset // CHUNK_BYTES + 1) * CHUNK_BYTES
    if end <= border:
        return ((tensor.offset, tensor.n_bytes),)
    last = (end - 1) // CHUNK_BYTES * CHUNK_BYTES
    return (tensor.offset, border - tensor.offset), (last, end - last)


class TensorSums:
    """Computes the checksums of the edges of one file's tensors.  The chunks come in file order, and ``tensors`` is in
    order of offset.
    """

    def __init__(self, tensors: Sequence[TensorInfo], xxh3: Callable[[bytes], str]) -> None:
        self._tensors, self._xxh3 = tensors, xxh3
        self._edges = [(offset, n_bytes, i) for i, t in enumerate(tensors) for offset, n_bytes in edges(t)]
        self._edges.sort(reverse=True)  # the next edge is the last item
        self._sums: list[list[str]] = [[] for _ in tensors]
        self._at = 0

    def update(self, chunk: bytes) -> None:
        """Take the next CHUNK_BYTES of the file; the last chunk may be shorter."""
        view = memoryview(chunk)
        while self._edges and self._edges[-1][0] < self._at + len(chunk):
            offset, n_bytes, i = self._edges.pop()
            self._sums[i].append(self._xxh3(bytes(view[offset - self._at : offset - self._at + n_bytes])))
        self._at += len(chunk)

    def tensors(self) -> tuple[TensorInfo, ...]:
        """The tensors with their checksums; call this after ``update`` has seen the whole file."""
        return tuple(replace(t, xxh3=tuple(sums)) for t, sums in zip(self._tensors, self._sums, strict=True))


def build_index(files: Sequence[ModelFile], tensors: Sequence[TensorInfo], *, etag: str = "") -> ModelIndex:
    """Put files in fetch order and tensors in load order.  The index is verified when every file has its checksum."""
    order = {name: i for i, name in enumerate(fetch_order(f.name for f in files))}
    ordered = tuple(sorted(files, key=lambda f: order[f.name]))
    loaded = tuple(sorted(tensors, key=lambda t: (order[t.file], t.offset, t.n_bytes)))
    verified = bool(ordered) and all(f.sha256 for f in ordered)
    return ModelIndex(INDEX_VERSION, ordered, loaded, root_sha256(ordered) if verified else "", etag, verified)


def write_index(index: ModelIndex) -> bytes:
    """The content of ``thaw-index.json``."""
    return wire.dumps(index)


def read_index(data: bytes) -> ModelIndex:
    """Parse and check ``thaw-index.json``.  Raises ModelCorrupt, or ModelUnsupported for another version."""
    try:
        version = wire.loads(dict[str, Any], data).get("version")
        if version != INDEX_VERSION:
            raise ModelUnsupported(
                f"thaw-index.json has version {version!r}; this side reads {INDEX_VERSION}",
                hint="push the model again with this release",
            )
        index = wire.loads(ModelIndex, data)
    except (ProtocolError, RecursionError) as e:
        raise ModelCorrupt(f"thaw-index.json cannot be read: {e}", hint="push the model again") from None
    _check_files(index)
    _check_tensors(index)
    if not index.verified or root_sha256(index.files) != index.sha256:
        raise ModelCorrupt("thaw-index.json: its root checksum is not that of its files", hint="push the model again")
    return index


def _check_files(index: ModelIndex) -> None:
    names = [check_name(f.name) for f in index.files]
    if len(set(names)) != len(names) or names != fetch_order(names):
        raise ModelCorrupt("thaw-index.json: its files are not in fetch order")
    for f in index.files:
        if f.n_bytes < 0 or len(f.sha256) != 64 or len(f.chunks_xxh3) != -(-f.n_bytes // CHUNK_BYTES):
            raise ModelCorrupt(f"thaw-index.json: {f.name} of {f.n_bytes} bytes has {len(f.chunks_xxh3)} chunks")


def _check_tensors(index: ModelIndex) -> None:
    sizes = {f.name: f.n_bytes for f in index.files}
    for t in index.tensors:
        bits = _DTYPE_BITS.get(t.dtype)
        if bits is None or math.prod(t.shape) * bits != t.n_bytes * 8:
            raise ModelCorrupt(f"thaw-index.json: tensor {t.name!r:.80} claims {t.n_bytes} bytes")
        if t.offset < 0 or t.n_bytes < 0 or t.offset + t.n_bytes > sizes.get(t.file, -1):
            raise ModelCorrupt(f"thaw-index.json: tensor {t.name!r:.80} lies outside {t.file!r:.80}")
        if t.xxh3 and len(t.xxh3) != len(edges(t)):
            raise ModelCorrupt(f"thaw-index.json: tensor {t.name!r:.80} has {len(t.xxh3)} checksums")
    for a, b in pairwise(sorted(index.tensors, key=lambda t: (t.file, t.offset, t.n_bytes))):
        if a.file == b.file and a.offset + a.n_bytes > b.offset:
            raise ModelCorrupt(f"thaw-index.json: tensors {a.name!r:.80} and {b.name!r:.80} overlap")


# ── facts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def layer_of(tensor_name: str) -> int | None:
    """The transformer layer that a tensor belongs to; None for embeddings, head and final norm."""
    match = _LAYER.search(tensor_name)
    return int(match.group(1)) if match else None


def is_entry(tensor_name: str) -> bool:
    """Whether a tensor outside the layers belongs to the first stage, because its name mentions an embedding."""
    return _ENTRY.search(tensor_name) is not None


def facts_of(uri: str, index: ModelIndex, config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the scheduler keeps.  ``config`` is config.json; if it has no layer count, tensor names decide."""
    by_layer: dict[int, int] = {}
    outer = 0
    for t in index.tensors:
        layer = layer_of(t.name)
        if layer is None:
            outer += t.n_bytes
        else:
            by_layer[layer] = by_layer.get(layer, 0) + t.n_bytes
    named = max(by_layer, default=-1) + 1
    n_layers = _configured_layers(config) or named
    if named > n_layers:  # e.g. a draft head stored as a further layer: it is not part of the pipeline
        outer += sum(n for layer, n in by_layer.items() if layer >= n_layers)
    architectures = config.get("architectures")
    known = isinstance(architectures, list) and bool(architectures)
    whole = n_layers > 0 and all(i in by_layer for i in range(n_layers))
    return ModelFacts(
        uri,
        index.n_bytes,
        index.weight_bytes,
        n_layers,
        tuple(by_layer.get(i, 0) for i in range(n_layers)),
        outer,
        index.sha256,
        index.etag,
        index.verified,
        {f.name: f.n_bytes for f in index.files},
        str(architectures[0]) if known and architectures is not None else "",
        parts_of(index.tensors, n_layers) if whole else None,
    )


def parts_of(tensors: Sequence[TensorInfo], n_layers: int) -> ModelParts:
    """Which bytes each part of a pipeline needs; ``tensors`` is in load order.

    A tensor outside the layers belongs to the entry when its name mentions an embedding, else to the exit.  So the last
    stage fetches a tensor with an unexpected name, and no tensor is lost.
    """
    entry: list[TensorInfo] = []
    layers: list[list[TensorInfo]] = [[] for _ in range(n_layers)]
    exit_: list[TensorInfo] = []
    for t in tensors:
        layer = layer_of(t.name)
        if layer is not None and layer < n_layers:
            layers[layer].append(t)
        else:
            (entry if is_entry(t.name) else exit_).append(t)
    tied = [] if any(_HEAD.search(t.name) for t in exit_) else [t for t in entry if _TOKEN_EMBEDDING.search(t.name)]
    return ModelParts(_joined(entry), tuple(map(_joined, layers)), _joined(exit_), _joined(tied))


def _joined(tensors: Iterable[TensorInfo]) -> tuple[FileRange, ...]:
    ranges: list[FileRange] = []
    for t in tensors:
        last = ranges[-1] if ranges else None
        if last is not None and last.file == t.file and last.offset + last.n_bytes == t.offset:
            ranges[-1] = FileRange(t.file, last.offset, last.n_bytes + t.n_bytes)
        else:
            ranges.append(FileRange(t.file, t.offset, t.n_bytes))
    return tuple(ranges)


def _configured_layers(config: Mapping[str, Any]) -> int:
    inner = config.get("text_config")
    for source in (config, inner if isinstance(inner, dict) else {}):
        for key in ("num_hidden_layers", "n_layer", "num_layers"):
            value = source.get(key)
            if type(value) is int and 0 < value <= 10_000:
                return value
    return 0
