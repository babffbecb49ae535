"""Workload files, checkpoints and the program.  Good files are read; bad rows are refused with line and reason."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench._common import ROOT, python_env
from bench.simulation import matrix
from bench.simulation.tracefile import BadWorkload, read_traces, read_workload

HEAD = "t_s,function,application,model,input_tokens,output_tokens\n"
GOOD = "0.5,3,chatbot,llama2-7b,100,20\n1.5,4,code,llama2-13b,50,10\n"


def test_plain_and_compressed_files_read_alike(tmp_path: Path) -> None:
    (tmp_path / "a_cv8_rps0.6.csv").write_text(HEAD + GOOD)
    with gzip.open(tmp_path / "b.csv.gz", "wt") as file:
        file.write(HEAD + GOOD)
    plain, compressed = read_traces(tmp_path)
    assert plain.requests == compressed.requests
    assert [(r.arrival_s, r.function, r.output_tokens) for r in plain.requests] == [(0.5, 3, 20), (1.5, 4, 10)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2,3,chatbot,llama2-7b,100", "5 fields, not 6"),
        ("2,3,chatbot,llama2-7b,100,20,9", "7 fields, not 6"),
        ("soon,3,chatbot,llama2-7b,100,20", "t_s 'soon' is no number"),
        ("nan,3,chatbot,llama2-7b,100,20", "t_s 'nan' is no time"),
        ("-1,3,chatbot,llama2-7b,100,20", "t_s '-1' is no time"),
        ("1.0,3,chatbot,llama2-7b,100,20", "t_s goes back from 1.5 to 1"),
        ("2,x,chatbot,llama2-7b,100,20", "function 'x' is no whole number"),
        ("2,-3,chatbot,llama2-7b,100,20", "function -3 is not between 0"),
        ("2,3,poetry,llama2-7b,100,20", "application 'poetry' is none of chatbot"),
        ("2,3,chatbot,gpt-9,100,20", "model 'gpt-9' is none of llama2-7b"),
        ("2,3,chatbot,llama2-13b,100,20", "function 3 had the model llama2-7b before"),
        ("2,3,chatbot,llama2-7b,0,20", "input_tokens 0 is not between 1"),
        ("2,3,chatbot,llama2-7b,100,1.5", "output_tokens '1.5' is no whole number"),
        ("2,3,chatbot,llama2-7b,100,99999999", "output_tokens 99999999 is not between 1"),
        ("", "0 fields, not 6"),
    ],
)
def test_a_bad_row_is_refused_with_its_line_and_the_reason(tmp_path: Path, row: str, reason: str) -> None:
    path = tmp_path / "w.csv"
    path.write_text(f"{HEAD}{GOOD}{row}\n")
    with pytest.raises(BadWorkload) as refused:
        read_workload(path)
    assert str(refused.value).startswith(f"{path}:4: {reason}")


def test_a_wrong_header_a_torn_file_and_an_empty_directory_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_text("time,who\n")
    with pytest.raises(BadWorkload, match="w.csv:1: the header is"):
        read_workload(path)
    torn = tmp_path / "torn.csv.gz"
    torn.write_bytes(gzip.compress((HEAD + GOOD).encode())[:-9])
    with pytest.raises(BadWorkload, match="cannot be read"):
        read_workload(torn)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadWorkload, match="no \\*.csv"):
        read_traces(tmp_path / "empty")


def test_a_finished_run_is_not_made_again_and_a_torn_checkpoint_is(tmp_path: Path) -> None:
    (tmp_path / "w.csv").write_text(HEAD + GOOD)
    run = matrix.Run("files", read_workload(tmp_path / "w.csv"), "paraserve")
    kept = matrix.Checkpoints(tmp_path / "runs", "code")
    first, there = kept.get_or_make(run)
    assert not there
    assert kept.get_or_make(run) == (first, True)
    (file,) = (tmp_path / "runs").iterdir()
    file.write_text(file.read_text()[:40])
    again, there = kept.get_or_make(run)
    assert not there
    assert again.log_hash == first.log_hash


def simulated(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "bench/simulate.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=python_env(COLUMNS="300"), timeout=500)


def test_the_program_says_where_a_file_is_bad(tmp_path: Path) -> None:
    (tmp_path / "w.csv").write_text(HEAD + "oops\n")
    done = simulated("--quick", "--traces", str(tmp_path), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "w.csv:2: 1 fields, not 6" in done.stderr


def test_the_programs_last_line_is_its_result(tmp_path: Path) -> None:
    done = simulated("--quick", "--jobs", "2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert {g["name"] for g in last["goals"]} == {"events_per_s", "deterministic"}
    assert next(g["value"] for g in last["goals"] if g["name"] == "deterministic") == 1
    page = (tmp_path / "simulation.md").read_text()
    assert "**missed**" in (tmp_path / "simulation" / "tables.md").read_text()
    results = json.loads((tmp_path / "results.json").read_text())
    assert f"| made with | {results['commit']} |" in page
    assert f"| policy code | `{last['code']}`" in page
    assert "gateway.scheduler.policy.decide" in results["modules"]
