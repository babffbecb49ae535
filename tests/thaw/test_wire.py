"""Dataclasses ↔ JSON."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NewType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thaw import wire
from thaw.errors import ProtocolError

Name = NewType("Name", str)


class Colour(enum.StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Inner:
    name: Name
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Outer:
    inner: Inner
    pair: tuple[int, str]
    colour: Colour = Colour.RED
    ratio: float = 0.5
    maybe: int | None = None
    table: dict[str, Inner] = field(default_factory=dict)


@given(
    st.text(), st.lists(st.integers()), st.integers(), st.text(), st.floats(allow_nan=False), st.none() | st.integers()
)
def test_what_was_written_is_read_back(
    name: str, sizes: list[int], a: int, b: str, ratio: float, maybe: int | None
) -> None:
    value = Outer(Inner(Name(name), tuple(sizes)), (a, b), ratio=ratio, maybe=maybe, table={"k": Inner(Name(name))})
    assert wire.loads(Outer, wire.dumps(value)) == value


def test_unknown_fields_of_a_newer_peer_are_ignored() -> None:
    assert wire.from_plain(Inner, {"name": "x", "later": 1}) == Inner(Name("x"))


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"pair": [1, "a"]}, "$.inner: missing in Outer"),
        ({"inner": {"name": 3}, "pair": [1, "a"]}, "$.inner.name: expected str, got 3"),
        ({"inner": {"name": "x", "sizes": [1, "2"]}, "pair": [1, "a"]}, "$.inner.sizes[1]: expected int, got '2'"),
        ({"inner": {"name": "x", "sizes": [True]}, "pair": [1, "a"]}, "$.inner.sizes[0]: expected int, got True"),
        ({"inner": {"name": "x"}, "pair": [1]}, "$.pair: expected 2 items, got [1]"),
        ({"inner": {"name": "x"}, "pair": [1, "a"], "colour": "blue"}, "$.colour: 'blue' is not a Colour"),
        ([], "$: expected an object, got []"),
    ],
)
def test_a_wrong_value_is_named_by_its_json_path(plain: object, message: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        wire.from_plain(Outer, plain)
    assert str(caught.value) == message


def test_what_is_not_json_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="not JSON"):
        wire.loads(Inner, b"{")
    with pytest.raises(ProtocolError, match="not JSON"):
        wire.loads(object, b"[" * 100_000)


def test_half_a_surrogate_pair_crosses_as_json_allows() -> None:
    assert wire.dumps("ü\ud800") == b'"\\u00fc\\ud800"'
    assert wire.loads(str, wire.dumps("ü\ud800")) == "ü\ud800"
    assert wire.dumps("ü") == '"ü"'.encode()


@dataclass(frozen=True, slots=True)
class _Either:
    one: tuple[int, ...] | dict[str, int] | str = ""
    maybe: int | None = None
    seconds: float = 0.0


@pytest.mark.parametrize("value", [_Either((1, 2)), _Either({"a": 1}), _Either("x", 3, 1.5), _Either((), None, 2.0)])
def test_every_alternative_of_a_union_is_read_back_as_itself(value: _Either) -> None:
    assert wire.loads(_Either, wire.dumps(value)) == value


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"one": None}, r"\$.one: expected str, got None"),
        ({"one": 1.5}, r"\$.one: expected str, got 1.5"),
        ({"maybe": "x"}, r"\$.maybe: expected int, got 'x'"),
        ({"seconds": "x"}, r"\$.seconds: expected float, got 'x'"),
        ({"seconds": None}, r"\$.seconds: expected float, got None"),
    ],
)
def test_a_value_that_is_no_alternative_of_a_union_is_refused(plain: object, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        wire.from_plain(_Either, plain)


def test_a_whole_number_is_a_float_where_a_float_is_expected() -> None:
    read = wire.from_plain(_Either, {"seconds": 2})
    assert type(read.seconds) is float
