"""Products of a batch's rows with their adapters on a CPU, compared with one row after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.vllm
N_SLOTS, RANK, WIDTH, SLICES = 5, 3, 8, (6, 4)


@settings(max_examples=100, deadline=None)
@given(slots=st.lists(st.integers(-1, N_SLOTS - 1), min_size=1, max_size=24))
def test_rows_computed_together_get_what_each_gets_alone(slots: list[int]) -> None:
    from thaw_runtime.engine.vllm.lora_on_cpu import add_few, few_of

    few = few_of(slots)
    if few is None:
        return
    draw = torch.Generator().manual_seed(len(slots))
    x, y = torch.randn(len(slots), WIDTH, generator=draw), torch.randn(len(slots), sum(SLICES), generator=draw)
    parts = tuple(
        (
            torch.randn(N_SLOTS, 1, RANK, WIDTH, generator=draw),
            torch.randn(N_SLOTS, 1, width, RANK, generator=draw),
            width,
        )
        for width in SLICES
    )
    expected = y.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[row] += torch.cat([0.5 * (up[slot, 0] @ (down[slot, 0] @ x[row])) for down, up, _ in parts])
    add_few(few, y, x, parts, 0.5)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize(
    ("slots", "are_few"),
    [
        ([3, 1, 2, 0], True),  # a decode step: each row has its own adapter
        ([0, -1, 1, 1], True),
        ([2, 2, 2], False),  # one adapter alone needs no stack
        ([0] * 30 + [1], False),  # a prompt
        ([0] * 5 + [4], False),  # most places of the range would be empty
    ],
)
def test_only_rows_that_fill_their_range_of_slots_are_computed_together(slots: list[int], are_few: bool) -> None:
    from thaw_runtime.engine.vllm.lora_on_cpu import few_of

    assert (few_of(slots) is not None) == are_few
