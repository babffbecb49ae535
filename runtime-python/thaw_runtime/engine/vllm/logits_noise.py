"""Noise on the logits, as large as rounding, so that a test sees what another processor may compute (for tests only).

Processors round the same model differently: they add in another order, and some have no instructions for bfloat16.
Two tokens that are nearly equally likely then change places.  An answer that a test expects must not depend on that,
and the noise shows where it does.  It is a function of the seed and of what is computed: the same batch gives the same
noise again, as a processor gives the same rounding, and another batch, another prefix or another stage gives other
noise.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch


def add_noise(model: torch.nn.Module, seed: int) -> None:
    """Let ``model.compute_logits`` return each logit with an error of at most half a unit in the last place of the
    model's type, as if it had been rounded to that type."""
    compute: Any = model.compute_logits
    n_tokens = 0

    def note(module: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
        nonlocal n_tokens
        n_tokens = int(given["positions"].shape[-1]) if "positions" in given else int(args[1].shape[-1])

    def compute_logits(hidden_states: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor | None:
        logits: torch.Tensor | None = compute(hidden_states, *more, **named)
        if logits is None:
            return None
        return logits.addcmul(logits, relative_noise(hidden_states, logits.shape[-1], seed, n_tokens).to(logits.dtype))

    model.register_forward_pre_hook(note, with_kwargs=True)
    model.compute_logits = compute_logits


def relative_noise(hidden_states: torch.Tensor, n_logits: int, seed: int, n_tokens: int) -> torch.Tensor:
    """Return (n_rows, n_logits) of float32, evenly between ± half of the type's epsilon.

    ``hidden_states``: (n_rows, width), of the last layer; ``n_tokens``: of the whole batch.
    """
    half = torch.finfo(hidden_states.dtype).eps / 2
    of_batch = zlib.crc32(f"{seed} {n_tokens}".encode())
    noise = torch.empty(len(hidden_states), n_logits)
    for row, drawn in zip(hidden_states.detach().cpu(), noise, strict=True):
        of_row = zlib.crc32(row.contiguous().view(torch.uint8).numpy().tobytes(), of_batch)
        drawn.uniform_(-half, half, generator=torch.Generator().manual_seed(of_row))
    return noise.to(hidden_states.device)
