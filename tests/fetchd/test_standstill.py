"""Which delays of a timer count as a time in which the process did not run."""

from __future__ import annotations

import threading
import time

from fetchd.standstill import Standstill


def compute(cpu_s: float) -> None:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


def test_a_late_timer_while_no_thread_was_busy_is_a_stop() -> None:
    standstill = Standstill()
    standstill.expect(0.05)
    threading.Event().wait(0.5)
    standstill.look()
    assert len(standstill.since(0)) == 1


def test_a_thread_that_ended_meanwhile_makes_no_stop_of_the_time_in_which_another_was_busy() -> None:
    computed, may_end = threading.Event(), threading.Event()

    def work() -> None:
        compute(0.6)
        computed.set()
        may_end.wait(30)

    thread, standstill = threading.Thread(target=work), Standstill()
    thread.start()
    assert computed.wait(30)
    standstill.expect(0.05)
    may_end.set()
    thread.join()
    compute(0.4)
    standstill.look()
    assert standstill.since(0) == ()
