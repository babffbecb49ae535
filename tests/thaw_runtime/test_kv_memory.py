"""The KV cache gets what weights and the worst batch leave, in whole blocks."""

from __future__ import annotations

from typing import Any

import pytest

from thaw.errors import MemoryTooSmall, ModelUnsupported
from thaw_runtime.kv_memory import (
    GPU,
    Geometry,
    geometry,
    kv_bytes_per_token,
    layer_count,
    packed_head_bytes,
    peak_intermediate_bytes,
    plan_memory,
)

SMOLLM2: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "num_hidden_layers": 30, "vocab_size": 49152,
}  # fmt: skip
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257}


def shape() -> Geometry:
    return geometry(SMOLLM2, 30)


def plan(reserve: int, **changes: Any) -> Any:
    settings = {"weights": 269_030_016, "shape": shape(), "dtype": "bfloat16", "max_num_batched_tokens": 2048,
                "max_num_seqs": 8, "max_model_len": 2048, "block_size": 128} | changes  # fmt: skip
    return plan_memory(reserve=reserve, **settings)


def test_a_token_takes_a_key_and_a_value_in_every_layer() -> None:
    assert kv_bytes_per_token(shape(), "bfloat16") == 2 * 30 * 3 * 64 * 2
    assert kv_bytes_per_token(shape(), "float32") == 2 * kv_bytes_per_token(shape(), "bfloat16")


def test_the_slices_add_up_to_the_reserve_but_for_less_than_a_block() -> None:
    for reserve in range(600 << 20, 1200 << 20, 37 << 20):
        made = plan(reserve)
        left = reserve - made.weights - made.intermediates - made.kv
        assert 0 <= left < 128 * kv_bytes_per_token(shape(), "bfloat16")
        assert made.kv_tokens == made.kv // kv_bytes_per_token(shape(), "bfloat16") - 128


def test_a_reserve_that_is_too_small_says_what_is_needed_and_what_there_is() -> None:
    with pytest.raises(MemoryTooSmall) as caught:
        plan(300 << 20)
    assert "needs 470 MiB (311 weights, " in caught.value.message
    assert "the worker has 300 MiB" in caught.value.message
    assert "gpu_memory_mb to at least 470" in caught.value.hint
    assert plan(470 << 20).kv_tokens >= 2048


def test_a_larger_batch_never_leaves_more() -> None:
    sizes = [peak_intermediate_bytes(shape(), "bfloat16", tokens, 8) for tokens in (1, 128, 2048, 8192)]
    assert sizes == sorted(sizes)
    assert peak_intermediate_bytes(shape(), "bfloat16", 128, 256) > peak_intermediate_bytes(shape(), "bfloat16", 128, 8)


def test_a_stage_without_the_head_needs_no_room_for_logits() -> None:
    middle = geometry(SMOLLM2, 8, last_stage=False)
    assert peak_intermediate_bytes(middle, "bfloat16", 64, 256) < peak_intermediate_bytes(shape(), "bfloat16", 64, 256)


def test_a_cpu_holds_the_head_twice() -> None:
    head = 49152 * 576 * 2
    assert packed_head_bytes(shape(), "bfloat16") == head
    assert plan(1 << 30).weights == 269_030_016 + head
    assert plan(1 << 30, device=GPU).weights == 269_030_016


def test_other_families_names_are_understood() -> None:
    found = geometry(GPT2, 12)
    assert (found.hidden, found.intermediate, found.kv_heads, found.head_dim) == (768, 3072, 12, 64)
    assert layer_count(GPT2) == 12


def test_a_config_without_dimensions_is_unsupported() -> None:
    with pytest.raises(ModelUnsupported, match="none of hidden_size"):
        geometry({"architectures": ["Strange"]}, 1)
