"""Forked containers must not share their random numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.thaw_runtime.conftest import ROOT

SAFE = {"random", "uuid4", "secrets", "ssl"}  # these ask the kernel, or detect a fork themselves


def draws(directory: Path, *arguments: str) -> dict[str, list[str]]:
    """The draws of the proxies and engines of two containers of one zygote, by generator."""
    directory.mkdir()
    env = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'runtime-python'}")
    command = [sys.executable, str(Path(__file__).parent / "draws.py"), str(directory), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    four = json.loads(done.stdout)
    assert len(four) == 4
    return {name: [process[name] for process in four] for name in four[0]}


def test_two_forks_draw_different_random_numbers_and_uuids(tmp_path: Path) -> None:
    for name, drawn in draws(tmp_path / "with").items():
        assert len(set(drawn)) == 4, f"{name}: {drawn}"


def test_without_reseeding_they_would_draw_the_same(tmp_path: Path) -> None:
    drawn = draws(tmp_path / "without", "without")
    assert {name for name, values in drawn.items() if len(set(values)) == 1} == set(drawn) - SAFE
