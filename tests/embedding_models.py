"""Tiny embedding models with random weights, as sentence-transformers saves them: a decoder and an encoder.

Their tokens are bytes.  Each reads a text differently: the decoder takes the vector of the last token, which is a
special one, and has shorter vectors; the encoder lowers the text and takes the mean.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.thaw_runtime.models import byte_characters

HIDDEN, LAYERS, VOCAB, POSITIONS, INNER = 64, 2, 264, 128, 128
FAMILIES = ("qwen3", "bert")
MODULES = ("Transformer", "Pooling", "Normalize")
Shapes = dict[str, tuple[int, ...]]


def write_model(directory: Path, family: str, *, seed: int = 0) -> Path:
    """Write a model of this family.  ``seed`` is the seed of its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config, shapes, pooling = _QWEN3 if family == "qwen3" else _BERT
    _write(directory / "config.json", config)
    _write(directory / "tokenizer.json", _tokenizer(family))
    special = {"eos_token": "<end>", "pad_token": "<pad>"}
    _write(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(MODULES, paths, strict=True))
    ]
    _write(directory / "modules.json", modules)
    (directory / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens", "lasttoken")}
    _write(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": HIDDEN, **modes})
    _write(
        directory / "sentence_bert_config.json", {"max_seq_length": POSITIONS - 28, "do_lower_case": family == "bert"}
    )
    _write_weights(directory / "model.safetensors", shapes, random.Random(seed))
    return directory


def _write(path: Path, plain: Any) -> None:
    path.write_text(json.dumps(plain))


def _write_weights(path: Path, shapes: Shapes, draws: random.Random) -> None:
    header: dict[str, Any] = {}
    data = bytearray()
    for name, shape in shapes.items():
        n = math.prod(shape)
        is_norm = "norm" in name.lower() and name.endswith("weight")
        values = [1.0 + draws.gauss(0, 0.1) if is_norm else draws.gauss(0, 0.2) for _ in range(n)]
        begin = len(data)
        data += struct.pack(f"<{n}f", *values)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _tokenizer(family: str) -> dict[str, Any]:
    special = {"<end>": 256, "<pad>": 257, "[CLS]": 258, "[SEP]": 259}
    before, after = ([], ["<end>"]) if family == "qwen3" else (["[CLS]"], ["[SEP]"])
    pieces = [{"SpecialToken": {"id": name, "type_id": 0}} for name in before]
    pieces += [{"Sequence": {"id": "A", "type_id": 0}}]
    pieces += [{"SpecialToken": {"id": name, "type_id": 0}} for name in after]
    used = {name: {"id": name, "ids": [special[name]], "tokens": [name]} for name in (*before, *after)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    template: Mapping[str, Any] = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": used,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": template,
        "decoder": byte_level,
        "added_tokens": [
            {
                "id": i,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for name, i in special.items()
        ],
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "merges": [],
            "vocab": {c: i for i, c in enumerate(byte_characters())} | special,
        },
    }


def _qwen3_shapes() -> Shapes:
    found: Shapes = {"embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        at = f"layers.{i}."
        found |= {
            f"{at}input_layernorm.weight": (HIDDEN,),
            f"{at}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{at}self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
            f"{at}self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
            f"{at}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{at}self_attn.q_norm.weight": (32,),
            f"{at}self_attn.k_norm.weight": (32,),
            f"{at}post_attention_layernorm.weight": (HIDDEN,),
            f"{at}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{at}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, INNER),
        }
    return found | {"norm.weight": (HIDDEN,)}


def _bert_shapes() -> Shapes:
    def dense(name: str, out: int, into: int) -> Shapes:
        return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}

    def norm(name: str) -> Shapes:
        return {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}

    found: Shapes = {
        "embeddings.word_embeddings.weight": (VOCAB, HIDDEN),
        "embeddings.position_embeddings.weight": (POSITIONS, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
        **norm("embeddings.LayerNorm"),
    }
    for i in range(LAYERS):
        at = f"encoder.layer.{i}."
        for part in ("query", "key", "value"):
            found |= dense(f"{at}attention.self.{part}", HIDDEN, HIDDEN)
        found |= dense(f"{at}attention.output.dense", HIDDEN, HIDDEN) | norm(f"{at}attention.output.LayerNorm")
        found |= dense(f"{at}intermediate.dense", INNER, HIDDEN) | dense(f"{at}output.dense", HIDDEN, INNER)
        found |= norm(f"{at}output.LayerNorm")
    return found


_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": POSITIONS,
    "torch_dtype": "float32",
}
_QWEN3 = (
    {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "is_matryoshka": True,
        "eos_token_id": 256,
    },
    _qwen3_shapes(),
    "lasttoken",
)
_BERT = (
    {
        **_COMMON,
        "architectures": ["BertModel"],
        "model_type": "bert",
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "pad_token_id": 257,
    },
    _bert_shapes(),
    "mean_tokens",
)
