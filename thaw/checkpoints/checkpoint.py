"""Checkpoints: safetensors headers, the index beside a model, and the facts that a scheduler needs about the model.

This module is pure: bytes in, values out.  The caller reads the bytes from a store (fetchd) or from a directory
(``thaw model push``).  An attacker may have written a header, so every length is checked against the file before the
code trusts it or allocates memory for it, and checkpoints/model_json.py bounds the values that are made of the text.
The format is in docs/formats/checkpoint-index.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from thaw import wire
from thaw.checkpoints import hash_tree, model_json, pooling
from thaw.checkpoints.text_half import text_tensors
from thaw.errors import ModelCorrupt, ModelUnsupported, ProtocolError
from thaw.model import (
    INDEX_NAME,
    INDEX_VERSION,
    FileRange,
    ModelFacts,
    ModelFile,
    ModelIndex,
    ModelParts,
    TensorInfo,
)

MAX_HEADER_BYTES: Final = 16 * 1024 * 1024
"""Headers of the largest published checkpoints stay under 1 MiB per file.  safetensors itself allows 100 MB."""
LENGTH_BYTES: Final = 8

CONFIG_NAME: Final = "config.json"
SIDECAR_NAMES: Final = (
    CONFIG_NAME,
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
    "additional_chat_templates/default.jinja",
    "additional_chat_templates/tool_use.jinja",
    *pooling.NAMES,
)
"""The files that an engine and a tokenizer open besides weights, in fetch order.  No file with another name is ever
fetched, so no code is fetched.
"""
WEIGHTS_NAME: Final = "model.safetensors"
ADAPTER_CONFIG_NAME: Final = "adapter_config.json"
ADAPTER_WEIGHTS_NAME: Final = "adapter_model.safetensors"
"""The two files of a LoRA adapter (thaw/checkpoints/adapter.py)."""
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
_DIGEST: Final = re.compile(r"[0-9a-f]{64}").fullmatch
_SAFE_NAME: Final = re.compile(r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\Z")
_LAYER: Final = re.compile(r"(?:\A|\.)(?:layers|h|blocks)\.(\d{1,4})\.")
_ENTRY: Final = re.compile(r"(?:embed(?!_out)|wte|wpe|project_in)")  # GPT-NeoX calls its head embed_out
_TOKEN_EMBEDDING: Final = re.compile(r"(?:embed_tokens|wte|word_embeddings|embed_in)\.weight\Z")
_HEAD: Final = re.compile(r"(?:lm_head|embed_out|output)\.")
_MAX_RANGES: Final = 16_384
"""The most ranges of a model's parts.  A model with its tensors in random order would make a plan of megabytes."""


def is_fetchable(name: str) -> bool:
    """Whether ``name`` may be requested from a store: the name of a known sidecar, or a plain one of safetensors."""
    return is_sidecar(name) or (_SAFE_NAME.match(name) is not None and name.endswith(".safetensors"))


def is_sidecar(name: str) -> bool:
    """Whether ``name`` is fetched whole and before the weights."""
    return name in SIDECAR_NAMES or name == ADAPTER_CONFIG_NAME


def fetch_order(names: Iterable[str]) -> list[str]:
    """Sidecars come first (config.json before all others), then weights by name, which is the order of their layers."""
    known = {name: i for i, name in enumerate((ADAPTER_CONFIG_NAME, *SIDECAR_NAMES))}
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
        plain = model_json.header(header)
    except model_json.Unreadable as e:
        raise ModelCorrupt(f"{file}: its header cannot be used: {e}") from None
    if not isinstance(plain, dict):
        raise ModelCorrupt(f"{file}: its header is not a JSON object")
    plain.pop("__metadata__", None)
    tensors = tuple(sorted((_tensor(file, n, entry, data_start) for n, entry in plain.items()), key=_place))
    _check_tiling(file, tensors, data_start, file_bytes)
    return tensors


def _place(tensor: TensorInfo) -> tuple[int, int, str]:
    return tensor.offset, tensor.n_bytes, tensor.name


def _tensor(file: str, name: str, entry: Any, data_start: int) -> TensorInfo:
    if len(name) > model_json.MAX_NAME:
        raise ModelCorrupt(f"{file}: tensor {name[:80]!r} has a name of {len(name)} characters")
    dtype, shape, span = entry if isinstance(entry, model_json.Entry) else ("", None, None)
    if not (model_json.are_sizes(shape) and model_json.are_sizes(span) and len(span) == 2):
        raise ModelCorrupt(f"{file}: tensor {name!r:.80} has no usable shape or data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise ModelUnsupported(
            f"{file}: tensor {name!r:.80} has dtype {dtype!r:.40}",
            hint=f"dtypes that can be loaded: {', '.join(_DTYPE_BITS)}",
        )
    begin, end = span
    if not _has_size(dtype, shape, end - begin):
        raise ModelCorrupt(f"{file}: tensor {name!r:.80} of shape {shape} and dtype {dtype} claims {end - begin} bytes")
    return TensorInfo(name, file, data_start + begin, end - begin, dtype, tuple(shape))


def _has_size(dtype: str, shape: Sequence[int], n_bytes: int) -> bool:
    """Whether a tensor has ``n_bytes``.  The sizes of ``shape`` have been checked."""
    return model_json.product((_DTYPE_BITS[dtype], *shape), 8 * model_json.MAX_SIZE) == 8 * n_bytes


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


def shard_names(data: bytes | str) -> list[str]:
    """The files that ``model.safetensors.index.json`` names, in order.  Raises ModelCorrupt."""
    try:
        names = sorted(set(model_json.shards(data)["weight_map"].values()))
    except (model_json.Unreadable, KeyError, AttributeError, TypeError) as e:
        raise ModelCorrupt(f"{SHARDS_NAME}: no weight_map: {e}") from None
    if len(names) > model_json.MAX_FILES:
        raise ModelCorrupt(f"{SHARDS_NAME}: it names {len(names)} files; at most {model_json.MAX_FILES} make sense")
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


def describe_file(name: str, chunks: Iterable[bytes], digest: hash_tree.Digest) -> ModelFile:
    """Digest a file that is read in pieces of exactly CHUNK_BYTES (the last may be shorter)."""
    digests, n_bytes = [], 0
    for chunk in chunks:
        digests.append(digest(chunk))
        n_bytes += len(chunk)
    return ModelFile(name, n_bytes, is_sidecar(name), tuple(digests))


def build_index(files: Sequence[ModelFile], tensors: Sequence[TensorInfo], *, etag: str = "") -> ModelIndex:
    """Put files in fetch order and tensors in load order.  The index is verified when it has all digests."""
    order = {name: i for i, name in enumerate(fetch_order(f.name for f in files))}
    ordered = tuple(sorted(files, key=lambda f: order[f.name]))
    loaded = tuple(sorted(tensors, key=lambda t: (order[t.file], t.offset, t.n_bytes)))
    verified = bool(ordered) and all(map(_has_all_chunks, ordered)) and all(map(_has_all_edges, loaded))
    return ModelIndex(
        INDEX_VERSION, ordered, loaded, hash_tree.root(ordered, loaded) if verified else "", etag, verified
    )


def write_index(index: ModelIndex) -> bytes:
    """The content of ``thaw-index.json``."""
    return wire.dumps(index)


def read_index(data: bytes | str, wanted: str = "") -> ModelIndex:
    """Parse and check ``thaw-index.json``, and compute its root.  ``wanted``: the root, or its first digits.

    Raises ModelCorrupt, also when the root is not the one that is wanted, or ModelUnsupported for another format.
    """
    try:
        plain = model_json.index(data)
        version = plain.get("version") if isinstance(plain, dict) else None
        if type(version) is int and version != INDEX_VERSION:
            raise ModelUnsupported(
                f"{INDEX_NAME} has version {version!r:.20}; this side reads {INDEX_VERSION}",
                hint="push the model again with this release",
            )
        index = wire.from_plain(ModelIndex, plain)
    except (ProtocolError, model_json.Unreadable) as e:
        raise ModelCorrupt(f"{INDEX_NAME} cannot be read: {e}", hint="push the model again") from None
    _check_files(index)
    _check_tensors(index)
    root = hash_tree.root(index.files, index.tensors)
    if not index.verified or root != index.sha256:
        raise ModelCorrupt(f"{INDEX_NAME}: its root is not that of its hash tree", hint="push the model again")
    if not root.startswith(wanted):
        raise ModelCorrupt(
            f"{INDEX_NAME}: the place holds another version: its hash tree has the root {root}, {wanted} is wanted",
            hint="somebody has changed the model at the store: push it again",
        )
    return index


def _check_files(index: ModelIndex) -> None:
    if len(index.files) > model_json.MAX_FILES:
        raise ModelCorrupt(f"{INDEX_NAME}: it has {len(index.files)} files; at most {model_json.MAX_FILES} make sense")
    names = [check_name(f.name) for f in index.files]
    if len(set(names)) != len(names) or names != fetch_order(names):
        raise ModelCorrupt(f"{INDEX_NAME}: its files are not in fetch order")
    for f in index.files:
        if not 0 <= f.n_bytes < model_json.MAX_SIZE or not _has_all_chunks(f) or f.sidecar != is_sidecar(f.name):
            raise ModelCorrupt(f"{INDEX_NAME}: {f.name} of {f.n_bytes} bytes has {len(f.chunks_blake3)} chunks")
    if sum(len(f.chunks_blake3) for f in index.files) > model_json.MAX_CHUNKS:
        raise ModelCorrupt(f"{INDEX_NAME}: it has more than {model_json.MAX_CHUNKS} chunks")


def _has_all_chunks(file: ModelFile) -> bool:
    return len(file.chunks_blake3) == hash_tree.n_chunks(file.n_bytes) and all(map(_DIGEST, file.chunks_blake3))


def _has_all_edges(tensor: TensorInfo) -> bool:
    return len(tensor.edges_blake3) == len(hash_tree.edges(tensor)) and all(map(_DIGEST, tensor.edges_blake3))


def _check_tensors(index: ModelIndex) -> None:
    if len(index.tensors) > model_json.MAX_TENSORS:
        raise ModelCorrupt(
            f"{INDEX_NAME}: it has {len(index.tensors)} tensors; at most {model_json.MAX_TENSORS} make sense"
        )
    sizes = {f.name: f.n_bytes for f in index.files}
    for t in index.tensors:
        if len(t.name) > model_json.MAX_NAME or not model_json.are_sizes([t.offset, t.n_bytes]):
            raise ModelCorrupt(f"{INDEX_NAME}: tensor {t.name[:80]!r} has an impossible name or place")
        if not (t.dtype in _DTYPE_BITS and model_json.are_sizes(t.shape) and _has_size(t.dtype, t.shape, t.n_bytes)):
            raise ModelCorrupt(f"{INDEX_NAME}: tensor {t.name!r:.80} claims {t.n_bytes} bytes")
        if t.offset + t.n_bytes > sizes.get(t.file, -1):
            raise ModelCorrupt(f"{INDEX_NAME}: tensor {t.name!r:.80} lies outside {t.file!r:.80}")
        if not _has_all_edges(t):
            raise ModelCorrupt(f"{INDEX_NAME}: tensor {t.name!r:.80} has {len(t.edges_blake3)} digests")
    order = {f.name: i for i, f in enumerate(index.files)}
    for a, b in pairwise(index.tensors):
        if (order[a.file], a.offset, a.n_bytes) > (order[b.file], b.offset, b.n_bytes):
            raise ModelCorrupt(f"{INDEX_NAME}: tensors {a.name!r:.80} and {b.name!r:.80} are not in load order")
        if a.file == b.file and a.offset + a.n_bytes > b.offset:
            raise ModelCorrupt(f"{INDEX_NAME}: tensors {a.name!r:.80} and {b.name!r:.80} overlap")


def config_file(index: ModelIndex) -> ModelFile:
    """The file whose content decides about layers and architecture.  Raises ModelCorrupt when the index has none."""
    for file in index.files:
        if file.name in (CONFIG_NAME, ADAPTER_CONFIG_NAME):
            return file
    raise ModelCorrupt(f"{INDEX_NAME}: it has no {CONFIG_NAME}", hint="push the model again")


def check_config(file: ModelFile, data: bytes, digest: hash_tree.Digest) -> None:
    """Raises ModelCorrupt when config.json is not the one that the version binds."""
    if not hash_tree.holds(file, data, digest):
        raise ModelCorrupt(
            f"{CONFIG_NAME} is not the one of this version",
            hint="somebody has changed it at the store, or it is damaged: push the model again",
        )


# ── facts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def layer_of(tensor_name: str) -> int | None:
    """The transformer layer that a tensor belongs to; None for embeddings, head and final norm."""
    match = _LAYER.search(tensor_name)
    return int(match.group(1)) if match else None


def is_entry(tensor_name: str) -> bool:
    """Whether a tensor outside the layers belongs to the first stage, because its name mentions an embedding."""
    return _ENTRY.search(tensor_name) is not None


def facts_of(uri: str, index: ModelIndex, config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the scheduler keeps.  ``config`` is config.json; if it has no layer count, tensor names decide.
    If the model also reads pictures or sound, only its language model has layers and parts."""
    by_layer: dict[int, int] = {}
    outer = 0
    tensors = text_tensors(config, index.tensors)
    for t in tensors:
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
    pools = any(f.name == pooling.MODULES_NAME for f in index.files)  # an embedding model, which has one stage
    parts = parts_of(tensors, n_layers) if whole and not pools else None
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
        parts if parts is not None and parts.n_ranges <= _MAX_RANGES else None,
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
