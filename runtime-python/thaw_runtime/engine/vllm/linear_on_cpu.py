"""Products of a prompt with bfloat16 weights, for processors that lack its instructions (most without AVX-512).

vLLM has no kernel for them and leaves the product to torch, which computes it element by element.  For a prompt it is
faster to turn the weights into float32, block by block so that each fits the processor's cache, and to use torch's
product of float32.  The rows of a decode step are too few for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

_FEW_ROWS: Final = 4
"""From this number of rows on, the conversion of the weights takes less time than it saves."""
_BLOCK: Final = 1 << 18
"""Elements of a block of weights: 1 MiB of float32."""
_ROWS_AT_ONCE: Final = 256
"""This keeps the float32 copies of a long prompt's rows within the plan's part for workspaces (docs/kv-memory.md)."""


def install(layers: Any) -> None:
    """Let each layer compute its prompts so that vLLM prepares from now on and for which it has no kernel here.

    ``layers``: the module vllm.model_executor.layers.utils.  vLLM has two kernels on x86: oneDNN's, which a processor
    has for every layer or for none, and one on AMX, which it takes for layers of some sizes.
    """
    if has_kernel(layers.ops):
        return
    prepare_as_vllm = layers.dispatch_cpu_unquantized_gemm

    def prepare(layer: Any, remove_weight: bool) -> None:
        is_ours = fits(layer.weight) and not layers.check_cpu_sgl_kernel(*layer.weight.shape, layer.weight.dtype)
        prepare_as_vllm(layer, remove_weight)
        if is_ours:
            layer.cpu_linear = linear

    layers.dispatch_cpu_unquantized_gemm = prepare


def fits(weight: torch.Tensor) -> bool:
    """Return True if :func:`linear` takes ``weight``."""
    return weight.ndim == 2 and weight.dtype == torch.bfloat16 and not weight.is_meta


def product_like(prepared: Iterable[Any], weight: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return a product for a layer that vLLM has not prepared yet, as fast as that of the layers that it has."""
    is_ours = fits(weight) and any(layer.cpu_linear is linear for layer in prepared)
    return linear if is_ours else torch.nn.functional.linear


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, as ``torch.nn.functional.linear`` does.

    ``x``: (…, width), ``weight``: (n_columns, width), ``bias``: (n_columns,), all of bfloat16.
    """
    n_columns, width = weight.shape
    if x.numel() < _FEW_ROWS * width:
        return torch.nn.functional.linear(x, weight, bias)
    rows, n_at_once = x.reshape(-1, width), max(1, _BLOCK // width)
    product = x.new_empty(len(rows), n_columns)
    for some, found in zip(rows.split(_ROWS_AT_ONCE), product.split(_ROWS_AT_ONCE), strict=True):
        wide = some.float()
        for begin in range(0, n_columns, n_at_once):
            part = slice(begin, begin + n_at_once)
            added = bias[part].float() if bias is not None else None
            found[:, part] = torch.nn.functional.linear(wide, weight[part].float(), added)
    return product.view(*x.shape[:-1], n_columns)


def has_kernel(operators: Any) -> bool:
    """Return True if oneDNN multiplies by bfloat16 weights on this processor.  ``operators``: vllm._custom_ops."""
    try:
        operators.create_onednn_mm(torch.zeros(16, 16, dtype=torch.bfloat16).t(), 1)  # as vLLM calls it
    except (RuntimeError, AttributeError):  # the processor has no such instructions, or this build no such kernels
        return False
    return True
