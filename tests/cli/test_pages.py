"""The generated pages agree with the code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thaw.config import parse_llm_config
from thaw.dev import pages

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("name", "page"), [("config.md", pages.config_page), ("cli.md", pages.cli_page)])
def test_a_generated_page_is_up_to_date(name: str, page: pages.Page) -> None:
    assert (ROOT / "docs" / name).read_text() == page(), "run: make docs"


def test_the_example_config_is_accepted_and_asks_for_the_demo_model() -> None:
    config = parse_llm_config(json.loads((ROOT / "examples" / "chat" / "chat.json").read_text()))
    assert config.model.uri == "s3://models/smollm2-135m"
