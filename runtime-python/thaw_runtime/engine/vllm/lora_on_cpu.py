"""Products of a batch with its adapters on a CPU: a pair of products for each adapter and the rows that want it.

vLLM's own way on a CPU gathers the adapter's matrices once for every *token*, which takes gigabytes for a long prompt.
It also takes the last slot's adapter for the rows of the base model, because their slot is -1.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

_FEW_ROWS: Final = 4
"""The number of rows per adapter up to which all rows are computed in one call.  A decode step has one row for each
request, so calling kernels costs more than copying the matrices."""


class GroupedLora(PunicaWrapperCPU):
    _groups: tuple[tuple[int, torch.Tensor], ...] = ()
    """The slots of a batch, and the rows of each.  The rows of the base model are in none."""
    _few: tuple[torch.Tensor | slice, torch.Tensor] | None = None
    """All rows that want an adapter, and the slot of each, if they are few."""

    def update_metadata(self, *args: Any, **more: Any) -> None:
        super().update_metadata(*args, **more)
        slots = self.token_lora_indices
        used = sorted({slot for slot in slots.tolist() if slot >= 0})
        rows = (slots >= 0).nonzero()[:, 0]
        self._groups, self._few = (), None
        if len(used) > 1 and len(rows) <= _FEW_ROWS * len(used):
            self._few = (slice(None) if len(rows) == len(slots) else rows), slots[rows]
        else:
            self._groups = tuple((slot, (slots == slot).nonzero()[:, 0]) for slot in used)

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
        parts = tuple(zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True))
        if self._few is not None:
            rows, slots = self._few
            given, begin = x[rows].unsqueeze(-1), 0
            for down, up, width in parts:
                added = torch.bmm(up[slots, 0], torch.bmm(down[slots, 0], given))[:, :, 0]
                y[rows, begin : begin + width] += added.to(y.dtype) * scale
                begin += width
        for slot, of_slot in self._groups:
            given, begin = x[of_slot], 0
            for down, up, width in parts:
                added = (given @ down[slot, 0].T) @ up[slot, 0].T
                y[of_slot, begin : begin + width] += added.to(y.dtype) * scale
                begin += width


GROUPED = f"{__name__}.{GroupedLora.__name__}"
