"""Sockets to the relay server across restarts of an invoker."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from invoker.drivers.relay_socket import RelaySockets


def test_a_relay_socket_survives_an_invoker_that_dies_before_it_has_opened_it_again(run_dir: Path) -> None:
    directory = run_dir / "relays"
    with closing(RelaySockets(directory)) as killed:
        names = [
            killed.inside(f"redis://127.0.0.1:{port}", "/there").partition("?")[0].rpartition("/")[2] for port in (1, 2)
        ]
        RelaySockets(directory)  # this invoker dies before it opens the sockets again
        with closing(RelaySockets(directory)) as following:
            following.reopen()
            assert sorted(path.name for path in directory.iterdir()) == sorted(names)
    with closing(RelaySockets(directory)) as last:
        last.reopen()  # an invoker that ended normally leaves no socket
        assert list(directory.glob("*.sock")) == []
