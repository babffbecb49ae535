"""What the initializer writes is a checkpoint that transformers opens: the library that KServe's servers read with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kserve.harness import ModelPortProcess, load
from thaw.cli.model_stores import checkpoints
from thaw.cli.model_stores.stores import open_store

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


@pytest.mark.vllm
def test_transformers_computes_the_same_with_it(port: ModelPortProcess, key: str, tmp_path: Path, store: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    made.save_pretrained(tmp_path / "made", max_shard_size="10MB")
    assert len(list((tmp_path / "made").glob("model-*.safetensors"))) > 1
    checkpoints.push(tmp_path / "made", open_store("s3://models/real"), lambda _: None)
    status, printed = load(port.url, key, "thaw://real", str(tmp_path / "m"))
    assert status == 0, printed
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    tokens = torch.arange(40).reshape(1, -1)
    with torch.no_grad():
        assert torch.equal(read(tokens).logits, made(tokens).logits)
