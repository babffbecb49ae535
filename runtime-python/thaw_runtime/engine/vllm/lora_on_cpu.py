"""Products of a batch with its adapters on a CPU: one pair of products for each adapter and the rows that want it.

vLLM's own way on a CPU gathers the adapter's matrices once for every *token*, which takes gigabytes for a long prompt.
It also takes the last slot's adapter for the rows of the base model, because their slot is -1.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class GroupedLora(PunicaWrapperCPU):
    _groups: tuple[tuple[int, torch.Tensor], ...] = ()
    """The slots of a batch, and the rows of each.  The rows of the base model are in none."""

    def update_metadata(self, *args: Any, **more: Any) -> None:
        super().update_metadata(*args, **more)
        slots = self.token_lora_indices
        self._groups = tuple((s, (slots == s).nonzero()[:, 0]) for s in sorted(set(slots.tolist())) if s >= 0)

    def add_lora_linear(
        self,
        y: torch.Tensor,  # (T, sum of output_slices)
        x: torch.Tensor,  # (T, width)
        lora_a_stacked: tuple[torch.Tensor, ...],  # each (slots, 1, rank, width)
        lora_b_stacked: tuple[torch.Tensor, ...],  # each (slots, 1, slice, rank)
        scale: float,
        output_slices: tuple[int, ...],
        **more: Any,
    ) -> None:
        for slot, rows in self._groups:
            given, begin = x[rows], 0
            for down, up, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                added = (given @ down[slot, 0].T) @ up[slot, 0].T
                y[rows, begin : begin + width] += added.to(y.dtype) * scale
                begin += width


GROUPED = f"{__name__}.{GroupedLora.__name__}"
