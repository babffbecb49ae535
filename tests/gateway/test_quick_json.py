"""The output of the quick encoder decodes to the value that was encoded."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import quick_json
from thaw import wire

CHARACTERS = st.characters(codec=None, exclude_categories=())  # half surrogate pairs, too
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(CHARACTERS)
)
PLAIN = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(CHARACTERS), inner), max_leaves=20
)


@settings(max_examples=50, deadline=None)
@given(PLAIN)
def test_its_json_has_the_same_value(plain: Any) -> None:
    assert json.loads(quick_json.encode(plain)) == plain


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_a_piece_stands_in_a_string_as_the_platforms_encoder_writes_it(text: str) -> None:
    assert quick_json.escaped(text.encode()) == wire.encode(text)[1:-1]


def test_a_value_that_only_pythons_encoder_takes_is_written_by_it() -> None:
    for plain in ({"n": 2**64}, {"half a pair": "\ud800"}, [-(2**70)]):
        assert quick_json.encode(plain) == wire.encode(plain)
