"""The limiter between a child's output and its log."""

from __future__ import annotations

import pytest

from thaw_runtime.python_streams import LineLimiter
from thaw_runtime.python_wire import SENTINEL

END = SENTINEL.encode() + b"\n"
TEXT = b"one\ntwo\n" + END + b"no line end" + END + END


def test_every_cut_gives_the_same_bytes() -> None:
    whole, passed = LineLimiter().feed(TEXT)
    assert passed == 3
    assert whole == b"one\ntwo\n" + END + b"no line end\n" + END + END
    for cut in range(len(TEXT) + 1):
        limiter = LineLimiter()
        first, n_first = limiter.feed(TEXT[:cut])
        second, n_second = limiter.feed(TEXT[cut:])
        assert (first + second, n_first + n_second) == (whole, 3), cut


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_beyond_the_limit_nothing_passes_but_the_sentinel(size: int) -> None:
    limiter = LineLimiter(100)
    data = b"x" * 500 + b"\n" + END + b"next\n" + END
    out, passed = b"", 0
    for at in range(0, len(data), size):
        kept, n = limiter.feed(data[at : at + size])
        out, passed = out + kept, passed + n
    assert passed == 2
    assert out.startswith(b"x" * 100 + b"\nLogs were truncated")
    assert out.endswith(b"bytes.\n" + END + b"next\n" + END)
