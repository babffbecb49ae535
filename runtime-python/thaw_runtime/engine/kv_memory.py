"""How much of a worker's reserve the KV cache gets.  The derivation is in docs/kv-memory.md.

::

    reserve ├── weights ──┼── intermediates of the largest batch ──┼── KV cache, whole blocks ──┤

Nothing is measured: profiling runs a whole batch of dummy tokens through the model and would cost more than the rest
of a start.  The largest batch has ``max_num_batched_tokens`` tokens, and ``max_num_seqs`` requests sample a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thaw.errors import MemoryTooSmall, ModelUnsupported

KERNELS = 96
"""The kernels that oneDNN keeps for products on a CPU.  It makes one for each shape of a weight and each number of
rows, so a batch of another size needs four or five others."""
KERNEL_BYTES = 320 * 1024
"""Measured, on a processor with AVX-512 (docs/kv-memory.md)."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Overheads:
    """The memory that a device holds in addition to live data.  docs/kv-memory.md has the measurements."""

    heap: float
    """Bytes held for a byte that is alive in a layer: an allocator keeps freed memory in pieces."""
    per_logit: int
    """Bytes for one logit of one sampling request, with any sampling parameters, and for freed blocks that are too
    small for it, because they were made for fewer requests."""
    packs_head: bool
    """True if a device holds the output head twice: as it was loaded (it may share the embedding's tensor), and packed
    for the kernel.
    """
    fixed: int = 16 * MIB
    """The step's own buffers (block tables, token ids, slot mappings) and kernel workspaces."""
    kernels: int = 0
    """The kernels that were made for the sizes of earlier batches, and are kept."""


CPU = Overheads(heap=3.0, per_logit=104, packs_head=True, kernels=KERNELS * KERNEL_BYTES)
GPU = Overheads(heap=1.0, per_logit=12, packs_head=False, fixed=32 * MIB)
"""These values were not measured.  They assume logits, a float32 copy and a sorted copy, and an allocator that splits
and joins its blocks."""


@dataclass(frozen=True, slots=True)
class State:
    """What the layers of a state-space model keep of a sequence, instead of a key and a value of each token."""

    width: int
    """The elements of a token in the convolution, the widest point of such a layer but for its projection."""
    n_elements: int
    """The elements of one sequence's state in one layer.  A step holds those of all its sequences three times, in
    float32: as the kernel reads them, as it writes them, and as they are stored."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The numbers of a model's config that decide its memory.  ``layers`` counts those of this stage."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    last_stage: bool = True  # computes logits
    keeps_kv: bool = True  # later tokens read the keys and values of earlier ones; an encoder has none to keep
    state: State | None = None  # some or all layers keep a state


def geometry(
    config: Mapping[str, Any],
    layers: int,
    *,
    last_stage: bool = True,
    keeps_kv: bool = True,
    state: State | None = None,
) -> Geometry:
    """Read a checkpoint's config.json.  Model families give the fields different names.  Raises ModelUnsupported."""
    text = config.get("text_config", config)
    hidden = _first(text, "hidden_size", "n_embd", "d_model")
    without_attention = 1 if state is not None else None
    heads = _first(text, "num_attention_heads", "n_head", "num_heads", default=without_attention)
    return Geometry(
        layers=layers,
        hidden=hidden,
        intermediate=_first(text, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        heads=heads,
        kv_heads=_first(text, "num_key_value_heads", "num_kv_heads", default=heads),
        head_dim=_first(text, "head_dim", default=hidden // heads),
        vocab=_first(text, "vocab_size"),
        last_stage=last_stage,
        keeps_kv=keeps_kv,
        state=state,
    )


def layer_count(config: Mapping[str, Any]) -> int:
    text = config.get("text_config", config)
    kinds = next((text[k] for k in ("layers_block_type", "layer_types") if isinstance(text.get(k), list)), None)
    return _first(text, "num_hidden_layers", "n_layer", "num_layers", default=None if kinds is None else len(kinds))


def _first(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    if default is None:
        raise ModelUnsupported(f"config.json has none of {', '.join(names)}")
    return default


def kv_bytes_per_token(shape: Geometry, dtype: str) -> int:
    """Bytes of the key and value of one token in every layer."""
    if not shape.keeps_kv:
        return 0
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * DTYPE_BYTES[dtype]


def packed_head_bytes(shape: Geometry, dtype: str, device: Overheads = CPU) -> int:
    """Bytes held in addition to the weights once they are loaded."""
    return shape.vocab * shape.hidden * DTYPE_BYTES[dtype] if device.packs_head and shape.last_stage else 0


def peak_intermediate_bytes(
    shape: Geometry, dtype: str, max_num_batched_tokens: int, max_num_seqs: int, device: Overheads = CPU
) -> int:
    """Return the most bytes of a step outside weights and KV: the widest point of a layer, and the logits after it.

    The two are not alive together.  They are added because the allocator keeps the layers' memory for the next step, in
    blocks of other sizes.
    """
    # every layer has the residual, the hidden states and a norm's output
    stream = 3 * shape.hidden
    # qkv, the rotated qkv, the attention's output
    attention = 2 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim + shape.heads * shape.head_dim
    # gate and up fused, and their product; or the input, the activated one, the activation's own
    mlp = 3 * shape.intermediate
    # the projection, which is twice as wide as the convolution, and the convolution's output, copied in parts
    mixer = 6 * shape.state.width if shape.state is not None else 0
    layer = max_num_batched_tokens * (stream + max(attention, mlp, mixer)) * DTYPE_BYTES[dtype]
    layer += 3 * max_num_seqs * shape.state.n_elements * DTYPE_BYTES["float32"] if shape.state is not None else 0
    logits = max_num_seqs * shape.vocab * device.per_logit if shape.last_stage else 0
    return int(layer * device.heap) + logits + device.fixed + device.kernels


def relayed_bytes(shape: Geometry, dtype: str, max_num_batched_tokens: int, n_stages: int) -> int:
    """The bytes of the batches that a stage holds: one may wait for each stage, one is read, one is computed.

    A batch is the hidden states and the residual of all its tokens.  The result is 0 if there is one stage.
    """
    if n_stages == 1:
        return 0
    return (n_stages + 2) * max_num_batched_tokens * 2 * shape.hidden * DTYPE_BYTES[dtype]


def held_bytes(stored_bytes: int, config: Mapping[str, Any], dtype: str) -> int:
    """A stage's weights as its model holds them, from the plan's number of bytes of the checkpoint; never too few.

    Floating tensors take the engine's dtype.  config.json says what dtype they are stored in.  If it does not, they
    count as two bytes a number.
    """
    if "quantization_config" in config:
        return stored_bytes
    text = config.get("text_config", config)
    stored = next((c[k] for c in (text, config) for k in ("dtype", "torch_dtype") if c.get(k) in DTYPE_BYTES), None)
    return -(-stored_bytes * DTYPE_BYTES[dtype] // (DTYPE_BYTES[stored] if stored else 2))


def adapter_bytes(shape: Geometry, dtype: str, rank: int, slots: int) -> int:
    """Return the bytes of the slots for adapters, used or not: two matrices of ``rank`` for each linear layer."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys)
    widths = shape.layers * (attention + 3 * (shape.hidden + shape.intermediate))
    return slots * rank * widths * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """A stage's reserve and its weights, in bytes, and its shape."""

    reserve: int
    weights: int
    shape: Geometry


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of a batch and of a request, the same in every stage.  ``max_num_seqs`` requests sample in a batch."""

    dtype: str
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    device: Overheads = CPU


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The parts of a reserve, in bytes.  ``kv`` is a whole number of blocks; an encoder has none.

    If layers keep a state, ``kv`` is all that is left, and the engine divides it, because only the built model knows
    its groups of layers and their blocks (vllm/state_layers.py).  ``kv_tokens`` and ``kv_blocks`` are 0 until then."""

    reserve: int
    weights: int
    intermediates: int
    kv: int
    kv_tokens: int
    kv_blocks: int


def plan_stage(stage: int, stages: Sequence[StageMemory], limits: BatchLimits) -> MemoryPlan:
    """Divide the reserve of ``stage``; every stage of a pipeline gets as many blocks as the scarcest one can hold.

    A block is the same tokens in every stage, so all stages must have it.  The result depends on the arguments only,
    and every stage has the same ones, so no stage asks another.  Raises MemoryTooSmall, in every stage alike, unless
    one request of ``max_model_len`` tokens fits.
    """
    slices = [_slices(memory, limits, len(stages)) for memory in stages]
    needed = _needed_blocks(stages[stage].shape, limits)
    scarcest = min(range(len(slices)), key=lambda k: slices[k][2])
    if slices[scarcest][2] < needed:
        which = f"stage {scarcest} of " if len(stages) > 1 else ""
        weights, intermediates, _ = slices[scarcest]
        kv = needed * _block_bytes(stages[scarcest].shape, limits)
        raise too_small(which, stages[scarcest].reserve, weights, intermediates, kv, limits.max_model_len)
    blocks, memory = slices[scarcest][2], stages[stage]
    weights, intermediates, _ = slices[stage]
    if memory.shape.state is not None:
        return MemoryPlan(memory.reserve, weights, intermediates, memory.reserve - weights - intermediates, 0, 0)
    kv = blocks * _block_bytes(memory.shape, limits)
    return MemoryPlan(memory.reserve, weights, intermediates, kv, max(0, blocks - 1) * limits.block_size, blocks)


def _needed_blocks(shape: Geometry, limits: BatchLimits) -> int:
    """Return the blocks of one request.  One more is vLLM's null block: it is never handed to a request."""
    return -(-limits.max_model_len // limits.block_size) + 1 if _counts_blocks(shape) else 0


def _counts_blocks(shape: Geometry) -> bool:
    return shape.keeps_kv and shape.state is None


def _slices(memory: StageMemory, limits: BatchLimits, n_stages: int) -> tuple[int, int, int]:
    """(weights, intermediates, blocks), with fewer than no blocks if the rest does not fit."""
    shape, tokens = memory.shape, limits.max_num_batched_tokens
    weights = memory.weights + packed_head_bytes(shape, limits.dtype, limits.device)
    intermediates = peak_intermediate_bytes(shape, limits.dtype, tokens, limits.max_num_seqs, limits.device)
    intermediates += relayed_bytes(shape, limits.dtype, tokens, n_stages)
    left = memory.reserve - weights - intermediates
    return weights, intermediates, left // _block_bytes(shape, limits) if _counts_blocks(shape) else min(0, left)


def _block_bytes(shape: Geometry, limits: BatchLimits) -> int:
    return limits.block_size * kv_bytes_per_token(shape, limits.dtype)


def too_small(
    which: str, reserve: int, weights: int, intermediates: int, kv: int, max_model_len: int
) -> MemoryTooSmall:
    """``kv`` are the bytes that one request of ``max_model_len`` tokens needs, 0 if they are not known."""
    needed = weights + intermediates + kv
    request = f", {_mib(kv)} for one request of {max_model_len} tokens" if kv else ""
    return MemoryTooSmall(
        f"{which}the model needs {_mib(needed)} MiB ({_mib(weights)} weights, {_mib(intermediates)} intermediates"
        f"{request}) and the worker has {_mib(reserve)} MiB",
        hint=f"set resources.gpu_memory_mb to at least {_mib(needed)}, or lower engine.max_model_len",
    )


def _mib(n_bytes: int) -> int:
    return -(-n_bytes // (1024 * 1024))
