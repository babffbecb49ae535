"""Finding out which connection has closed."""

from __future__ import annotations

import socket
import threading

import pytest

from thaw.process.hangup import HangupWatcher


@pytest.fixture
def watcher() -> HangupWatcher:
    return HangupWatcher()


def test_a_peer_that_closes_or_ends_its_side_is_noticed_once(watcher: HangupWatcher) -> None:
    watcher.start()
    for hang_up in (socket.socket.close, lambda sock: sock.shutdown(socket.SHUT_WR)):
        gone = threading.Semaphore(0)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            unwatch = watcher.watch(ours, lambda gone=gone: gone.release())  # type: ignore[misc]
            hang_up(theirs)
            assert gone.acquire(timeout=20)
            assert not gone.acquire(blocking=False)
            unwatch()
    watcher.stop()
    watcher._thread.join(20)


def test_after_its_end_a_watch_tells_nothing(watcher: HangupWatcher) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        told: list[str] = []
        watcher.watch(ours, lambda: told.append("first"))()
        unwatch = watcher.watch(ours, lambda: told.append("second"))
        theirs.close()
        watcher._event(ours.fileno())
        unwatch()
        assert told == ["second"]
        assert watcher._callbacks == {}


def test_an_event_of_a_connection_that_had_the_same_number_before_tells_nothing(watcher: HangupWatcher) -> None:
    gone = threading.Event()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        unwatch = watcher.watch(ours, gone.set)
        watcher._event(ours.fileno())  # polled before the number changed hands
        assert not gone.is_set()
        theirs.close()
        watcher._event(ours.fileno())
        assert gone.is_set()
        unwatch()
