"""Tests that run only after their sources have changed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests import unchanged


def item(*names: str) -> Any:
    return SimpleNamespace(iter_markers=lambda kind: [SimpleNamespace(args=(name,)) for name in names])


def config(expression: str) -> Any:
    return SimpleNamespace(option=SimpleNamespace(markexpr=expression), hook=Mock())


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One source of these tests is as it was written down, and the other is not."""
    path = tmp_path / "unchanged.json"
    path.write_text(json.dumps({"native": unchanged.digest("native"), "readme": "another"}))
    monkeypatch.setattr(unchanged, "RECORD", path)
    return path


@pytest.mark.usefixtures("record")
def test_only_a_test_whose_sources_changed_stays_in_an_ordinary_run() -> None:
    ordinary, native, readme = item(), item("native"), item("readme")
    asked = config("not full")
    assert unchanged.leave_out(asked, [ordinary, native, readme]) == [ordinary, readme]
    asked.hook.pytest_deselected.assert_called_once_with(items=[native])


@pytest.mark.usefixtures("record")
def test_a_run_of_all_tests_leaves_none_out() -> None:
    items = [item("native"), item("readme")]
    assert unchanged.leave_out(config(""), items) == items


def test_a_digest_changes_with_a_byte_and_with_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "csrc").mkdir()
    monkeypatch.setattr(unchanged, "ROOT", tmp_path)
    seen = set()
    for name, text in (("a", "1"), ("a", "2"), ("b", "2")):
        for old in (tmp_path / "csrc").iterdir():
            old.unlink()
        (tmp_path / "csrc" / name).write_text(text)
        seen.add(unchanged.digest.__wrapped__("native"))
    assert len(seen) == 3
