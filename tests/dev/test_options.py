"""The options that ``thaw dev up`` accepts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from thaw.dev import components
from thaw.dev.layout import Platform
from thaw.dev.options import Options, parse_rate
from thaw.dev.ports import free_ports, is_free
from thaw.dev.processes import ProcessId
from thaw.errors import BadRequest


@pytest.mark.parametrize(
    ("text", "rate"),
    [("", None), ("200mbit", 25_000_000), ("1gbit", 125_000_000), ("500Kbit", 62_500), ("2.5gbit", 312_500_000)],
)
def test_a_link_is_written_as_tc_writes_it(text: str, rate: int | None) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["200", "fast", "0mbit", "-1mbit", "200 mbit"])
def test_another_rate_is_refused_with_examples(text: str) -> None:
    with pytest.raises(BadRequest, match="is not a rate") as e:
        Options(link=text)
    assert "200mbit" in e.value.hint


def test_a_driver_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadRequest, match="--driver podman is not in this version"):
        Options(driver="podman")


@pytest.mark.parametrize(("asked", "address"), [({}, ""), ({"direct": True}, "127.0.0.1")])
def test_stages_reach_one_another_only_if_that_was_asked_for(
    tmp_path: Path, asked: dict[str, bool], address: str
) -> None:
    options = Options(**asked)
    platform = Platform(
        ProcessId(1, 1),
        "http://127.0.0.1:1",
        "redis://x",
        "redis://x",
        str(tmp_path),
        "/store",
        "",
        "",
        "",
        (),
        1,
        "",
        "process",
        0,
    )
    started = components.host(platform, options, 0)
    assert {c.env["THAW_STAGE_ADDRESS"] for c in started} == {address}


def test_memory_is_shared_by_the_hosts() -> None:
    assert Options(hosts=1, memory_mb=512).host_memory_mb == 512
    assert Options(hosts=16).host_memory_mb <= Options(hosts=1).host_memory_mb <= 8192


def test_free_ports_are_free_different_and_have_free_companions() -> None:
    found = free_ports(8)
    assert len(set(found)) == 8
    assert all(is_free(p) and is_free(p + 10_000) for p in found)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", found[0]))
        assert not is_free(found[0])
