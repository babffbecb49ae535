"""A layer keeps the kernels of few sizes of a batch."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock, call

from thaw_runtime.engine import kv_memory
from thaw_runtime.engine.vllm import env, kept_kernels


def test_a_layer_keeps_the_kernels_of_no_more_sizes_than_the_bound() -> None:
    create = Mock()
    layers = SimpleNamespace(ops=SimpleNamespace(create_onednn_mm=create))
    kept_kernels.install(layers)
    layers.ops.create_onednn_mm("weight", 32)  # as vLLM calls it
    layers.ops.create_onednn_mm("weight", 1)
    layers.ops.create_onednn_mm("weight")
    assert create.mock_calls == [call("weight", n) for n in (kept_kernels.SIZES, 1, kept_kernels.SIZES)]


def test_a_build_without_such_kernels_is_left_as_it_is() -> None:
    layers = SimpleNamespace(ops=SimpleNamespace())
    kept_kernels.install(layers)
    assert not vars(layers.ops)


def test_onednn_keeps_as_many_kernels_as_the_plan_counts_and_the_layers_keep_fewer() -> None:
    assert env.FIXED["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == str(kv_memory.KERNELS)
    assert 5 * kept_kernels.SIZES < kv_memory.KERNELS
