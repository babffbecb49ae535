"""The watch for hangups reports the connection that was closed."""

from __future__ import annotations

import socket
import threading

from thaw_runtime.process.hangup import HangupWatch


def test_an_event_of_a_connection_that_had_the_same_number_before_aborts_nobody() -> None:
    watch, aborted = HangupWatch(), threading.Event()
    ours, theirs = socket.socketpair()
    with ours, watch.watching(ours, aborted.set):
        watch._event(ours.fileno())  # an event that was polled before another connection got the number
        assert not aborted.is_set()
        theirs.close()
        assert aborted.wait(20)
