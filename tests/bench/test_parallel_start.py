"""The goals of the parallel start, tested without starting anything."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import pytest

from bench import _checkpoint, parallel_start
from bench._calibrate import Constants
from bench._explained import Start
from bench._links import Link
from bench._origin import Origin
from bench._overlap import describe
from bench.parallel_start import Model, ParallelRun
from thaw.checkpoints import checkpoint
from thaw.model import ModelIndex, ModelParts, TensorInfo
from thaw.tracing.timeline import Timeline

MBIT_200 = 25_000_000.0
CONSTANTS = Constants(t_cc=0.1, t_l=10.0, t_l_cpu_s=9.0, copy_bytes_per_s=5e9)


@pytest.fixture(scope="module")
def parts() -> ModelParts:
    """The parts of the checkpoint of a gigabyte, from its list of tensors alone."""
    tensors, at = [], 0
    for name, shape in _checkpoint._tensors():
        tensors.append(TensorInfo(name, "model.safetensors", at, 2 * math.prod(shape), "BF16", shape))
        at += 2 * math.prod(shape)
    return checkpoint.parts_of(tensors, 36)


def test_the_gigabyte_divides_nearly_evenly_and_its_head_is_its_own(parts: ModelParts) -> None:
    assert _checkpoint.size_of_largest(parts, 1) >= 1_000_000_000
    assert _checkpoint.bound(parts, 4) >= 3.85
    assert parts.tied == ()


def link(*, paced: bool = False) -> Link:
    return Link("200m", "200mbit", MBIT_200, paced, Path(), cast(Origin, None))


def run(n_stages: int, last_byte_s: float, ttft_s: float, warm_s: float) -> ParallelRun:
    return ParallelRun(n_stages, ttft_s, Start(ttft_s, 0.1, last_byte_s, 0.0, cast(Timeline, None)), warm_s)


def goals(parts: ModelParts, *, late_s: float = 0.0, paced: bool = False) -> dict[str, tuple[float | None, bool]]:
    """The goals for starts that are as fast as the link, except that one stage is ``late_s`` late."""
    ideal = {s: _checkpoint.size_of_largest(parts, s) / MBIT_200 for s in (1, 4)}
    model = Model("gigabyte", Path(), cast(ModelIndex, _Sized()), parts, 4096)
    found = {
        ("gigabyte", "200m", 1): [run(1, ideal[1], ideal[1] + 0.3, 0.3)],
        ("gigabyte", "200m", 4): [run(4, ideal[4] + late_s, ideal[4] + late_s + 0.5, 0.5)],
    }
    judged = parallel_start._start_goals(found, model, link(paced=paced), CONSTANTS)
    return {g.name: (g.value, g.ok) for g in judged}


class _Sized:
    n_bytes = 1_000_000_000


def test_a_start_at_the_rate_of_its_links_meets_every_goal(parts: ModelParts) -> None:
    found = goals(parts)
    assert {name: ok for name, (_, ok) in found.items()} == dict.fromkeys(
        ("last_byte_vs_ideal_s4", "last_byte_speedup_s4", "ttft_s4_vs_s1", "tail_ratio_s4"), True
    )
    assert found["last_byte_vs_ideal_s4"][0] == 1.0


def test_one_late_stage_misses_them(parts: ModelParts) -> None:
    late = goals(parts, late_s=2.0)
    assert [late[name][1] for name in ("last_byte_vs_ideal_s4", "last_byte_speedup_s4", "ttft_s4_vs_s1")] == [False] * 3


def test_a_paced_link_meets_none(parts: ModelParts) -> None:
    assert not any(ok for _, ok in goals(parts, paced=True).values())


def test_the_step_that_needs_a_device_is_printed_as_such() -> None:
    lines = describe({"vanilla": 30.0, "+overlap": None, "+parallel": 3.0})
    assert "10.0 x" in lines[2]
    assert "device copy" in lines[1]
