"""The generated pages agree with the code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from thaw.cli.main import app
from thaw.config import parse_llm_config
from thaw.dev import pages

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("name", "page"), [("config.md", pages.config_page), ("cli.md", pages.cli_page)])
def test_a_generated_page_is_up_to_date(name: str, page: pages.Page) -> None:
    assert (ROOT / "docs" / name).read_text() == page(), "run: make docs"


def test_each_command_argument_and_option_is_described_by_a_sentence() -> None:
    described = [line for line in pages.cli_page().splitlines() if line.startswith(("`thaw ", "- `"))]
    assert len(described) > 80
    texts = [line.partition("`: ")[2] for line in described]
    assert [
        line for line, text in zip(described, texts, strict=True) if not (text[:1].isupper() and text.endswith("."))
    ] == []


def test_no_option_lacks_its_help() -> None:
    root: Any = typer.main.get_command(app)
    commands = [c for group in root.commands.values() for c in getattr(group, "commands", {"": group}).values()]
    assert [(c.name, p.name) for c in commands for p in c.params if p.name != "help" and not p.help] == []


def test_the_example_config_is_accepted_and_asks_for_the_demo_model() -> None:
    config = parse_llm_config(json.loads((ROOT / "examples" / "chat" / "chat.json").read_text()))
    assert config.model.uri == "s3://models/smollm2-135m"
