"""Every family of docs/models.md behaves as the page says: one worker and two stages answer as plain vLLM does."""

from __future__ import annotations

import pytest

from tests.thaw_runtime import model_table
from tests.thaw_runtime.families import FAMILIES
from tests.thaw_runtime.model_table import Row
from tests.thaw_runtime.pipelines import Pipelines

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SAMPLE = ("gpt_bigcode",)
"""It runs on vLLM's Transformers backend, and its decoder adds positions to what it is given, in every stage."""


@pytest.fixture(scope="module")
def sampled(pipelines: Pipelines) -> list[Row]:
    return model_table.measure_together(SAMPLE, pipelines)


def test_the_page_has_a_row_for_each_family() -> None:
    rows = model_table.written().splitlines()[2:]
    assert [row.split("|")[1].strip(" `") for row in rows] == list(FAMILIES)


def test_a_family_of_the_sample_does_what_the_page_says(sampled: list[Row]) -> None:
    for row in sampled:
        assert row.error == ""
        assert row.n_distinct >= 20, "a degenerate reference proves nothing"
        assert f"| {' | '.join(row.cells())} |" in model_table.written()


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_does_what_the_page_says(relay_url: str, family: str) -> None:
    (row,) = model_table.measure([family], relay_url)
    assert row.n_distinct >= 20, f"a degenerate reference proves nothing {row.error}"
    assert f"| {' | '.join(row.cells())} |" in model_table.written(), row.error
