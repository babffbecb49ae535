"""The page's parts on several seeds, on late requests, on the systems' mechanisms, and on Thaw without a part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.simulation import record, report, why
from bench.simulation.metrics import Summary
from bench.simulation.report import lead, mechanisms
from bench.simulation.specs import SYSTEMS, Mechanism
from bench.simulation.tables import by_seed, late, parts_worth, spread
from bench.simulation.waits import Cause

DOCS = Path(__file__).parents[2] / "docs"


def run(system: str, seed: int, ttft_pct: float) -> Summary:
    """Ten requests with a system, of which eight were late and four started a worker."""
    app = {"late": {"chatbot": {"MEMORY": 3, "FETCH": 1}, "code": {"FETCH": 4}}, "app_pct": {}}
    waits = {"late_s": {"MEMORY": 24.0, "FETCH": 16.0}, "used": {"GROUPS": 2}, "n_starts": 4, "n_events": 40}
    seconds = {"ttft_mean_s": 1.0, "ttft_p50_s": 1.0, "ttft_p99_s": 1.0, "tpot_mean_ms": 50.0, "cpu_s": 0.1}
    facts = {
        "n_requests": 10,
        "n_failed": 0,
        "ttft_pct": ttft_pct,
        "tpot_pct": 100.0,
        "cost_gb_h": 1.0,
        "cold_pct": 60.0,
    }
    of = {"source": "generated", "workload": f"cv8-rps0.6-seed{seed}", "cv": 8.0, "rps": 0.6, "scale": 1.0}
    return Summary(seed=seed, system=system, log_hash="", **of, **facts, **seconds, **app, **waits)


def test_one_seed_says_nothing_of_a_spread() -> None:
    runs = [run(system, 0, 50.0) for system in SYSTEMS]
    assert (by_seed(runs), lead(runs)) == ("", "")


def test_with_several_seeds_the_page_says_with_how_many_of_them_thaw_leads() -> None:
    better = {("thaw", 0): 90.0, ("thaw", 1): 60.0, ("paraserve-cache", 0): 65.5, ("paraserve-cache", 1): 61.0}
    runs = [run(system, seed, better.get((system, seed), 40.0)) for system in SYSTEMS for seed in (0, 1)]
    assert "| Thaw | 90.0 | 60.0 |" in by_seed(runs)
    assert lead(runs).endswith("leads ParaServe with a cache in 1 of 2 seeds, by -1.0 to 24.5 points.")


def test_the_median_stands_before_the_lowest_and_the_highest() -> None:
    assert spread([3.0, 1.0, 2.25]) == "2.2 (1.0–3.0)"
    assert (spread([5.0], 0), spread([])) == ("5", "–")


def test_reasons_are_counted_from_the_traces_of_the_runs() -> None:
    runs = [run("paraserve", seed, 20.0) for seed in (0, 1)]
    assert why.late_sentence("ParaServe", why.late(runs)) == (
        "ParaServe: of 16 late requests, the longest wait of 62 % for the model's bytes at the rate of the whole link, "
        "of 38 % for a device with room."
    )
    assert why.late(runs, app="chatbot") == {Cause.MEMORY: 6, Cause.FETCH: 2}
    assert why.late_sentence("ParaServe", {}) == "ParaServe: no request was late."
    table = late("generated", runs)
    assert "| ParaServe | 16 | 38 % / 3.0 | 0 % / 0.0 | 0 % / 0.0 | 0 % / 0.0 | 62 % / 2.0 |" in table


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_its_words(cause: Cause) -> None:
    assert why.WAITED[cause]


def test_who_answers_more_in_time_than_published_is_explained_by_free_slots() -> None:
    runs = [run("vllm", 0, 60.0)]
    assert why.level_sentence("vLLM", runs, 60.0, 50.0) == "vLLM: 4 of 10 requests found a free slot."
    assert "late requests" in why.level_sentence("vLLM", runs, 40.0, 50.0)


def test_the_page_says_what_each_system_has_by_its_specification() -> None:
    said = mechanisms([run(system, 0, 50.0) for system in SYSTEMS])
    rows = {cells[0]: cells[1:] for cells in (line.strip("| ").split(" | ") for line in said.splitlines())}
    assert rows[Mechanism.GROUPS] == ["–", "–", "–", "–", "yes (50)", "yes (50)", "yes (50)"]
    assert rows[Mechanism.STEM_CELLS] == ["–", "–", "–", "–", "–", "–", "yes (0)"]
    without = replace(SYSTEMS["thaw"], stem_cells=False, forced_stages=1)
    of_groups = {Mechanism.GROUPS, Mechanism.CONSOLIDATION, Mechanism.SUCCESSION}
    assert SYSTEMS["thaw"].mechanisms - without.mechanisms == {Mechanism.STEM_CELLS, *of_groups}


def test_a_part_is_worth_what_the_same_workload_loses_without_it() -> None:
    whole = [run("thaw", seed, pct) for seed, pct in ((0, 90.0), (1, 60.0))]
    without = [run("thaw: no admission", seed, pct) for seed, pct in ((0, 80.0), (1, 56.0))]
    said = parts_worth([*whole, *without])
    assert "| 68.0 (56.0–80.0) | -7.0 (-10.0 to -4.0) |" in said
    assert "The changes that cost most points: no admission: promises of a link are ignored (-7.0)." in said


def test_the_report_says_what_was_recorded(tmp_path: Path) -> None:
    """After a change of the page: bench/simulate.py --page."""
    (tmp_path / "simulation").mkdir()
    (tmp_path / "simulation" / record.NAME).write_bytes((DOCS / "simulation" / record.NAME).read_bytes())
    report.write(tmp_path)
    for name in ("simulation.md", "simulation/tables.md"):
        assert (tmp_path / name).read_text() == (DOCS / name).read_text(), f"renew {name}: bench/simulate.py --page"


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record.read(DOCS / "simulation").write(tmp_path)
    assert (tmp_path / record.NAME).read_bytes() == (DOCS / "simulation" / record.NAME).read_bytes()


def test_a_report_of_one_run_leaves_out_what_needs_more(tmp_path: Path) -> None:
    """Results like those of --quick: one point, one seed, no workload files, and nothing changed."""
    whole = record.read(DOCS / "simulation")
    (tmp_path / "simulation").mkdir()
    one = tuple(r for r in whole.runs if (r.source, r.cv, r.rps, r.seed, r.scale) == ("generated", 8, 0.6, 0, 1))
    replace(whole, runs=one, ablations=()).write(tmp_path / "simulation")
    report.write(tmp_path)
    page = (tmp_path / "simulation.md").read_text()
    assert "| Thaw | 95.2 | " in page
    assert "What each part is worth" not in page
    assert [p.name for p in tmp_path.glob("simulation/*.svg")] == ["generated-application.svg"]
    assert "](simulation/generated-application.svg)" in page
    assert "rps.svg" not in page + (tmp_path / "simulation" / "tables.md").read_text()
