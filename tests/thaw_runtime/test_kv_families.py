"""The computed slices, compared with the real memory of an engine of each family and with vLLM's own grants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.thaw_runtime.conftest import ROOT

pytestmark = pytest.mark.vllm

NOISE = 0.02
"""The part of the slice by which the highest of a few profiles still differs from run to run.  A grant may therefore be
larger than what one measured profile leaves; the worst batch, which is measured too, must fit in any case."""
NAMES = ("smollm2", "qwen2", "qwen3", "mistral", "gemma", "opt", "gpt2")


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, int]]:
    """One process measures all families, because its import of vLLM takes longer than the measurements."""
    env = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'runtime-python'}")
    command = [sys.executable, str(Path(__file__).parent / "kv_probe.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("MEASURED ")), None)
    assert line is not None, done.stderr[-3000:]
    found: dict[str, dict[str, int]] = json.loads(line.removeprefix("MEASURED "))
    return found


@pytest.mark.parametrize("family", NAMES)
def test_the_worst_batch_stays_within_the_slice(measured: dict[str, dict[str, int]], family: str) -> None:
    m = measured[family]
    assert m["loaded"] <= m["weights"] + (8 << 20)  # 8 MiB for the engine's own objects
    assert m["loaded"] + m["kv"] < m["peak"] <= m["reserve"]


@pytest.mark.parametrize("family", NAMES)
def test_the_grant_is_within_a_tenth_of_profilings(measured: dict[str, dict[str, int]], family: str) -> None:
    m = measured[family]
    assert 0.9 - NOISE <= m["kv"] / m["profiled_kv"] <= 1.0 + NOISE
    assert 0.9 - NOISE <= m["kv"] / m["vllm_kv"] <= 1.0 + NOISE
