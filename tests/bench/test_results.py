"""docs/benchmarks.md agrees with the recorded results, and a result is the last line that a program printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import _page, _publish
from bench._common import ROOT
from bench._page import Claim, Claims, NoClaim
from bench._results import newest, record

CLAIMS = Claims(
    {"fetch": ("bench/fetch.py",)},
    (Claim("fetch", "vs_curl", "over curl", "the store is slow"), Claim("fetch", "cpu_s", "CPU")),
)


def goal(name: str, value: float | None, **fields: Any) -> dict[str, Any]:
    return {"name": name, "value": value, "op": ">=", "goal": 3.0, "ok": value is not None and value >= 3, **fields}


def line(*goals: dict[str, Any], rounds: int = 5, command: str = "bench/fetch.py", **facts: Any) -> dict[str, Any]:
    machine = {"cores": 4, "load_1m": [0.5, 2.25], "commit": "abc1234", "dirty": False, "at": "2026-11-22T20:00:00Z"}
    machine |= {"cpu": "EPYC", "memory_gib": 16.0, "kernel": "6.1", "python": "3.11"}
    return {"bench": "fetch", "command": command, "rounds": rounds, "goals": list(goals), **facts, "machine": machine}


def rows(directory: Path) -> list[str]:
    return [row for row in _page.page(CLAIMS, newest(directory)).splitlines() if row.startswith("| `")]


def test_the_page_says_what_the_results_say() -> None:
    written = _page.page(_page.read_claims(), newest())
    assert _page.PAGE.read_text() == written, "renew it: python -m bench._publish --page"


def test_every_program_has_runs_that_are_published() -> None:
    programs = {p.name for p in (ROOT / "bench").glob("*.py") if not p.name.startswith("_")}
    commands = [command for runs in _page.read_claims().runs.values() for command in runs]
    assert {Path(word).name for command in commands for word in command.split() if word.endswith(".py")} == programs


def test_a_row_tells_claim_value_goal_command_commit_load_and_rounds(tmp_path: Path) -> None:
    record(line(goal("vs_curl", 3.5)), tmp_path)
    assert rows(tmp_path) == [
        "| `vs_curl`: over curl | 3.5, met | ≥ 3 | `bench/fetch.py` | abc1234 | 0.5 → 2.25, 4 cores | 5 |",
        "| `cpu_s`: CPU | not measured |  |  |  |  |  |",
    ]


def test_fewer_than_five_rounds_are_indicative_also_of_one_figure_alone(tmp_path: Path) -> None:
    record(line(goal("vs_curl", 3.5), {"name": "cpu_s", "value": 0.4, "rounds": 1}), tmp_path)
    assert "3.5, met |" in rows(tmp_path)[0]
    assert "0.4, *indicative* |  |" in rows(tmp_path)[1]
    record(line(goal("vs_curl", 3.4), rounds=4), tmp_path)
    assert "3.4, met, *indicative* |" in rows(tmp_path)[0]


def test_a_row_of_pipelines_tells_the_path_that_they_took(tmp_path: Path) -> None:
    record(line(goal("vs_curl", 3.5), path="relay"), tmp_path)
    assert "| 3.5, met, path relay |" in rows(tmp_path)[0]


def test_a_missed_goal_is_shown_with_what_it_is_made_of(tmp_path: Path) -> None:
    record(line(goal("vs_curl", 2.0, floor="1.0 against 0.5 GB/s")), tmp_path)
    text = _page.page(CLAIMS, newest(tmp_path))
    assert "| 2, **missed** |" in text
    assert "- `vs_curl` (missed): 1.0 against 0.5 GB/s. the store is slow.\n" in text
    record(line(goal("vs_curl", 4.0)), tmp_path)
    assert "the store is slow" not in _page.page(CLAIMS, newest(tmp_path))


def test_a_run_replaces_what_it_measured_again_and_nothing_else(tmp_path: Path) -> None:
    record(line(goal("vs_curl", 3.5), goal("cpu_s", 4.0), command="bench/fetch.py --both"), tmp_path)
    record(line(goal("vs_curl", 3.1), command="bench/fetch.py --one"), tmp_path)
    found = newest(tmp_path)
    assert (found["fetch", "vs_curl"].value, found["fetch", "cpu_s"].value) == (3.1, 4.0)
    assert found["fetch", "cpu_s"].command == "bench/fetch.py --both"
    record(line(goal("cpu_s", 5.0)), tmp_path)
    kept = [json.loads(text)["command"] for text in (tmp_path / "fetch.jsonl").read_text().splitlines()]
    assert kept == ["bench/fetch.py --one", "bench/fetch.py"], "the first line has nothing left to say"


def test_what_could_not_be_measured_replaces_nothing(tmp_path: Path) -> None:
    record(line(goal("vs_curl", 3.5)), tmp_path)
    record(line(goal("vs_curl", None, floor="curl is not installed")), tmp_path)
    assert newest(tmp_path)["fetch", "vs_curl"].value == 3.5


def test_a_recorded_line_has_no_facts_of_one_machine(tmp_path: Path) -> None:
    record(line(goal("vs_curl", 3.5, samples={"log": "/tmp/x"}), vllm_command="/home/someone/python"), tmp_path)
    text = (tmp_path / "fetch.jsonl").read_text()
    assert "/tmp/x" not in text
    assert "/home/someone" not in text


def test_a_figure_without_a_claim_is_refused_by_its_name(tmp_path: Path) -> None:
    record(line(goal("vs_wget", 3.5)), tmp_path)
    with pytest.raises(NoClaim, match="vs_wget"):
        _page.page(CLAIMS, newest(tmp_path))


def test_a_run_is_published_without_the_figures_that_have_no_claim(capsys: pytest.CaptureFixture[str]) -> None:
    published = _publish.claimed(line(goal("vs_curl", 3.5), goal("vs_wget", 3.5)))
    assert [g["name"] for g in published["goals"]] == ["vs_curl"]
    assert "vs_wget" in capsys.readouterr().out


def test_the_last_line_of_a_run_is_its_result(tmp_path: Path) -> None:
    program = tmp_path / "ends.py"
    program.write_text('import sys\nprint("round 1")\nprint(\'{"bench": "fetch"}\')\nsys.exit(len(sys.argv) > 1)\n')
    assert _publish.run(str(program)) == {"bench": "fetch"}
    assert _publish.run(f"{program} fails") is None
