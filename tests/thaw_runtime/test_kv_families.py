"""The computed slices, compared with the real memory of an engine of each family and with vLLM's own grants."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

import pytest

from tests.thaw_runtime.conftest import run_probe
from thaw_runtime.engine.kv_memory import CPU

pytestmark = pytest.mark.vllm

NOISE = 0.02
"""The part of the slice by which the highest of a few profiles still differs from run to run.  A grant may therefore be
larger than what one measured profile leaves; the worst batch, which is measured too, must fit in any case."""
TOKENS, MANY_TOKENS = 256, 2048
"""Prompt tokens of the largest batch.  Many of them take a minute and a half."""
SAMPLE = ("smollm2", "qwen3", "gemma", "gpt2")
OTHERS = ("qwen2", "mistral", "opt")
CASES = [
    *((name, TOKENS) for name in SAMPLE),
    *(pytest.param(name, MANY_TOKENS, marks=pytest.mark.full) for name in SAMPLE + OTHERS),
]

Measured = Callable[[str, int], dict[str, int]]


@pytest.fixture(scope="module")
def measured() -> Measured:
    """The bytes that were measured of a family."""
    together = cache(measure)
    return lambda family, n_tokens: together(SAMPLE if n_tokens == TOKENS else SAMPLE + OTHERS, n_tokens)[family]


def measure(families: tuple[str, ...], n_tokens: int) -> dict[str, dict[str, int]]:
    """One process measures several families, because its import of vLLM takes longer than the measurements."""
    done = run_probe("kv_probe", "--tokens", str(n_tokens), *families)
    line = next((line for line in done.stdout.splitlines() if line.startswith("MEASURED ")), None)
    assert line is not None, done.stderr[-3000:]
    found: dict[str, dict[str, int]] = json.loads(line.removeprefix("MEASURED "))
    return found


@pytest.mark.parametrize(("family", "n_tokens"), CASES)
def test_the_worst_batch_stays_within_the_slice(measured: Measured, family: str, n_tokens: int) -> None:
    m = measured(family, n_tokens)
    assert m["loaded"] <= m["weights"] + (8 << 20)  # 8 MiB for the engine's own objects
    assert m["loaded"] + m["kv"] < m["peak"] <= m["reserve"]


@pytest.mark.parametrize(("family", "n_tokens"), CASES)
def test_the_grant_is_within_a_tenth_of_profilings(measured: Measured, family: str, n_tokens: int) -> None:
    m = measured(family, n_tokens)
    granted = m["kv"] + m["not_packed"] + CPU.kernels  # one profiled batch does not see the kernels of others
    assert 0.9 - NOISE <= granted / m["profiled_kv"] <= 1.0 + NOISE
    assert 0.9 - NOISE <= granted / m["vllm_kv"] <= 1.0 + NOISE
