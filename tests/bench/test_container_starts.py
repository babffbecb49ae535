"""A container may add only that part of its creation to an LLM's start which does not hide behind the fetch."""

from __future__ import annotations

import pytest

from bench._container_starts import DriverStart, goals
from bench._links import Link

LINK = Link("any", "", 1e9, False, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ttft_s", "ok"), [(10.0, True), (10.2, True), (10.3, False)])
def test_creation_beside_the_fetch_costs_nothing_and_the_rest_what_it_took(ttft_s: float, ok: bool) -> None:
    docker = DriverStart(ttft_s, container_s=0.6, overlap_s=0.4, fetch_s=0.4)
    process = DriverStart(10.0, container_s=0.3, overlap_s=0.3, fetch_s=0.4)
    goal = goals({"docker": [docker] * 3, "process": [process] * 3}, LINK)[0]
    assert goal.ok == ok
    assert goal.value == pytest.approx(ttft_s / 10.2, rel=1e-3)
