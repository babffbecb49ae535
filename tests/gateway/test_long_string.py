"""One long string leaves JSON in pieces, wherever its windows end."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from gateway.api import bounded_json
from gateway.api.openwhisk.long_string import LongString
from thaw.errors import BadRequest, TooLarge

MARK = "the mark"
LONGEST = 40
TEXTS = [
    "x" * 100,
    'a "quoted" \\ backslash \\\\" and \n\t\x01 control ' * 4,
    "\\" * 99,
    '\\"' * 50,
    "\U0001f9ca\u4e2d\u00e4a" * 30,
    "\u0000" * 50,
    "\\u12" * 30,
]


def split(data: bytes, *sizes: int) -> tuple[Any, bytes, list[bytes]]:
    """The rest, the long string's text, and its pieces."""
    pieces: list[bytes] = []
    windows = LongString(LONGEST, 2000, MARK, pieces.append)
    at, sizes = 0, sizes or (len(data),)
    while at < len(data):
        n = sizes[len(pieces) % len(sizes)]
        windows.feed(data[at : at + n])
        at += n
    return bounded_json.parse(windows.rest()), b"".join(pieces), pieces


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_it_is_the_same_text_wherever_the_windows_end(text: str, is_ascii: bool) -> None:
    value = {"a": ['"', "\\", "\\u005c", {"b": ""}], "exec": {"code": text, "kind": "k\\"}, "z": '\\"'}
    data = json.dumps(value, ensure_ascii=is_ascii).encode()
    value["exec"]["code"] = MARK  # type: ignore[index, call-overload]
    for n_bytes in range(1, 30):
        rest, found, pieces = split(data, n_bytes)
        assert rest == value
        assert found.decode() == text
        assert all(piece.decode() is not None for piece in pieces), "each is of whole characters"


def test_random_texts_and_windows() -> None:
    rng = random.Random(7)
    for _ in range(300):
        text = "".join(rng.choices('\\"/u0\n\u00e4\u4e2d\U0001f9cax', k=rng.randint(41, 200)))
        escaped = "".join(
            f"\\u{ord(c):04x}"
            if c < "\uffff" and rng.random() < 0.4
            else json.dumps(c, ensure_ascii=rng.random() < 0.5)[1:-1]
            for c in text
        )
        rest, found, _ = split(f'{{"a\\\\": "{escaped}"}}'.encode(), *(rng.randint(1, 25) for _ in range(5)))
        if len(escaped.encode()) > LONGEST:
            assert (rest, found.decode()) == ({"a\\": MARK}, text)


@pytest.mark.parametrize("value", [[], {}, "short", 7, {"a": "b" * LONGEST}, ["\\"], ['"'] * 100])
def test_json_without_a_long_string_stays(value: object) -> None:
    for n_bytes in range(1, 9):
        assert split(json.dumps(value).encode(), n_bytes) == (value, b"", [])


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": "' + b"x" * 100,
        b'{"a": "' + b"x" * 100 + b"\\",
        b'{"a": "' + b"x" * 100 + b"\\q" + b'"}',
        b'{"a": "' + b"x" * 100 + b"\\ud83e" + b"x" * 100 + b'"}',
        b'{"a": "' + b"x" * 100 + b"\\udd5a" + b'"}',
        b'{"a": "' + b"x" * 100 + b"\\u12" + b'"}',
        b'{"a": "' + b"x" * 100 + b'\n"}',
        b'{"a": "' + b"x" * 100 + b'\xff"}',
        b'{"a": "' + b"\x80" * 100 + b'"}',
        b'{"a": "' + "\u4e2d".encode() * 50 + b'\xe4\xb8"}',
        b'{"a": \\"' + b"x" * 100 + b'"}',
        b'{"a": \\\\"' + b"x" * 100 + b'"}',
        b"\\",
        b'"',
        b'"' + b"x" * 100 + b'" "',
    ],
)
def test_what_is_no_json_is_a_400_wherever_the_windows_end(data: bytes) -> None:
    for n_bytes in (*range(1, 30), len(data)):
        with pytest.raises(BadRequest):
            split(data, n_bytes)


def test_a_second_long_string_and_much_beside_the_long_one_are_refused_as_soon_as_they_are_seen() -> None:
    with pytest.raises(TooLarge, match="two strings have more than 40 bytes"):
        split(json.dumps(["x" * 41, "y" * 41]).encode(), 7)
    with pytest.raises(TooLarge, match="more than 2000 bytes beside the code"):
        split(json.dumps(["x" * 100, *range(1000)]).encode(), 7)
