"""JSON with one string that comes in pieces."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from thaw.spliced import spliced

TEXT = 'a "quoted" \\ \n\x00\x1f \u2028 \u00e4\u4e2d\U0001f9ca "'


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("n_chars", [1, 2, 5, 1000])
def test_it_is_the_json_of_the_whole(n_chars: int, separators: tuple[str, str]) -> None:
    plain = {"code": TEXT, "other": [TEXT, 1.5, None], "mark": "the marks"}
    whole = json.dumps(plain, ensure_ascii=False, separators=separators).encode()
    pieces = [TEXT[i : i + n_chars].encode() for i in range(0, len(TEXT), n_chars)]
    assert b"".join(spliced({**plain, "code": "the mark"}, "the mark", pieces, separators)) == whole
    assert b"".join(spliced("m", "m", [])) == b'""'


def test_a_value_without_the_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="the mark is not in the value"):
        list(spliced({"code": "x"}, "mark", [b"text"]))


def test_it_takes_no_more_memory_than_a_piece() -> None:
    piece = ("\U0001f9ca" * 25_000).encode()
    tracemalloc.start()
    try:
        n_bytes = sum(len(part) for part in spliced({"code": "mark"}, "mark", (piece for _ in range(300))))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert n_bytes > 30_000_000
    assert peak < 10 * len(piece)
