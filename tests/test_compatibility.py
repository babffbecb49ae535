"""docs/compatibility.md says how every endpoint and every verb of the CLI differs from OpenWhisk and OpenAI."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.security.own_process import document
from thaw.cli.main import app

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()


def rows(title: str) -> list[list[str]]:
    section = re.split(r"^## ", PAGE.split(f"## {title}\n")[1], maxsplit=1, flags=re.M)[0]
    table = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


ENDPOINTS = rows("Endpoints")
OF_OPENAI = rows("OpenAI's endpoints")
VERBS = rows("The command line")


def served() -> set[str]:
    return {f"{method.upper()} {path}" for path, item in document()["paths"].items() for method in item}


def test_every_endpoint_of_openwhisks_has_its_row_and_no_other() -> None:
    paths = re.compile(r"\w+ (/|/api/v1(?!/thaw/|/api-docs).*)")
    assert {row[0].strip("`") for row in ENDPOINTS} == set(filter(paths.fullmatch, served()))


def test_every_endpoint_of_openais_has_its_row_and_no_other() -> None:
    paths = re.compile(r"\w+ (/v1/.*|/(de)?tokenize)")
    assert {row[0].strip("`") for row in OF_OPENAI} == set(filter(paths.fullmatch, served()))


def test_every_test_that_a_row_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py): (test_\w+)`", PAGE)
    assert len(named) >= len(ENDPOINTS) + len(OF_OPENAI)
    missing = [(path, name) for path, name in named if f"def {name}(" not in (ROOT / path).read_text()]
    assert missing == []
    assert all(len(row) == 3 for row in [*ENDPOINTS, *OF_OPENAI])


def options(verb: str, noun: str) -> set[str] | None:
    """The options of a command; None where there is none."""
    root: Any = typer.main.get_command(app)
    group = root.commands.get(noun)
    command = None if group is None else getattr(group, "commands", {}).get(verb)
    return None if command is None else {name for p in command.params for name in p.opts if name.startswith("--")}


@pytest.mark.parametrize(("words", "differs"), [row[:2] for row in VERBS], ids=[row[0] for row in VERBS])
def test_a_row_of_the_command_line_says_what_is_there(words: str, differs: str) -> None:
    noun, verb, *wanted = words.strip("`").split()
    found = options(verb, noun)
    if differs.startswith("absent") and not wanted:
        assert found is None
    elif differs.startswith("absent"):
        assert found is not None
        assert not found & set(wanted), "it is there now: say so"
    else:
        assert found is not None
        assert set(wanted) <= found


def test_every_verb_of_functions_packages_triggers_and_rules_has_its_row() -> None:
    root: Any = typer.main.get_command(app)
    there = {(noun, verb) for noun in ("action", "package", "trigger", "rule") for verb in root.commands[noun].commands}
    assert there <= {tuple(row[0].strip("`").split()[:2]) for row in VERBS}
