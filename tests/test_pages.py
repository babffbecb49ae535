"""The pages for a newcomer: every file and function that docs/architecture.md names exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PLACE = re.compile(r"`([\w/-]+(?:/[\w-]+)*\.py): ([\w.]+)(?:\(\))?`")
"""`gateway/api/invoke.py: invoke()`, `fetchd/doors.py: Doors.grant()`, `gateway/core.py: Gateway`"""


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.split(f"## {title}\n")[1], maxsplit=1, flags=re.M)[0]


WALK = section("A cold request, from HTTP to the first token")
INDEX = [row for row in section("Where is …?").splitlines() if row.startswith("| Where")]


def source(path: str) -> Path:
    """The runtime's package lies in a folder of its own."""
    return ROOT / "runtime-python" / path if path.startswith("thaw_runtime/") else ROOT / path


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """Functions and classes at the top of a file, and the methods of its classes."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return frozenset(found)


@pytest.mark.parametrize(("path", "name"), sorted(set(PLACE.findall(PAGE))), ids=lambda part: part)
def test_a_place_that_the_architecture_page_names_exists(path: str, name: str) -> None:
    assert source(path).is_file(), f"{path} has moved: docs/architecture.md names it"
    assert name in names_in(source(path)), f"{path} has no {name}: docs/architecture.md names it"


def test_every_file_that_the_page_names_says_where_in_it_to_look() -> None:
    bare = re.findall(r"`((?:gateway|invoker|fetchd|thaw_runtime)/[\w/]+\.py)`", PAGE)
    assert bare == []


def test_each_step_of_the_walk_names_its_function() -> None:
    steps = re.split(r"^\d+\. ", WALK, flags=re.M)[1:]
    assert len(steps) > 20
    assert [step[:80] for step in steps if not PLACE.search(step)] == []


def test_the_walk_is_read_in_one_go() -> None:
    assert len(WALK.splitlines()) <= 120


def test_each_question_of_a_newcomer_is_answered_by_one_or_two_places() -> None:
    answers = [PLACE.findall(row) for row in INDEX]
    assert len(answers) >= 10
    assert [row for row, places in zip(INDEX, answers, strict=True) if not 1 <= len(places) <= 2] == []
