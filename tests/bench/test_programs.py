"""The programs themselves, run as a user would run them."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from bench import _model
from bench._common import ROOT, python_env, start
from thaw.checkpoints import checkpoint
from thaw.dev.ports import free_ports


def run(*arguments: str, timeout_s: float) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=timeout_s, env=python_env()
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    plain: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return plain


def test_the_random_model_is_one_that_fetchd_accepts(tmp_path: Path) -> None:
    made = _model.write_random(tmp_path, 20_000_000)
    read = checkpoint.read_index((tmp_path / "thaw-index.json").read_bytes())
    assert read == made
    assert [(r.file, r.n_bytes) for r in _model.whole(read)] == [(f.name, f.n_bytes) for f in read.files]
    assert sum(f.n_bytes for f in read.files) == pytest.approx(20_000_000, rel=0.01)


def test_the_stand_in_for_nginx_serves_ranges(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)))
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "bench._origin", str(tmp_path), "127.0.0.1", str(port)]
    server = start(command, tmp_path / "log", "listening", env=python_env())
    try:
        url = f"http://127.0.0.1:{port}/file"
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Range": "bytes=10-19"})) as answer:
            assert answer.status == 206
            assert answer.read() == bytes(range(10, 20))
            assert answer.headers["Content-Range"] == "bytes 10-19/256"
        with urllib.request.urlopen(url) as answer:
            assert answer.read() == bytes(range(256))
        with pytest.raises(urllib.error.HTTPError, match="404") as missing:
            urllib.request.urlopen(url + "-not")
        missing.value.close()
    finally:
        server.stop()


def test_fetch_measures_fetchd_against_the_receiver() -> None:
    plain = run("bench/fetch.py", "--quick", "-n", "1", "--mb", "64", "--only", "unlimited", timeout_s=500)
    values = {g["name"]: g["value"] for g in plain["goals"]}
    assert {"vs_receiver", "cpu_vs_receiver", "vs_obstore", "vs_curl", "vs_s5cmd", "vs_boto3"} == set(values)
    assert values["vs_receiver"] > 0


def test_load_measures_fetchd_against_safetensors_and_says_what_is_missing() -> None:
    plain = run("bench/load.py", "--quick", "-n", "1", "--mb", "32", timeout_s=500)
    (goal,) = plain["goals"]
    assert (goal["name"], goal["op"], goal["goal"]) == ("vs_safetensors", ">=", 1.2)
    assert goal["value"] > 0
    assert set(plain["gb_s"]) | set(plain["not_installed"]) == {"fetchd", "safetensors", "runai", "fastsafetensors"}
    assert plain["segment_us_per_tensor"] > 0


@pytest.mark.full
def test_stores_with_slow_connections_are_measured_against_one_without() -> None:
    plain = run("bench/slow_connections.py", "--quick", "-n", "1", timeout_s=280)
    values = {g["name"]: g["value"] for g in plain["goals"]}
    assert values["watermark_stood_starved"] > 0
    assert values["last_byte_hung"] > 0
    assert all(n > 0 for name in ("starved", "hung") for n in plain["given_up"][name]), "no connection was slow"


@pytest.mark.vllm
@pytest.mark.full
def test_a_start_held_up_for_two_seconds_before_fetching_misses_its_goals() -> None:
    plain = run("bench/cold_start.py", "-n", "1", "--only", "stem_unlimited", "--delay-s", "2", timeout_s=280)
    goals = {g["name"]: g for g in plain["goals"]}
    assert goals["first_byte_ms"]["value"] > 1900
    assert goals["unexplained_ms"]["value"] > 1900
    assert not goals["first_byte_ms"]["ok"]
    assert not goals["unexplained_ms"]["ok"]
    assert not goals["ttft_vs_bound_unlimited"]["ok"]
