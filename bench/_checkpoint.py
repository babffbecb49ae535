"""A checkpoint of a gigabyte that an engine can run: Llama-shaped, random, seeded, kept outside of the checkout.

Its head is not tied to its embedding, and both are small compared with the layers, so the checkpoint divides nearly
evenly into four stages.  Its tokenizer is that of the small real model.  Its answers mean nothing, but they are the
same every time.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from thaw import partition
from thaw.checkpoints import checkpoint
from thaw.model import ModelParts

_SEED = 20261121
_LAYERS, _HIDDEN, _MIDDLE, _HEADS, _KV_HEADS, _VOCAB = 36, 1024, 2816, 16, 4, 49152
_FIRST_WORD = 17
"""Smaller ids are special tokens, which have no text.  Their rows of the head are 0, so they are never the likeliest.
"""
_SIGMA = 0.02
_NAME = f"random-llama-{_LAYERS}x{_HIDDEN}x{_MIDDLE}-{_SEED}-1"  # the last number is the version of this generator


def obtain(cache: Path, tokenizer: Path, say: Callable[[str], None]) -> Path:
    """Return the checkpoint's directory.  The first use makes it, in well under a minute."""
    target = cache / _NAME
    if not target.exists():
        say(f"making {target}")
        made = target.with_name(f".{_NAME}.{os.getpid()}")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        for path in tokenizer.iterdir():
            if path.name in checkpoint.SIDECAR_NAMES and path.name != "config.json":
                shutil.copy(path, made)
        (made / "config.json").write_text(json.dumps(_config(tokenizer)))
        _write(made / checkpoint.WEIGHTS_NAME)
        made.rename(target)
    return target


def bound(parts: ModelParts, n_stages: int) -> float:
    """The model's bytes divided by the bytes of the largest of ``n_stages`` stages."""
    return size_of_largest(parts, 1) / size_of_largest(parts, n_stages)


def size_of_largest(parts: ModelParts, n_stages: int) -> int:
    """The bytes of weights of the largest stage."""
    return max(partition.size(partition.ranges(parts, layers)) for layers in partition.split(parts, n_stages))


def _config(like: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((like / "config.json").read_text())
    return config | {
        "hidden_size": _HIDDEN,
        "intermediate_size": _MIDDLE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HIDDEN // _HEADS,
        "vocab_size": _VOCAB,
        "tie_word_embeddings": False,
    }


def _tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, in the order in which the model computes with them."""
    kv = _HIDDEN // _HEADS * _KV_HEADS
    yield "model.embed_tokens.weight", (_VOCAB, _HIDDEN)
    for n in range(_LAYERS):
        layer = f"model.layers.{n}"
        yield f"{layer}.input_layernorm.weight", (_HIDDEN,)
        yield f"{layer}.self_attn.q_proj.weight", (_HIDDEN, _HIDDEN)
        yield f"{layer}.self_attn.k_proj.weight", (kv, _HIDDEN)
        yield f"{layer}.self_attn.v_proj.weight", (kv, _HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", (_HIDDEN, _HIDDEN)
        yield f"{layer}.post_attention_layernorm.weight", (_HIDDEN,)
        yield f"{layer}.mlp.gate_proj.weight", (_MIDDLE, _HIDDEN)
        yield f"{layer}.mlp.up_proj.weight", (_MIDDLE, _HIDDEN)
        yield f"{layer}.mlp.down_proj.weight", (_HIDDEN, _MIDDLE)
    yield "model.norm.weight", (_HIDDEN,)
    yield "lm_head.weight", (_VOCAB, _HIDDEN)


def _write(path: Path) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in _tensors():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.Generator(np.random.PCG64(_SEED))
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name, shape in _tensors():
            f.write(_values(name, shape, random))


def _values(name: str, shape: tuple[int, ...], random: np.random.Generator) -> bytes:
    """Return the tensor's bytes as bfloat16, which is the upper half of a float32."""
    values = np.ones(shape, np.float32) if len(shape) == 1 else random.standard_normal(shape, np.float32) * _SIGMA
    if name == "lm_head.weight":
        values[:_FIRST_WORD] = 0
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
