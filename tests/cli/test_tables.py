"""Tables in a terminal of 80 columns."""

from __future__ import annotations

import pytest

from thaw.cli.output.tables import bit_rate, show, table


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
