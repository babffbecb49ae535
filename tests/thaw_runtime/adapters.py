"""A tiny random model, adapters of it, and the models that result from merging an adapter into it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tests.thaw_runtime.models import write_tiny_model
from thaw.checkpoints.checkpoint import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME

Array = NDArray[np.float32]
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCAB = 64, 128, 2, 2, 1, 257
_KV = HIDDEN // HEADS * KV_HEADS
LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (_KV, HIDDEN),
    "self_attn.v_proj": (_KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}


def write_base(directory: Path, seed: int = 0) -> Path:
    """A Llama in float32 whose tokens are bytes.  The numbers are random, so its answers vary."""
    write_tiny_model(directory)
    random = np.random.default_rng(seed)

    def matrix(*shape: int) -> Array:
        return (random.standard_normal(shape) * 0.3).astype(np.float32)

    tensors: dict[str, Array] = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        tensors |= {f"{layer}.{name}.weight": matrix(*shape) for name, shape in LINEAR.items()}
        tensors |= {
            f"{layer}.{n}.weight": np.ones(HIDDEN, np.float32) for n in ("input_layernorm", "post_attention_layernorm")
        }
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    save_file(tensors, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 256,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_adapter(directory: Path, seed: int, rank: int = 4, base: Mapping[str, tuple[int, int]] = LINEAR) -> Path:
    """An adapter as PEFT writes it, which changes every answer."""
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    for i in range(LAYERS):
        for name, (rows, columns) in base.items():
            at = f"base_model.model.model.layers.{i}.{name}"
            tensors[f"{at}.lora_A.weight"] = (random.standard_normal((rank, columns)) * 0.2).astype(np.float32)
            tensors[f"{at}.lora_B.weight"] = (random.standard_normal((rows, rank)) * 0.2).astype(np.float32)
    save_file(tensors, directory / ADAPTER_WEIGHTS_NAME)
    targets = [name.partition(".")[2] for name in base]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    (directory / ADAPTER_CONFIG_NAME).write_text(json.dumps(config))
    return directory


def merge(base: Path, adapter: Path, target: Path) -> Path:
    """The model that the adapter makes of its base."""
    write_base(target)
    tensors, changes = load_file(base / "model.safetensors"), load_file(adapter / ADAPTER_WEIGHTS_NAME)
    config = json.loads((adapter / ADAPTER_CONFIG_NAME).read_text())
    for name in list(tensors):
        at = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{at}.lora_A.weight" in changes:
            product = changes[f"{at}.lora_B.weight"] @ changes[f"{at}.lora_A.weight"]
            tensors[name] = tensors[name] + product * np.float32(config["lora_alpha"] / config["r"])
    save_file(tensors, target / "model.safetensors")
    return target
