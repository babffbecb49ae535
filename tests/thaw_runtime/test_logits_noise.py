"""The noise on logits with which the tests' engines compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thaw_runtime.engine.vllm.logits_noise import add_noise, relative_noise

N_LOGITS = 512


class Model(torch.nn.Module):
    """It multiplies its hidden states by a fixed matrix, as a language model's head does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = torch.randn(8, N_LOGITS, generator=torch.Generator().manual_seed(1)).to(dtype)

    def forward(self, input_ids: Any, positions: Any) -> Any:
        return self.head.T[positions % N_LOGITS]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return (hidden_states @ self.head).float()


def logits(seed: int | None, n_tokens: int = 3, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    model = Model(dtype)
    if seed is not None:
        add_noise(model, seed)
    hidden_states = model(input_ids=None, positions=torch.arange(n_tokens))
    return model.compute_logits(hidden_states[-1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_logit_is_off_by_at_most_half_a_unit_of_the_models_type(dtype: torch.dtype) -> None:
    exact = logits(None, dtype=dtype)
    relative = ((logits(7, dtype=dtype) - exact) / exact).abs().max().item()
    half = torch.finfo(dtype).eps / 2
    assert 0.9 * half < relative < half + 2**-23  # the sum is rounded to float32


def test_the_same_batch_has_the_same_noise_and_another_seed_batch_or_row_another() -> None:
    assert torch.equal(logits(7), logits(7))
    assert not torch.equal(logits(7), logits(8))
    rows = torch.ones(2, 8, dtype=torch.bfloat16)
    first = relative_noise(rows, N_LOGITS, seed=7, n_tokens=2)
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first, relative_noise(rows, N_LOGITS, seed=7, n_tokens=3))
    assert not torch.equal(first, relative_noise(rows * 2, N_LOGITS, seed=7, n_tokens=2))


def test_a_stage_without_logits_has_none() -> None:
    model = Model(torch.bfloat16)
    model.compute_logits = lambda hidden_states: None  # type: ignore[assignment]
    add_noise(model, 7)
    assert model.compute_logits(torch.ones(1, 8)) is None
