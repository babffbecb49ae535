"""Namespaces and shaped links.  These tests need root, as the feature does, and fail without it."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fetchd.marks import TOS_CS1
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

SERVE = """
import socket, sys, threading
def serve(connection):
    with connection:
        if connection.recv(1) == b"e":
            while data := connection.recv(100):
                connection.sendall(data)
        else:
            try:
                while True:
                    connection.sendall(bytes(1 << 20))
            except OSError:
                pass
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""
PING = """
import socket, statistics, sys, threading, time
place, tos, rate_mbit = (sys.argv[1], int(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4])
moved, n_moved = threading.Condition(), 0
def drain(sock):
    global n_moved
    while data := sock.recv(1 << 20):
        with moved:
            n_moved += len(data)
            moved.notify_all()
streams = []
for _ in range(8):
    streams.append(socket.socket())
    streams[-1].setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
    streams[-1].connect(place)
    streams[-1].sendall(b"s")
    threading.Thread(target=drain, args=(streams[-1],), daemon=True).start()
with moved:
    assert moved.wait_for(lambda: n_moved > 1_000_000, 30)
def ping(echo):
    began = time.monotonic()
    echo.sendall(b"x")
    assert echo.recv(1) == b"x"
    return time.monotonic() - began
with socket.create_connection(place) as echo:
    echo.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    echo.sendall(b"e")
    filled, until = 0.0, time.monotonic() + 30
    while filled < 0.7:  # while the streams wait for retransmissions, or for a core, the link is idle
        assert time.monotonic() < until, f"the streams filled {filled:.0%} of the link"
        began, before, times = time.monotonic(), n_moved, []
        while time.monotonic() < began + 0.5:
            times.append(ping(echo))
        filled = (n_moved - before) * 8 / 1e6 / (time.monotonic() - began) / rate_mbit
    print(statistics.median(times))
"""


def interface_without_ranks(made: Links) -> str:
    """The interface without ranks that fetchd finds between host 0 and the hub."""
    code = f"from fetchd.marks import unranked_interface; print(unranked_interface({made.hub_address!r}))"
    command = links.inside(made.host(0), (sys.executable, "-c", code))
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


@contextmanager
def two_linked_by(rate_mbit: int) -> Iterator[Links]:
    assert links.available() == "", links.available()
    made = links.create(f"tt{secrets.token_hex(3)}", 2, rate_mbit=rate_mbit)
    yield made
    links.destroy(made.prefix)
    assert links.names(made.prefix) == []


@pytest.fixture
def two_hosts() -> Iterator[Links]:
    with two_linked_by(100) as made:
        yield made


@pytest.fixture
def slow_hosts() -> Iterator[Links]:
    """Even a busy machine fills this link, and its queue delays longer than the processes' waits for a core."""
    with two_linked_by(10) as made:
        yield made


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
    assert rate_mbit < 115  # there is only an upper bound, so a slow machine cannot break this test


def test_inference_passes_a_fetch_that_fills_the_link(slow_hosts: Links) -> None:
    """Compare the median round trip of a byte while eight streams fill the link, with and without fetchd's mark."""
    assert slow_hosts.ranks in ("prio", "htb")
    assert interface_without_ranks(slow_hosts) == "", "fetchd would pace itself for nothing"
    serve = links.inside(slow_hosts.hub, (sys.executable, "-c", SERVE, slow_hosts.hub_address))
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            place = (slow_hosts.hub_address, server.stdout.readline().strip())
            command = links.inside(slow_hosts.host(0), (sys.executable, "-c", PING, *place))
            seconds = {}
            for tos in (TOS_CS1, 0):
                done = subprocess.run(
                    [*command, str(tos), str(slow_hosts.rate_mbit)], capture_output=True, text=True, timeout=60
                )
                assert done.returncode == 0, done.stderr
                seconds[tos] = float(done.stdout)
        finally:
            server.kill()
    assert seconds[TOS_CS1] < 0.75 * seconds[0], seconds


def test_without_a_ranking_qdisc_the_link_is_shaped_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_RANKS", {"none": (("qdisc", "replace", "parent", "1:1", "no-such-qdisc"),)})
    made = links.create(f"tt{secrets.token_hex(3)}", 1, rate_mbit=100)
    try:
        assert made.ranks == ""
        shown = subprocess.run(
            links.inside(made.host(0), ("tc", "qdisc", "show", "dev", "eth0")),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "tbf" in shown
        assert interface_without_ranks(made) == "eth0", "fetchd would not leave inference any room"
    finally:
        links.destroy(made.prefix)


def test_a_second_creation_under_the_same_name_is_refused_and_takes_nothing_down_that_runs(two_hosts: Links) -> None:
    taken = two_hosts.hub
    with pytest.raises(PlatformError, match="netns add"):
        links._run("ip", "netns", "add", taken)
    assert taken in links.names(two_hosts.prefix)


def test_who_is_not_root_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert links.available() == "network namespaces need root"
