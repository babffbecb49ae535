"""The code that a report was made with, and whether that code has changed since.

A result depends on the policy and on the simulator.  The report records a digest of each of their modules.  A digest
does not change when a file moves or when its comments, docstrings or imports change, because none of that changes a
decision.  Every other change of a module changes its digest.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import subprocess
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
RECORD: Final = Path("docs/simulation/results.json")
AGAIN: Final = "make simulation"
_ENTRY: Final = "bench.simulation.matrix"  # it makes every run
_WORDS: Final = ("thaw.", "relay.")  # the vocabulary that components share decides nothing
# these two modules of it do decide something, because both sides have to divide in the same way
_DECIDING: Final = frozenset(("thaw.partition", "relay.protocol.pool"))


@dataclass(frozen=True, slots=True)
class Provenance:
    """``digests`` has a digest for each module."""

    commit: str
    digests: Mapping[str, str]

    @property
    def digest(self) -> str:
        """One digest of all modules.  It does not depend on their names."""
        return hashlib.sha256("".join(sorted(self.digests.values())).encode()).hexdigest()[:16]

    def changed_to(self, now: Provenance) -> list[str]:
        """The modules whose content was not recorded, and the recorded modules whose content is gone."""
        new = [name for name, digest in now.digests.items() if digest not in self.digests.values()]
        gone = [name for name, digest in self.digests.items() if digest not in now.digests.values()]
        return sorted({*new, *gone})


def present(root: Path = ROOT) -> Provenance:
    files = deciding(root)
    digests = {name: hashlib.sha256(essence(p.read_text()).encode()).hexdigest()[:16] for name, p in files.items()}
    return Provenance(_commit(root, list(files.values())), digests)


def recorded(root: Path = ROOT) -> Provenance | None:
    """Return what the report in docs/ was made with, or None if the report does not say it."""
    try:
        plain = json.loads((root / RECORD).read_text())
        return Provenance(str(plain["commit"]), dict(plain["modules"]))
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError, ValueError):
        return None


def news(root: Path = ROOT) -> str:
    """One sentence for ``make check``."""
    made = recorded(root)
    if made is None:
        return f"docs/simulation.md does not say which code it was made with: run {AGAIN}"
    changed = made.changed_to(present(root))
    if not changed:
        return f"docs/simulation.md was made with {made.commit}; no policy code has changed since."
    return (
        f"docs/simulation.md was made with {made.commit}; policy code has changed since in {len(changed)} module(s), "
        f"{', '.join(changed)}: run {AGAIN}"
    )


def deciding(root: Path) -> dict[str, Path]:
    """Every module that a run reaches by imports and that decides something in it."""
    found: dict[str, Path] = {}
    left = [_ENTRY]
    while left:
        name = left.pop()
        path = root / (name.replace(".", "/") + ".py")
        if name not in found and path.is_file():
            found[name] = path
            left += _imported(ast.parse(path.read_text()))
    return {n: found[n] for n in sorted(found) if n in _DECIDING or not n.startswith(_WORDS)}


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def essence(text: str) -> str:
    """The lines of a module that can change its behaviour, without spaces except their indentation.

    Raises SyntaxError.
    """
    comments = {
        token.start[0]: token.start[1]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    without_effect = {
        row
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node)
        for row in range(node.lineno, (node.end_lineno or node.lineno) + 1)  # type: ignore[attr-defined]
    }
    kept = []
    for row, line in enumerate(text.splitlines(), 1):
        code = line[: comments.get(row)]
        if code.strip() and row not in without_effect:
            kept.append(" " * (len(code) - len(code.lstrip())) + "".join(code.split()))
    return "\n".join(kept)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _commit(root: Path, files: list[Path]) -> str:
    """The commit in words, which also say whether the files have changes that were not committed."""
    head = _git(root, "rev-parse", "--short", "HEAD")
    if head is None:
        return "a tree without a commit"
    is_clean = _git(root, "status", "--porcelain", "--", *map(str, files)) == ""
    return f"commit {head}" + ("" if is_clean else " and changes that were not committed")


def _git(root: Path, *arguments: str) -> str | None:
    """Return the output of git, or None if git failed or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
