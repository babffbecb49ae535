"""docs/security.md names tests that exist, and every attack has one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if re.match(r"\| (?!attack )", line)]


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_each_promise_names_a_test_that_exists() -> None:
    assert len(ROWS) >= 30
    for attack, _promise, test in ROWS:
        named = re.fullmatch(r"`(tests/[\w/]+\.py): (test_\w+)`", test.strip())
        assert named or test.strip() == "the same", f"no test: {attack}"
        assert not named or named[2] in functions_of(ROOT / named[1]), f"{named[1]} has no {named[2]}"


def test_every_test_of_an_attack_is_on_the_page() -> None:
    files = sorted((ROOT / "tests" / "security").glob("test_*.py"))
    kept = {name for path in files if path != Path(__file__) for name in functions_of(path) if name.startswith("test_")}
    assert {name for name in kept if f"{name}`" not in PAGE} <= NO_ATTACK


NO_ATTACK = {
    "test_a_stranger_is_told_how_to_send_a_key",
    "test_a_key_of_no_namespace_or_role_is_refused",
    "test_a_prefix_that_cannot_be_read_stops_the_start_with_the_settings_name",
    "test_a_prefix_without_a_place_allows_every_place_of_its_scheme_and_no_other",
    "test_a_uri_is_compared_by_its_parts",
    "test_what_is_below_a_prefix_may_be_run_however_it_is_written",
    "test_a_network_that_cannot_be_read_stops_the_start_with_the_settings_name",
    "test_an_operator_sees_what_each_namespace_has",
}
"""What is checked beside the attacks."""
