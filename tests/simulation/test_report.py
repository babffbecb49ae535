"""What the page says of several seeds."""

from __future__ import annotations

from bench.simulation.metrics import Summary
from bench.simulation.report import by_seed
from bench.simulation.specs import SYSTEMS


def run(system: str, seed: int, ttft_pct: float) -> Summary:
    return Summary(
        "generated", f"cv8-rps0.6-seed{seed}", 8.0, 0.6, seed, system, 1.0, 10, 0, ttft_pct, 100.0, {}, 1.0, 1.0, 1.0,
        50.0, 1.0, 60.0, 3, 40, 0.1, "",
    )  # fmt: skip


def test_one_seed_says_nothing_of_a_spread() -> None:
    assert by_seed([run(system, 0, 50.0) for system in SYSTEMS]) == ""


def test_with_several_seeds_the_page_says_with_how_many_of_them_thaw_leads() -> None:
    better = {("thaw", 0): 90.0, ("thaw", 1): 60.0, ("paraserve-cache", 0): 65.5, ("paraserve-cache", 1): 61.0}
    said = by_seed([run(system, seed, better.get((system, seed), 40.0)) for system in SYSTEMS for seed in (0, 1)])
    assert "| Thaw (today) | 90.0 | 60.0 |" in said
    assert said.endswith("leads ParaServe with a cache with 1 of 2 seeds, by -1.0 to 24.5 points.")
