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
    rows: torch.Tensor  # (n,) in the order of their slots
    places: torch.Tensor | None  # (n,) the place of each row; None: every place has its row


def few_of(slots: Sequence[int]) -> Few | None:
    """Return the rows of a batch for one pair of products, or None if they are better computed slot by slot.

    ``slots``: the slot of each row, -1 for a row of the base model.
    """
    rows = sorted((row for row, slot in enumerate(slots) if slot >= 0), key=lambda row: slots[row])
    counts = Counter(slots[row] for row in rows)
    if len(counts) < 2 or len(rows) > _FEW_ROWS * len(counts):
        return None
    begin, end, depth = min(counts), max(counts) + 1, max(counts.values())
    if (end - begin) * depth > _FEW_ROWS * len(rows):
        return None
    within = Counter[int]()
    places = []
    for row in rows:
        places.append((slots[row] - begin) * depth + within[slots[row]])
        within[slots[row]] += 1
    is_full = len(rows) == (end - begin) * depth
    return Few(begin, end, depth, torch.tensor(rows), None if is_full else torch.tensor(places))


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
    n_slots, given, begin = few.end - few.begin, x[few.rows], 0
    if few.places is not None:
        given = x.new_zeros(n_slots * few.depth, x.shape[1]).index_copy_(0, few.places, given)
    given = given.view(n_slots, few.depth, -1)
    for down, up, width in parts:
        shrunk = torch.bmm(given, down[few.begin : few.end, 0].transpose(1, 2))  # (slots, depth, rank)
        added = torch.bmm(shrunk, up[few.begin : few.end, 0].transpose(1, 2)).flatten(0, 1)  # (places, slice)
        added = added if few.places is None else added[few.places]
        y[:, begin : begin + width].index_add_(0, few.rows, added.to(y.dtype), alpha=scale)
        begin += width


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on this thread alone: the products of few rows take microseconds, and each would wait for threads that
    other processes keep from their cores."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


GROUPED = f"{__name__}.{GroupedLora.__name__}"
