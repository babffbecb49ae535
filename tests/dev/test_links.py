"""Namespaces and shaped links.  Needs root, as the feature does; says so by failing elsewhere."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from thaw.dev import links
from thaw.dev.links import Links
from thaw.errors import PlatformError

RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    n = 0
    while data := connection.recv(1 << 20):
        n += len(data)
    connection.sendall(b"%d" % n)
"""


@pytest.fixture
def two_hosts() -> Iterator[Links]:
    assert links.available() == "", links.available()
    made = links.create(f"tt{secrets.token_hex(3)}", 2, rate_mbit=100)
    yield made
    links.destroy(made.prefix)
    assert links.names(made.prefix) == []


def test_a_host_receives_no_faster_than_its_link(two_hosts: Links) -> None:
    command = links.inside(two_hosts.host(0), (sys.executable, "-c", RECEIVE, two_hosts.host_address(0)))
    n_bytes = 6_000_000
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        port = int(receiver.stdout.readline())
        began = time.monotonic()
        with socket.create_connection((two_hosts.host_address(0), port), timeout=30) as sender:
            sender.sendall(bytes(n_bytes))
            sender.shutdown(socket.SHUT_WR)
            assert int(sender.recv(100)) == n_bytes
        rate_mbit = n_bytes * 8 / 1e6 / (time.monotonic() - began)
    assert rate_mbit < 115  # an upper bound only: a slow machine cannot break it


def test_a_second_creation_under_the_same_name_is_refused_and_takes_nothing_down_that_runs(two_hosts: Links) -> None:
    taken = two_hosts.hub
    with pytest.raises(PlatformError, match="netns add"):
        links._run("ip", "netns", "add", taken)
    assert taken in links.names(two_hosts.prefix)


def test_who_is_not_root_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert links.available() == "network namespaces need root"
