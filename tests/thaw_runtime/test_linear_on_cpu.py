"""Products with bfloat16 weights on a processor that has no instructions for them, compared with exact ones."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from thaw_runtime.engine.vllm import linear_on_cpu

WIDTH = 96


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (3,), (4,), (300,), (2, 5)])
@pytest.mark.parametrize("n_columns", [1, 64, 2730, 5461])
def test_a_product_is_the_exact_one_rounded_once(shape: tuple[int, ...], n_columns: int, with_bias: bool) -> None:
    """A block holds 2,730 columns of this width: fewer, one whole block, and two with a column more."""
    draw = torch.Generator().manual_seed(n_columns)
    x = torch.randn(*shape, WIDTH, generator=draw).bfloat16()
    weight = torch.randn(n_columns, WIDTH, generator=draw).bfloat16()
    bias = torch.randn(n_columns, generator=draw).bfloat16() if with_bias else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    found = linear_on_cpu.linear(x, weight, bias)
    assert (found.dtype, found.shape) == (torch.bfloat16, (*shape, n_columns))
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    "error", [None, RuntimeError("could not create a primitive"), AttributeError("create_onednn_mm")]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("on_amx", [False, True], ids=["", "AMX"])
def test_only_layers_for_which_vllm_has_no_kernel_are_changed(
    dtype: torch.dtype, error: Exception | None, on_amx: bool
) -> None:
    """vLLM's own predicate says which layers its kernel on AMX takes; that kernel may leave a layer its weight."""
    operators = SimpleNamespace(create_onednn_mm=Mock(side_effect=error))
    takes = Mock(return_value=on_amx)
    layers = SimpleNamespace(dispatch_cpu_unquantized_gemm=prepare, ops=operators, check_cpu_sgl_kernel=takes)
    linear_on_cpu.install(layers)
    matrix, filters, missing = (
        SimpleNamespace(weight=torch.zeros(*shape, dtype=dtype, device=device))
        for shape, device in (((8, 4), "cpu"), ((8, 1, 4), "cpu"), ((8, 4), "meta"))
    )
    for layer in (matrix, filters, missing):
        layers.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    is_ours = error is not None and dtype is torch.bfloat16 and not on_amx
    assert [call.args for call in takes.call_args_list] == [(8, 4, dtype)] * (
        error is not None and dtype is torch.bfloat16
    )
    assert matrix.cpu_linear == (linear_on_cpu.linear if is_ours else "vLLM's, True")
    assert (filters.cpu_linear, missing.cpu_linear) == ("vLLM's, True", "vLLM's, True")


def test_a_layer_that_is_not_prepared_computes_as_fast_as_those_that_are() -> None:
    ours, vllms = SimpleNamespace(cpu_linear=linear_on_cpu.linear), SimpleNamespace(cpu_linear="vLLM's")
    weight, filters = torch.zeros(8, 4, dtype=torch.bfloat16), torch.zeros(8, 1, 4, dtype=torch.bfloat16)
    assert linear_on_cpu.product_like([vllms, ours], weight) is linear_on_cpu.linear
    assert linear_on_cpu.product_like([vllms, ours], filters) is torch.nn.functional.linear
    assert linear_on_cpu.product_like([vllms, ours], weight.float()) is torch.nn.functional.linear
    assert linear_on_cpu.product_like([vllms], weight) is torch.nn.functional.linear


def prepare(layer: SimpleNamespace, remove_weight: bool) -> None:
    layer.cpu_linear = f"vLLM's, {remove_weight}"
