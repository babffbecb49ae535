"""Record when a child process was stopped (SIGSTOP) and continued.  The kernel tells the parent: nothing is polled."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Final

from thaw.tracing.trace import Phase, TraceEvent, event
from thaw_runtime.process.signals import signal_name

_KEPT: Final = 64
"""The number of events that are kept: 32 stops are enough for the starts and requests that run at one time."""


class StopWatch:
    """Watches a child from its start until its death, without reaping it."""

    def __init__(self, pid: int, process: str) -> None:
        """``process`` is the child's name in the trace."""
        self._pid, self._process = pid, process
        self._events: deque[TraceEvent] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()
        self._taking = threading.Lock()
        self._is_stopped = False

    def begin(self) -> None:
        threading.Thread(target=self._run, name="stops", daemon=True).start()

    def since(self, mono_ns: int) -> tuple[TraceEvent, ...]:
        """The stops that were not over at ``mono_ns`` of the monotonic clock, as events without group or activation.  A
        child that has just answered has gone on, whether or not the thread has heard of it."""
        self._take()
        with self._lock:
            events = tuple(self._events)
        first = next((i for i, e in enumerate(events) if e.name == Phase.STOPPED_END and e.mono_ns >= mono_ns), None)
        if first is None:
            return events[-1:] if events and events[-1].name == Phase.STOPPED_BEGIN else ()
        return events[max(0, first - 1) :]

    def _run(self) -> None:
        while True:
            try:
                # WNOWAIT: another thread must be able to reap a dead child, and since() to take what is new
                news = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOWAIT)
                if news is None or news.si_code not in (os.CLD_STOPPED, os.CLD_CONTINUED):
                    return
            except ChildProcessError:
                return  # the child was reaped, or it is not our child
            self._take()

    def _take(self) -> None:
        """Note a stop or a continuation that was not noted yet."""
        with self._taking:
            try:
                news = os.waitid(os.P_PID, self._pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
            except ChildProcessError:
                return
            if news is not None:
                self._note(news.si_code == os.CLD_STOPPED, signal_name(news.si_status))

    def _note(self, is_stopped: bool, signal: str) -> None:
        attrs = {"process": self._process, "signal": signal}
        with self._lock:
            if is_stopped or not self._is_stopped:  # the child was continued, and we did not see its stop
                self._events.append(event(Phase.STOPPED_BEGIN, attrs=attrs))
            if not is_stopped:
                self._events.append(event(Phase.STOPPED_END))
            self._is_stopped = is_stopped
