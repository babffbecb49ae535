"""Progress on a pipe: a line every few seconds, with the rate of these seconds and the time that is left."""

from __future__ import annotations

from tests.conftest import Clock
from thaw.cli.output.progress import EVERY_S, Lines

MIB = 1 << 20


def test_a_line_comes_every_few_seconds_and_none_for_what_takes_no_time() -> None:
    said, clock = list[str](), Clock()
    advance = Lines("pushing", 100 * MIB, said.append, clock)
    for _ in range(20):
        advance(MIB)
    assert said == []
    clock.now_s += EVERY_S
    advance(5 * MIB)
    assert said == ["pushing: 25 MiB of 100 MiB, 5 MiB/s, 15.00 s to go"]
    clock.now_s += 2 * EVERY_S
    advance(MIB)
    advance(MIB)
    assert said[1:] == ["pushing: 26 MiB of 100 MiB, 102 KiB/s, 740 s to go"]


def test_what_stands_still_promises_no_end() -> None:
    said, clock = list[str](), Clock()
    advance = Lines("hashing", 100 * MIB, said.append, clock)
    clock.now_s += EVERY_S
    advance(0)
    assert said == ["hashing: 0 B of 100 MiB, 0 B/s"]
