"""The KV cache gets the memory that weights and the largest batch leave, in whole blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from thaw.errors import MemoryTooSmall, ModelUnsupported
from thaw_runtime.engine.kv_memory import (
    GPU,
    BatchLimits,
    Geometry,
    StageMemory,
    State,
    geometry,
    held_bytes,
    kv_bytes_per_token,
    layer_count,
    packed_head_bytes,
    peak_intermediate_bytes,
    plan_stage,
    relayed_bytes,
)

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257}


def shape() -> Geometry:
    return geometry(SMOLLM2, 30)


def plan(reserve: int, **changes: Any) -> Any:
    """The memory plan of a whole model."""
    settings = {
        "weights": 269_030_016,
        "shape": shape(),
        "dtype": "bfloat16",
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 8,
        "max_model_len": 2048,
        "block_size": 128,
    } | changes
    memory = StageMemory(reserve, settings.pop("weights"), settings.pop("shape"))
    return plan_stage(0, (memory,), BatchLimits(**settings))


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
    assert "needs 518 MiB (311 weights, " in caught.value.message
    assert "the worker has 300 MiB" in caught.value.message
    assert "gpu_memory_mb to at least 518" in caught.value.hint
    assert plan(518 << 20).kv_tokens >= 2048


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


def test_an_encoder_needs_no_memory_for_keys_and_values() -> None:
    """Its whole text is one batch, and nothing of it is read again."""
    encoder = geometry(SMOLLM2, 30, last_stage=False, keeps_kv=False)
    decoder = geometry(SMOLLM2, 30, last_stage=False)
    made = plan(1 << 30, shape=encoder)
    assert (made.kv, made.kv_tokens, made.kv_blocks) == (0, 0, 0)
    assert (made.weights, made.intermediates) == (269_030_016, plan(1 << 30, shape=decoder).intermediates)
    assert plan(made.weights + made.intermediates, shape=encoder) == replace(
        made, reserve=made.weights + made.intermediates
    )
    with pytest.raises(MemoryTooSmall):
        plan(made.weights + made.intermediates, shape=decoder)


def test_an_encoder_that_has_too_little_memory_is_told_of_no_keys_and_values() -> None:
    encoder = geometry(SMOLLM2, 30, last_stage=False, keeps_kv=False)
    with pytest.raises(MemoryTooSmall) as caught:
        plan(300 << 20, shape=encoder)
    assert caught.value.message == (
        "the model needs 377 MiB (257 weights, 121 intermediates) and the worker has 300 MiB"
    )
    assert "gpu_memory_mb to at least 377" in caught.value.hint


def test_other_families_names_are_understood() -> None:
    found = geometry(GPT2, 12)
    assert (found.hidden, found.intermediate, found.kv_heads, found.head_dim) == (768, 3072, 12, 64)
    assert layer_count(GPT2) == 12


def test_a_config_without_dimensions_is_unsupported() -> None:
    with pytest.raises(ModelUnsupported, match="none of hidden_size"):
        geometry({"architectures": ["Strange"]}, 1)


# ── pipelines ─────────────────────────────────────────────────────────────────────────────────────────────────────

LIMITS = BatchLimits("bfloat16", 512, 8, 2048, 128)


def stages(*layers: int, reserve: int = 600 << 20) -> list[StageMemory]:
    """The memory of SmolLM2's stages with these numbers of layers.  Each has 70 MB of weights."""
    shapes = [geometry(SMOLLM2, n, last_stage=i == len(layers) - 1) for i, n in enumerate(layers)]
    return [StageMemory(reserve, 70_000_000, shape) for shape in shapes]


def test_every_stage_computes_the_same_number_of_blocks() -> None:
    for layers in ((15, 15), (9, 8, 8, 5), (4, 4, 4, 4, 4, 4, 4, 2)):
        plans = [plan_stage(k, stages(*layers), LIMITS) for k in range(len(layers))]
        assert len({(p.kv_blocks, p.kv_tokens) for p in plans}) == 1
        for made, n in zip(plans, layers, strict=True):
            assert made.kv == made.kv_blocks * 128 * kv_bytes_per_token(geometry(SMOLLM2, n), "bfloat16")
            assert made.weights + made.intermediates + made.kv <= made.reserve


def test_the_scarcest_stage_decides() -> None:
    even = stages(15, 15)
    alone = [plan_stage(k, even, LIMITS).kv_blocks for k in range(2)]
    scarce = [even[0], StageMemory(300 << 20, even[1].weights, even[1].shape)]
    assert plan_stage(0, scarce, LIMITS).kv_blocks < alone[0]
    assert plan_stage(0, scarce, LIMITS).kv_blocks == plan_stage(1, scarce, LIMITS).kv_blocks


def test_too_little_memory_in_one_stage_is_said_by_all_alike() -> None:
    scarce = [*stages(15), StageMemory(120 << 20, 70_000_000, geometry(SMOLLM2, 15))]
    messages = []
    for stage in range(2):
        with pytest.raises(MemoryTooSmall, match="stage 1 of the model needs") as caught:
            plan_stage(stage, scarce, LIMITS)
        messages.append(caught.value.message)
    assert len(set(messages)) == 1


def test_batches_on_their_way_have_room_only_where_there_are_stages() -> None:
    assert relayed_bytes(shape(), "bfloat16", 512, 1) == 0
    assert relayed_bytes(shape(), "bfloat16", 512, 4) == 6 * 512 * 2 * 576 * 2


def test_a_stage_of_a_pipeline_leaves_room_for_the_batches_on_their_way() -> None:
    """Its intermediates are those of a model with one stage, plus the relayed bytes.  Both reduce its blocks."""
    memory = stages(15)[0]
    alone = peak_intermediate_bytes(memory.shape, LIMITS.dtype, LIMITS.max_num_batched_tokens, LIMITS.max_num_seqs)
    assert plan_stage(0, (memory,), LIMITS).intermediates == alone
    for n_stages in (2, 4):
        made = plan_stage(0, (memory,) * n_stages, LIMITS)
        relayed = relayed_bytes(memory.shape, LIMITS.dtype, LIMITS.max_num_batched_tokens, n_stages)
        assert relayed > 0
        assert made.intermediates == alone + relayed
        assert made.weights + made.intermediates + made.kv <= made.reserve


def test_weights_are_counted_in_the_engines_dtype_and_never_too_few() -> None:
    assert held_bytes(100, {"torch_dtype": "bfloat16"}, "float32") == 200
    assert held_bytes(100, {"dtype": "float32"}, "bfloat16") == 50
    assert held_bytes(100, {"text_config": {"torch_dtype": "float32"}}, "float32") == 100
    assert held_bytes(100, {}, "float32") == 200
    assert held_bytes(100, {"quantization_config": {}, "torch_dtype": "bfloat16"}, "float32") == 100


# ── models that keep a state ──────────────────────────────────────────────────────────────────────────────────────

MAMBA2 = {"model_type": "mamba2", "hidden_size": 768, "num_heads": 24, "num_hidden_layers": 24, "vocab_size": 50288}
A_STATE = State(width=1792, n_elements=24 * 64 * 128 + 1792 * 3)


def test_a_cache_of_states_gets_all_that_is_left_and_the_engine_counts_its_blocks() -> None:
    for reserve in range(700 << 20, 1200 << 20, 37 << 20):
        made = plan(reserve, shape=geometry(MAMBA2, 24, state=A_STATE))
        assert made.weights + made.intermediates + made.kv == reserve
        assert (made.kv_blocks, made.kv_tokens) == (0, 0)


def test_a_step_holds_three_copies_of_the_states_of_its_requests_and_the_projections_of_its_tokens() -> None:
    def peak(tokens: int, requests: int, state: State | None) -> int:
        return peak_intermediate_bytes(geometry(SMOLLM2, 30, state=state), "bfloat16", tokens, requests)

    assert peak(512, 8, A_STATE) - peak(512, 0, A_STATE) - (peak(512, 8, None) - peak(512, 0, None)) == (
        3 * 3 * 8 * A_STATE.n_elements * 4
    )
    wide = replace(A_STATE, width=10 * A_STATE.width)
    assert peak(512, 8, wide) - peak(512, 8, A_STATE) == 3 * 512 * 6 * 9 * A_STATE.width * 2


def test_a_reserve_without_room_for_the_weights_of_such_a_model_says_so() -> None:
    with pytest.raises(MemoryTooSmall, match=r"the model needs \d+ MiB \(\d+ weights, \d+ intermediates\) and"):
        plan(300 << 20, shape=geometry(MAMBA2, 24, state=A_STATE))


def test_a_model_without_attention_needs_no_number_of_heads() -> None:
    plain = {"hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50288}
    assert geometry(plain, 24, state=A_STATE).state == A_STATE
    with pytest.raises(ModelUnsupported, match="num_attention_heads"):
        geometry(plain, 24)


@pytest.mark.parametrize("name", ["layers_block_type", "layer_types"])
def test_layers_are_counted_by_their_kinds_where_no_number_says_how_many(name: str) -> None:
    assert layer_count({name: ["mamba", "attention", "mlp"]}) == 3
    assert layer_count({name: ["mamba"], "num_hidden_layers": 7}) == 7
