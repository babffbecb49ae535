"""Every shell block of README and docs is executed, in order, on one platform.

A block that cannot be executed is preceded by ``<!-- test: skip: reason -->``.  The test asserts the counts, so a block
cannot disappear from it unnoticed.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.machine import Machine
from thaw.dev.known_answers import FRANCE

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"(?:<!-- test: skip: (?P<reason>[^\n]+?) -->\n)?^```(?:bash|sh|console)\n(?P<code>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    page: str
    number: int
    code: str
    reason: str


def blocks(page: Path) -> list[Block]:
    name = str(page.relative_to(ROOT))
    found = _BLOCK.finditer(page.read_text())
    return [Block(name, i, m["code"], m["reason"] or "") for i, m in enumerate(found)]


README = blocks(ROOT / "README.md")


def test_the_readme_has_the_blocks_we_think_it_has() -> None:
    assert [bool(b.reason) for b in README] == [True, True] + [False] * 7 + [True]


@pytest.mark.vllm
@pytest.mark.of("readme")
@pytest.mark.timeout(600)
def test_every_block_of_the_readme_runs(machine: Machine) -> None:
    """One shell executes all blocks as a reader would type them, in the order of the page."""
    script = "set -euo pipefail\n" + "\n".join(f"echo '### block {b.number}'\n{b.code}" for b in README if not b.reason)
    script = script.replace("127.0.0.1:3233", f"127.0.0.1:{machine.port}")
    script = script.replace("thaw dev up --detach", f"thaw dev up --detach --port {machine.port}")
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=machine.env, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.count("### block") == 7
    by_block = re.split(r"### block \d+\n", done.stdout)[1:]
    assert FRANCE.text in by_block[0]
    assert '"delta"' in by_block[1]
    assert "[DONE]" in by_block[1]
    assert by_block[2].strip()
    assert "Ada" in by_block[3]
    assert "chunks of 5 files are what was pushed" in by_block[4]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path, dict(os.environ))
    yield made
    made.down()
    assert made.leftovers() == []
