"""What a phase says of itself."""

from __future__ import annotations

import time

from thaw.trace import Phase
from thaw_runtime.start_trace import StartTrace


def test_a_phase_says_what_cpu_it_used_and_keeps_what_it_was_told() -> None:
    trace = StartTrace(group_id="g")
    with trace.phase(Phase.MODEL_BEGIN) as notes:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        notes.n_bytes = 7
    begin, end = trace.events
    assert (begin.name, end.name, end.n_bytes) == (Phase.MODEL_BEGIN, Phase.MODEL_END, 7)
    assert 0.02 <= float(str(end.attrs["cpu_s"])) <= (end.mono_ns - begin.mono_ns) / 1e9 + 0.001


def test_a_phase_that_fails_ends_too() -> None:
    trace = StartTrace()
    try:
        with trace.phase(Phase.KV_BEGIN):
            raise ValueError
    except ValueError:
        pass
    assert [e.name for e in trace.events] == [Phase.KV_BEGIN, Phase.KV_END]
