"""Rotary embeddings of queries by head, by vLLM's kernel for CPUs."""

from __future__ import annotations

import json

import pytest

from tests.thaw_runtime.conftest import run_probe

pytestmark = pytest.mark.vllm


def test_heads_are_rotated_by_the_position_of_their_own_token() -> None:
    done = run_probe("rotary_probe")
    line = next((line for line in done.stdout.splitlines() if line.startswith("ROTATED ")), None)
    assert line is not None, done.stderr[-3000:]
    found = json.loads(line.removeprefix("ROTATED "))
    assert found.keys() == {"by token", "by head", "by head, without keys", "in two dimensions of positions"}
    assert max(found.values()) < 1e-5, found
