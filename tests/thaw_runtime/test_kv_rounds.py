"""When a consolidation copies another round, stops the pipeline, or gives up."""

from __future__ import annotations

import math

import pytest

from thaw_runtime.pipeline.kv_rounds import MAX_ROUNDS, Next, after_round


@pytest.mark.parametrize(
    ("n_rounds", "tail_bytes", "bytes_per_s", "step_s", "follows"),
    [
        (1, 0, 0.0, 0.02, Next.STOP),  # nothing is missing
        (1, 1000, 1e6, math.inf, Next.STOP),  # nothing is being decoded
        (1, 40_000, 1e6, 0.02, Next.STOP),  # exactly two steps
        (1, 41_000, 1e6, 0.02, Next.COPY),
        (MAX_ROUNDS - 1, 41_000, 1e6, 0.02, Next.COPY),
        (MAX_ROUNDS, 41_000, 1e6, 0.02, Next.STOP),  # more rounds do not help, and the stall is short
        (MAX_ROUNDS, 3_000_000, 1e6, 0.02, Next.GIVE_UP),
        (1, 1000, 0.0, 0.02, Next.COPY),  # no rate is known yet
        (MAX_ROUNDS, 1000, 0.0, 0.02, Next.GIVE_UP),
    ],
)
def test_rounds_end_when_the_tail_fits(
    n_rounds: int, tail_bytes: int, bytes_per_s: float, step_s: float, follows: Next
) -> None:
    assert after_round(n_rounds, tail_bytes, bytes_per_s, step_s, is_catching_up=False) is follows


def test_rounds_that_catch_up_go_on() -> None:
    assert after_round(MAX_ROUNDS + 5, 1, 1e9, 1.0, is_catching_up=True) is Next.COPY
