"""A benchmark of floods notices one that was none, and a tenant whose answers do not come."""

from __future__ import annotations

import socket

import pytest

from bench._flood import was_flooded
from bench._honest import Honest


@pytest.mark.parametrize(
    ("kind", "told", "was"),
    [
        ("requests", '{"200": 32, "429": 9}', True),
        ("requests", '{"429": 9000, "200": 3}', False),
        ("accepted", '{"202": 50}', True),
        ("accepted", '{"200": 50, "0": 7}', False),
        ("deploys", '{"0": 70}', False),
        ("slow_readers", '{"there": 200, "cut": 9}', True),
        ("slow_readers", '{"there": 0, "cut": 9}', False),
    ],
)
def test_a_flood_is_one_when_it_was_answered(kind: str, told: str, was: bool) -> None:
    assert was_flooded(kind, told) == was


def test_a_tenant_whose_connections_break_ends_the_program() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        tenant = Honest.__new__(Honest)
        tenant.port, tenant._headers = nobody.getsockname()[1], {}
        with pytest.raises(SystemExit, match="the function's answer was none: "):
            tenant.ask(30.0, lists=True)
