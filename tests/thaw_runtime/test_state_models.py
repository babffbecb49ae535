"""Models whose layers keep a state, and language models inside of others, answer as the Transformers library does.

The library is the reference and not vLLM, whose kernel for rotary embeddings on a CPU mixes up the tokens of LFM2
(engine/vllm/rotary_on_cpu.py)."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.thaw_runtime.conftest import run_probe
from tests.thaw_runtime.families import MULTIMODAL, STATEFUL

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SAMPLE = ("granitemoehybrid", "lfm2")
"""Attention, experts and Mamba 2; attention by head and a convolution."""
HALVES = ("mistral3",)
OTHERS = [pytest.param(n, marks=pytest.mark.full) for n in (*STATEFUL, *MULTIMODAL) if n not in SAMPLE + HALVES]


@pytest.fixture(scope="module")
def sampled() -> dict[str, dict[str, Any]]:
    return measured(*SAMPLE, *HALVES)


def measured(*families: str) -> dict[str, dict[str, Any]]:
    done = run_probe("library_probe", *families)
    lines = [json.loads(line.removeprefix("FOUND ")) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(lines) == len(families), done.stderr[-3000:]
    return {line["family"]: line for line in lines}


def found(sampled: dict[str, dict[str, Any]], family: str) -> dict[str, Any]:
    return sampled[family] if family in sampled else measured(family)[family]


@pytest.mark.parametrize("family", [*SAMPLE, *HALVES, *OTHERS])
def test_alone_in_a_batch_and_from_the_prefix_cache_the_tokens_are_the_librarys(
    sampled: dict[str, dict[str, Any]], family: str
) -> None:
    of = found(sampled, family)
    assert max(len(set(answer)) for answer in of["library"]) >= 15, "a degenerate reference proves nothing"
    assert of["engine"]["alone"] == of["library"]
    assert of["engine"]["together"] == of["library"]
    assert of["engine"]["again"] == of["library"]


@pytest.mark.parametrize("family", SAMPLE)
def test_the_cache_gets_what_the_reserve_has_left_and_the_engine_counts_its_blocks(
    sampled: dict[str, dict[str, Any]], family: str
) -> None:
    of = found(sampled, family)["engine"]
    memory = of["memory"]
    assert memory["reserve"] == memory["weights"] + memory["intermediates"] + memory["kv"]
    assert memory["kv_blocks"] > 1
    assert memory["kv_tokens"] > 384
    assert of["grown"] < memory["intermediates"] + memory["kv"]


@pytest.mark.parametrize("family", SAMPLE)
def test_a_reserve_without_room_for_one_request_is_refused_with_the_numbers(
    sampled: dict[str, dict[str, Any]], family: str
) -> None:
    said = found(sampled, family)["too_small"]
    assert said["code"] == "MemoryTooSmall"
    assert re.fullmatch(
        r"the model needs \d+ MiB \(\d+ weights, \d+ intermediates, \d+ for one request of 384 tokens\) and the worker has "
        r"\d+ MiB",
        said["message"],
    )
    assert said["hint"].startswith("set resources.gpu_memory_mb to at least ")
