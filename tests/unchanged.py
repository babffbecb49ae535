"""Tests of sources that seldom change: they run in ``make test`` only after such a source has changed.

A test marked ``of(NAME)`` holds a behaviour that depends only on the files of that name below.  ``make test-full`` always
runs it, and after it has passed, ``python -m tests.unchanged`` writes the digest of the files down (unchanged.json).
While they have the digest that was written down, an ordinary run leaves the test out and says so.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
RECORD: Final = ROOT / "tests" / "unchanged.json"
SOURCES: Final = {
    "native": ("csrc", "tests/vectors", "tests/native/test_cpp.py"),
    "readme": ("README.md", "examples", "thaw/cli", "tests/e2e/test_readme.py"),
}


@cache
def digest(name: str) -> str:
    """The digest of the names and the bytes of these files, as they lie in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *SOURCES[name]],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    hashed = hashlib.sha256()
    for path in sorted(p for p in listed.stdout.split(b"\0") if p):
        file = ROOT / path.decode()
        content = file.read_bytes() if file.is_file() else b"(deleted)"
        hashed.update(b"%s\0%d\0%s" % (path, len(content), content))
    return hashed.hexdigest()


def is_unchanged(name: str) -> bool:
    return bool(json.loads(RECORD.read_text()).get(name) == digest(name))


def leave_out(config: pytest.Config, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests without those whose sources have not changed, unless the run asks for long tests or for them."""
    if "not full" not in str(config.option.markexpr):
        return list(items)
    names = {mark.args[0] for item in items for mark in item.iter_markers("of")}
    unchanged = {name for name in names if is_unchanged(name)}
    left = [item for item in items if any(mark.args[0] in unchanged for mark in item.iter_markers("of"))]
    config.hook.pytest_deselected(items=left)
    return [item for item in items if item not in left]


def main() -> None:
    RECORD.write_text(json.dumps({name: digest(name) for name in SOURCES}, indent=2) + "\n")


if __name__ == "__main__":
    main()
