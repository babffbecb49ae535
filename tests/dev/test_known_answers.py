"""The answers of the real model that the demo, the pages and the tests expect: each is the same on every processor."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from scripts import margins
from thaw.dev.known_answers import KNOWN, LEAST_MARGIN, KnownAnswer

ROOT = Path(__file__).parents[2]
QUESTION = re.compile(r"(?i)[^\"'`>\n]*capital (?:city )?of \w+[^\"'`\n]*")
ELSEWHERE = ("CHANGELOG.md", "docs/decisions/", "docs/lab-log.md", "docs/gpu.md", "docs/test-report.md")
"""What was asked and answered in the past, or must not be asked."""
TABLE = ("thaw/dev/known_answers.py", "scripts/margins.py", "tests/dev/test_known_answers.py")


@pytest.mark.vllm
@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.prompt)
def test_every_expected_answer_is_further_ahead_than_any_processor_rounds(known: KnownAnswer) -> None:
    measured = margins.measure(known)
    assert measured.least >= LEAST_MARGIN, measured
    assert measured.least == pytest.approx(known.margin, abs=0.01), measured


@pytest.mark.vllm
def test_the_margin_of_an_answer_that_is_not_the_most_likely_one_is_negative() -> None:
    assert margins.measure(KnownAnswer(KNOWN[0].prompt, "The capital of France is Rome.", 0.0)).least < 0


def test_the_pages_the_demo_and_the_tests_ask_only_what_the_table_has() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    pages = [p for p in listed.stdout.split("\0") if p.endswith((".py", ".md", ".js")) and not p.startswith(ELSEWHERE)]
    known = [text for answer in KNOWN for text in (answer.prompt, answer.text)]
    unknown = [
        f"{page}: {found.group()}"
        for page in pages
        if page not in TABLE and (ROOT / page).exists()
        for found in QUESTION.finditer((ROOT / page).read_text())
        if not any(text in found.group() for text in known) and "asks it for" not in found.group()
    ]
    assert unknown == []
