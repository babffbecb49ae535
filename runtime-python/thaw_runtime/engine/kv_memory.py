"""How much of a worker's reserve the KV cache gets.  The derivation is in docs/kv-memory.md.

::

    reserve ├── weights ──┼── intermediates of the worst batch ──┼── KV cache, whole blocks ──┤

Nothing is measured: profiling runs a whole batch of dummy tokens through the model and would cost more than the rest
of a start.  The worst batch has ``max_num_batched_tokens`` tokens of which ``max_num_seqs`` sample a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thaw.errors import MemoryTooSmall, ModelUnsupported

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Overheads:
    """What a device adds to what is alive.  docs/kv-memory.md has the measurements."""

    heap: float
    """Memory held for a byte alive in a layer: an allocator keeps what was freed, in pieces."""
    per_logit: int
    """Bytes for one logit of one sampling request, whatever it asks for."""
    packs_head: bool
    """The output head is held twice, as it came (the embedding may be the same tensor) and packed for the kernel."""
    fixed: int = 16 * MIB
    """The step's own buffers (block tables, token ids, slot mappings) and kernel workspaces."""


CPU = Overheads(heap=3.0, per_logit=56, packs_head=True)
GPU = Overheads(heap=1.0, per_logit=12, packs_head=False, fixed=32 * MIB)
"""Not measured: logits, a float32 copy and a sorted one, and an allocator that splits and joins its blocks."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What of a model's config decides its memory.  ``layers`` are those of this stage."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    last_stage: bool = True  # computes logits


def geometry(config: Mapping[str, Any], layers: int, *, last_stage: bool = True) -> Geometry:
    """From a checkpoint's config.json, whatever the family calls the fields.  Raises ModelUnsupported."""
    text = config.get("text_config", config)
    hidden = _first(text, "hidden_size", "n_embd", "d_model")
    heads = _first(text, "num_attention_heads", "n_head", "num_heads")
    return Geometry(
        layers=layers,
        hidden=hidden,
        intermediate=_first(text, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        heads=heads,
        kv_heads=_first(text, "num_key_value_heads", "num_kv_heads", default=heads),
        head_dim=_first(text, "head_dim", default=hidden // heads),
        vocab=_first(text, "vocab_size"),
        last_stage=last_stage,
    )


def layer_count(config: Mapping[str, Any]) -> int:
    text = config.get("text_config", config)
    return _first(text, "num_hidden_layers", "n_layer", "num_layers")


def _first(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    if default is None:
        raise ModelUnsupported(f"config.json has none of {', '.join(names)}")
    return default


def kv_bytes_per_token(shape: Geometry, dtype: str) -> int:
    """Key and value of one token in every layer."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * DTYPE_BYTES[dtype]


def packed_head_bytes(shape: Geometry, dtype: str, device: Overheads = CPU) -> int:
    """Held beside the weights once they are loaded."""
    return shape.vocab * shape.hidden * DTYPE_BYTES[dtype] if device.packs_head and shape.last_stage else 0


def peak_intermediate_bytes(
    shape: Geometry, dtype: str, max_num_batched_tokens: int, max_num_seqs: int, device: Overheads = CPU
) -> int:
    """The most that a step holds outside weights and KV: the widest point of a layer, and the logits after it.

    The two are not alive together, but what the layers had is kept for the next step and of other sizes.
    """
    # residual and hidden stream through every layer; a norm's output is the third
    stream = 3 * shape.hidden
    # qkv, the rotated ones, the attention's output
    attention = 2 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim + shape.heads * shape.head_dim
    mlp = 3 * shape.intermediate  # gate and up fused, their product; or in, activated, the activation's own
    layer = max_num_batched_tokens * (stream + max(attention, mlp)) * DTYPE_BYTES[dtype]
    logits = max_num_seqs * shape.vocab * device.per_logit if shape.last_stage else 0
    return int(layer * device.heap) + logits + device.fixed


def relayed_bytes(shape: Geometry, dtype: str, max_num_batched_tokens: int, n_stages: int) -> int:
    """What a stage holds of batches that are on their way: one a stage may be waiting, one is read, one is computed.

    A batch is hidden states and residual of all its tokens; nothing where there is one stage.
    """
    if n_stages == 1:
        return 0
    return (n_stages + 2) * max_num_batched_tokens * 2 * shape.hidden * DTYPE_BYTES[dtype]


def held_bytes(stored_bytes: int, config: Mapping[str, Any], dtype: str) -> int:
    """A stage's weights as its model holds them, from what the plan says of the checkpoint: never too few.

    Floating tensors take the engine's dtype.  config.json says what they were; when it does not, two bytes a number.
    """
    if "quantization_config" in config:
        return stored_bytes
    text = config.get("text_config", config)
    stored = next((c[k] for c in (text, config) for k in ("dtype", "torch_dtype") if c.get(k) in DTYPE_BYTES), None)
    return -(-stored_bytes * DTYPE_BYTES[dtype] // (DTYPE_BYTES[stored] if stored else 2))


@dataclass(frozen=True, slots=True)
class Room:
    """A stage's reserve and the tensors it holds, in bytes, and its shape."""

    reserve: int
    weights: int
    shape: Geometry


@dataclass(frozen=True, slots=True)
class Worst:
    """What bounds a batch and a request, the same in every stage.  ``max_num_seqs`` sample in one batch."""

    dtype: str
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    device: Overheads = CPU


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The slices of a reserve, in bytes.  ``kv`` is a whole number of blocks."""

    reserve: int
    weights: int
    intermediates: int
    kv: int
    kv_tokens: int
    kv_blocks: int


def plan_stage(stage: int, rooms: Sequence[Room], worst: Worst) -> MemoryPlan:
    """Divide the reserve of ``stage``; every stage of a pipeline gets as many blocks as the scarcest has room for.

    A block is the same tokens in every stage, so all must have it.  The result depends on nothing but the arguments,
    which every stage has: nobody asks anybody.  Raises MemoryTooSmall, at every stage alike, unless one request of
    ``max_model_len`` tokens fits.
    """
    plans = [_slices(room, worst, len(rooms)) for room in rooms]
    # one block is vLLM's null block: it is never handed to a request
    needed = -(-worst.max_model_len // worst.block_size) + 1
    scarcest = min(range(len(plans)), key=lambda i: plans[i][2])
    if plans[scarcest][2] < needed:
        raise _too_small(f"stage {scarcest} of " if len(rooms) > 1 else "", rooms[scarcest], worst,
                         plans[scarcest], needed)  # fmt: skip
    blocks, room = plans[scarcest][2], rooms[stage]
    weights, intermediates, _ = plans[stage]
    kv = blocks * _block_bytes(room.shape, worst)
    return MemoryPlan(room.reserve, weights, intermediates, kv, (blocks - 1) * worst.block_size, blocks)


def _slices(room: Room, worst: Worst, n_stages: int) -> tuple[int, int, int]:
    """(weights, intermediates, blocks)"""
    shape, tokens = room.shape, worst.max_num_batched_tokens
    weights = room.weights + packed_head_bytes(shape, worst.dtype, worst.device)
    intermediates = peak_intermediate_bytes(shape, worst.dtype, tokens, worst.max_num_seqs, worst.device)
    intermediates += relayed_bytes(shape, worst.dtype, tokens, n_stages)
    return weights, intermediates, (room.reserve - weights - intermediates) // _block_bytes(shape, worst)


def _block_bytes(shape: Geometry, worst: Worst) -> int:
    return worst.block_size * kv_bytes_per_token(shape, worst.dtype)


def _too_small(which: str, room: Room, worst: Worst, slices: tuple[int, int, int], blocks: int) -> MemoryTooSmall:
    weights, intermediates, _ = slices
    kv = blocks * _block_bytes(room.shape, worst)
    needed = weights + intermediates + kv
    return MemoryTooSmall(
        f"{which}the model needs {_mib(needed)} MiB ({_mib(weights)} weights, {_mib(intermediates)} intermediates, "
        f"{_mib(kv)} for one request of {worst.max_model_len} tokens) and the worker has {_mib(room.reserve)} MiB",
        hint=f"set resources.gpu_memory_mb to at least {_mib(needed)}, or lower engine.max_model_len",
    )  # fmt: skip


def _mib(n_bytes: int) -> int:
    return -(-n_bytes // (1024 * 1024))
