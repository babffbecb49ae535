"""Progress on a pipe, and tables in a terminal of 80 columns."""

from __future__ import annotations

import pytest

from tests.conftest import Clock
from thaw.cli.output.progress import EVERY_S, Lines
from thaw.cli.output.tables import bit_rate, show, table

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


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_headings_stay_whole_and_cells_are_broken_between_words(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table("host", "device", "free / memory", "link", "share", "cells", "instances", "seen")
    rows.add_row(
        "host-1 (draining)", "cpu", "1000 MiB / 3.95 GiB", bit_rate(1.25e9), "enforced", "1", "2", "13 min ago"
    )
    show(rows)
    lines = [line for line in lines_of(capsys) if line.strip()]
    assert max(map(len, lines)) <= 80
    words = {word for line in lines for word in line.split()}
    assert {"host-1", "(draining)", "1000", "3.95", "enforced", "instances", "Gbit/s"} <= words


def test_an_activations_id_is_never_broken(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table("datetime", "activation id", "start", "duration", "status", "action")
    rows.add_row(
        "2026-11-21 13:45:11", "0123456789abcdef" * 2, "prewarmed", "12345 ms", "[red]application error[/red]", "c" * 40
    )
    show(rows)
    assert any("0123456789abcdef" * 2 in line for line in lines_of(capsys))


def test_a_link_is_told_as_it_is_sold() -> None:
    assert [bit_rate(b) for b in (50e6, 125e6, 1.25e9)] == ["400 Mbit/s", "1 Gbit/s", "10 Gbit/s"]
