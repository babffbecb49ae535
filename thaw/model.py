"""The facts about a model: its files, its tensors and where their bytes lie.  See docs/formats/checkpoint-index.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CHUNK_BYTES = 8 * 1024 * 1024
"""Digests are per chunk of a file; a chunk is also the unit of a ranged read."""

INDEX_NAME = "thaw-index.json"
INDEX_VERSION = 2


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of the checkpoint.  ``sidecar`` files (config, tokenizer) are fetched whole and before the weights."""

    name: str
    n_bytes: int
    sidecar: bool
    chunks_blake3: tuple[str, ...] = ()  # 64 hex digits per 8 MiB chunk; empty while unverified


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """``offset`` counts from the start of the *file* (not of safetensors' data part).

    ``edges_blake3`` holds the digests of the tensor's :func:`hash_tree.edges`.  With them, a fetch that cuts a
    chunk can check its part of the chunk.
    """

    name: str
    file: str
    offset: int
    n_bytes: int
    dtype: str
    shape: tuple[int, ...]
    edges_blake3: tuple[str, ...] = ()  # 64 hex digits each; empty while unknown


@dataclass(frozen=True, slots=True)
class ModelIndex:
    """A checkpoint's table of contents, with the tensors in load order.

    ``sha256`` is the root of the hash tree over all of it (:func:`hash_tree.root`), and so the model's version.
    For an unverified model (without an index in the store) it is empty, and ``etag`` distinguishes versions.
    """

    version: int
    files: tuple[ModelFile, ...]
    tensors: tuple[TensorInfo, ...]
    sha256: str = ""
    etag: str = ""
    verified: bool = False

    @property
    def n_bytes(self) -> int:
        return sum(f.n_bytes for f in self.files)

    @property
    def weight_bytes(self) -> int:
        return sum(t.n_bytes for t in self.tensors)


@dataclass(frozen=True, slots=True)
class FileRange:
    """``[offset, offset + n_bytes)`` of a file."""

    file: str
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Where the bytes of a model's parts lie: ranges in load order, with adjacent ranges joined.

    ``tied`` holds the tensors that the head shares with the embedding when the checkpoint has no head of its own.  Both
    the first and the last stage of a pipeline need them.
    """

    entry: tuple[FileRange, ...]  # embeddings: the first stage
    layers: tuple[tuple[FileRange, ...], ...]
    exit: tuple[FileRange, ...]  # final norm and head: the last stage
    tied: tuple[FileRange, ...] = ()

    @property
    def n_ranges(self) -> int:
        return len(self.entry) + sum(map(len, self.layers)) + len(self.exit) + len(self.tied)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about one version of a model that the scheduler keeps (only fetchd keeps the list of tensors).

    ``uri`` is where this version's files are.
    """

    uri: str
    n_bytes: int
    weight_bytes: int
    n_layers: int
    layer_bytes: tuple[int, ...]  # per transformer layer
    outer_bytes: int  # embeddings, head, final norm
    sha256: str
    etag: str
    verified: bool
    files: Mapping[str, int]  # name → n_bytes, sidecars first, in fetch order
    architecture: str = ""
    parts: ModelParts | None = None  # None: the model cannot be divided into stages
    name: str = ""
    """The URI asked for, where ``uri`` is the pin that it leads to (checkpoints/versions.py); empty: ``uri``."""

    @property
    def version(self) -> str:
        """A value that changes when the model is pushed again."""
        return self.sha256 or self.etag

    @property
    def asked_for(self) -> str:
        return self.name or self.uri
