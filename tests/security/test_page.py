"""docs/security.md and security-availability.md name tests that exist, and every attack has a line."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
AVAILABILITY = (ROOT / "docs" / "security-availability.md").read_text()
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if re.match(r"\| (?!attack )", line)]


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_each_promise_names_a_test_that_exists() -> None:
    assert len(ROWS) >= 30
    for attack, _promise, test in ROWS:
        named = re.fullmatch(r"`(tests/[\w/]+\.py): (test_\w+)`", test.strip())
        assert named or test.strip() == "the same", f"no test: {attack}"
        assert not named or named[2] in functions_of(ROOT / named[1]), f"{named[1]} has no {named[2]}"


def test_what_nobody_can_stop_is_tested() -> None:
    rows = [line.strip("|").split("|")[2] for line in AVAILABILITY.splitlines() if re.match(r"\| (?!attack )", line)]
    assert len(rows) >= 20
    known = {name for path in (ROOT / "tests").rglob("test_*.py") for name in functions_of(path)}
    for named in (re.findall(r"`([^`]+)`", row) for row in rows):
        assert named
        assert all((ROOT / each).exists() if each.endswith(".py") else each in known for each in named), named


def test_every_test_of_an_attack_is_on_the_page() -> None:
    files = sorted((ROOT / "tests" / "security").glob("test_*.py"))
    single = [p for p in files if p != Path(__file__) and f"`tests/security/{p.name}`" not in AVAILABILITY]
    kept = {name for path in single for name in functions_of(path) if name.startswith("test_")}
    assert {name for name in kept if f"{name}`" not in PAGE + AVAILABILITY} <= NO_ATTACK


NO_ATTACK = {
    "test_a_stranger_is_told_how_to_send_a_key",
    "test_a_key_of_no_namespace_or_role_is_refused",
    "test_a_prefix_that_cannot_be_read_stops_the_start_with_the_settings_name",
    "test_a_prefix_without_a_place_allows_every_place_of_its_scheme_and_no_other",
    "test_a_uri_is_compared_by_its_parts",
    "test_what_is_below_a_prefix_may_be_run_however_it_is_written",
    "test_a_network_that_cannot_be_read_stops_the_start_with_the_settings_name",
    "test_an_operator_sees_what_each_namespace_has",
    "test_a_body_in_chunks_gets_more_memory_on_its_way",
    "test_the_document_names_every_route_and_no_other",
    "test_the_document_is_served",
    "test_the_document_names_every_parameter_of_v1_and_no_other",
    "test_what_the_document_describes_is_accepted_and_what_it_does_not_is_refused",
    "test_no_request_of_very_many_is_a_500",
    "test_a_client_that_expects_100_gets_it_before_its_body",
    "test_a_body_arrives_whole_however_it_is_cut",
    "test_requests_sent_together_are_answered_in_their_order",
    "test_a_gateway_that_stops_does_not_wait_for_those_that_send_nothing",
}
"""Tests that check other properties than the attacks."""
