"""Products of a batch with its adapters on a CPU: a pair of products for each adapter and the rows that want it.

vLLM's own way on a CPU gathers the adapter's matrices once for every *token*, which takes gigabytes for a long prompt.
It also takes the last slot's adapter for the rows of the base model, because their slot is -1.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import set_num_threads  # vLLM's worker replaces torch.set_num_threads by a function that only warns
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

_FEW_ROWS: Final = 4
"""The number of rows per adapter up to which the rows of all adapters are computed by one pair of products.  A decode
step has one row for each request, so calling kernels takes longer than computing."""


class Few(NamedTuple):
    """A few rows of several adapters, for products with the matrices of all slots from ``begin`` to ``end``.

    The slots of a model are stacked, so a range of them is a view: no matrix is copied.  Each slot of the range gets
    ``depth`` places for rows; places without a row hold zeros.
    """

    begin: int
    end: int
    depth: int
    rows: torch.Tensor | None  # (n,) in the order of the batch; None: all rows of the batch
    places: torch.Tensor  # (n,) the place of each row
    row_at: torch.Tensor | None  # (places,) the row of each place; None: some places have no row


def few_of(slots: Sequence[int]) -> Few | None:
    """Return the rows of a batch for one pair of products, or None if they are better computed slot by slot.

    ``slots``: the slot of each row, -1 for a row of the base model.
    """
    rows = [row for row, slot in enumerate(slots) if slot >= 0]
    counts = Counter(slots[row] for row in rows)
    if len(counts) < 2 or len(rows) > _FEW_ROWS * len(counts):
        return None
    begin, end, depth = min(counts), max(counts) + 1, max(counts.values())
    n_places = (end - begin) * depth
    if n_places > _FEW_ROWS * len(rows):
        return None
    taken, places = Counter[int](), []
    for row in rows:
        places.append((slots[row] - begin) * depth + taken[slots[row]])
        taken[slots[row]] += 1
    row_at = [row for _, row in sorted(zip(places, rows, strict=True))] if n_places == len(rows) else None
    return Few(
        begin,
        end,
        depth,
        None if len(rows) == len(slots) else torch.tensor(rows),
        torch.tensor(places),
        None if row_at is None else torch.tensor(row_at),
    )


class GroupedLora(PunicaWrapperCPU):
    _groups: tuple[tuple[int, torch.Tensor], ...] = ()
    """The slots of a batch, and the rows of each.  The rows of the base model are in none."""
    _few: Few | None = None
    """All rows that want an adapter, if they are few."""

    def update_metadata(self, *args: Any, **more: Any) -> None:
        super().update_metadata(*args, **more)
        slots = self.token_lora_indices
        listed = slots.tolist()
        self._few = few_of(listed)
        used = [] if self._few is not None else sorted({slot for slot in listed if slot >= 0})
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
            with _one_thread():
                add_few(self._few, y, x, parts, scale)
        for slot, of_slot in self._groups:
            given, begin = x[of_slot], 0
            for down, up, width in parts:
                added = (given @ down[slot, 0].T) @ up[slot, 0].T
                y[of_slot, begin : begin + width] += added.to(y.dtype) * scale
                begin += width


def add_few(
    few: Few, y: torch.Tensor, x: torch.Tensor, parts: tuple[tuple[torch.Tensor, torch.Tensor, int], ...], scale: float
) -> None:
    """Add to ``y`` the products of the few rows of ``x`` with their adapters.  ``parts``: down, up and width of each
    output slice, with the shapes of ``GroupedLora.add_lora_linear``."""
    n_slots, begin = few.end - few.begin, 0
    if few.row_at is not None:
        given = x.index_select(0, few.row_at)
    else:
        mine = x if few.rows is None else x.index_select(0, few.rows)
        given = x.new_zeros(n_slots * few.depth, x.shape[1]).index_copy_(0, few.places, mine)
    given = given.view(n_slots, few.depth, -1)
    for down, up, width in parts:
        shrunk = torch.bmm(given, down[few.begin : few.end, 0].transpose(1, 2))  # (slots, depth, rank)
        grown = torch.bmm(shrunk, up[few.begin : few.end, 0].transpose(1, 2))  # (slots, depth, slice)
        added = grown.flatten(0, 1).index_select(0, few.places).to(y.dtype)
        out = y[:, begin : begin + width]
        if few.rows is None:
            out.add_(added, alpha=scale)
        else:
            out.index_add_(0, few.rows, added, alpha=scale)
        begin += width


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on this thread alone: the products of few rows take microseconds, and each would wait for threads that
    other processes keep from their cores."""
    n_threads = torch.get_num_threads()
    set_num_threads(1)
    try:
        yield
    finally:
        set_num_threads(n_threads)


GROUPED = f"{__name__}.{GroupedLora.__name__}"
