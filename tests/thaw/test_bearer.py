"""The comparison of bearer tokens."""

from __future__ import annotations

import pytest

from thaw.bearer import is_bearer


@pytest.mark.parametrize(
    ("authorization", "tokens", "lets_in"),
    [
        ("Bearer a", ("a",), True),
        ("Bearer b", ("a", "b"), True),
        ("Bearer ", ("",), False),
        ("Bearer ", ("a", ""), False),
        ("", ("",), False),
        ("a", ("a",), False),
        ("Bearer aa", ("a",), False),
        ("Bearer \udcff\u00e9", ("a",), False),
    ],
)
def test_a_header_lets_in_with_one_of_the_tokens_and_never_with_none(
    authorization: str, tokens: tuple[str, ...], lets_in: bool
) -> None:
    assert is_bearer(authorization, *tokens) is lets_in
