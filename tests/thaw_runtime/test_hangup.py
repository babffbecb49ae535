"""Whose connection it was that closed."""

from __future__ import annotations

import socket
import threading

from thaw_runtime.process.hangup import HangupWatch


def test_an_event_of_a_connection_that_had_the_same_number_before_aborts_nobody() -> None:
    watch, aborted = HangupWatch(), threading.Event()
    ours, theirs = socket.socketpair()
    with ours, watch.watching(ours, aborted.set):
        watch._event(ours.fileno())  # polled before the number changed hands
        assert not aborted.is_set()
        theirs.close()
        assert aborted.wait(20)
