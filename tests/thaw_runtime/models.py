"""Checkpoints for these tests: a tiny one that is made here, and the small real model, which is downloaded once."""

from __future__ import annotations

import json
from pathlib import Path

import platformdirs

from relay.clients.fetch import DescriptorClient
from relay.protocol.segment import SegmentReader
from tests.thaw_runtime.fake_descriptor_socket import FakeDescriptorSocket
from thaw.dev import smollm2

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def real_model() -> Path:
    return smollm2.obtain(Path(platformdirs.user_cache_dir("thaw")) / "models")


def byte_characters() -> list[str]:
    """The printable stand-ins of GPT-2's byte-level alphabet, in order of the byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def write_tiny_model(directory: Path) -> Path:
    """Write a checkpoint whose tokens are the 256 bytes and ``<end>``.  Its weights are 1 KiB and mean nothing."""
    directory.mkdir(parents=True, exist_ok=True)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
        "added_tokens": [
            {
                "id": 256,
                "content": "<end>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "merges": [],
            "vocab": {c: i for i, c in enumerate(byte_characters())} | {"<end>": 256},
        },
    }
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 257, "eos_token_id": 256}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<end>"}))
    header = json.dumps({"w": {"dtype": "F32", "shape": [256], "data_offsets": [0, 1024]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(1024))
    return directory


def read_segment(descriptor_socket: FakeDescriptorSocket) -> tuple[DescriptorClient, SegmentReader]:
    client = DescriptorClient.connect(descriptor_socket.path)
    return client, client.segment(deadline_s=10)
