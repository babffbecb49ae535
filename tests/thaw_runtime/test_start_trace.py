"""The evidence that a phase gives."""

from __future__ import annotations

import json
import threading
import time

import pytest

from relay.thread_account import BlockedTime
from thaw.tracing.hops import HopPath
from thaw.tracing.trace import Phase
from thaw_runtime.engine.protocol import Finished, Logprobs, Token, Usage
from thaw_runtime.engine.wire import Events, decode, encode
from thaw_runtime.process.start_trace import Busy, StartTrace


def compute(cpu_s: float) -> None:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


def test_a_phase_says_what_cpu_it_used_and_keeps_what_it_was_told() -> None:
    trace = StartTrace(group_id="g")
    with trace.phase(Phase.MODEL_BEGIN) as notes:
        compute(0.02)
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


def test_a_phase_that_another_thread_began_carries_what_that_thread_spent() -> None:
    trace = StartTrace()
    with trace.phase(Phase.LIBRARIES_BEGIN):
        compute(0.01)
    before, end = trace.events
    trace.began_at(before.mono_ns - 3_000_000_000, (2.0, 0.5))
    begin, after = trace.events
    assert before.mono_ns - begin.mono_ns == before.wall_ns - begin.wall_ns == 3_000_000_000
    assert float(str(after.attrs["cpu_s"])) - float(str(end.attrs["cpu_s"])) == pytest.approx(2.0)
    assert float(str(after.attrs["core_wait_s"])) >= 0.5


def test_asleep_counts_neither_computing_nor_waiting_for_a_core() -> None:
    asleep, busy, began = BlockedTime(), Busy(), time.monotonic()
    for _ in range(2):
        with asleep.counted():
            compute(0.01)
            threading.Event().wait(0.02)  # this is the waiting time to count
    spent, wall_s = busy.attrs(), time.monotonic() - began
    assert spent["cpu_s"] >= 0.02
    assert 0.039 <= asleep.seconds <= wall_s - spent["cpu_s"] + 0.001


@pytest.mark.parametrize("logprobs", [None, Logprobs(-0.5, ((7, -0.5), (9, -1.5)))])
@pytest.mark.parametrize("spent", [None, {"cpu_s": 0.08, "core_wait_s": 0.03}])
@pytest.mark.parametrize("hops", [(), (HopPath.RELAY, HopPath.TCP)])
def test_a_token_brings_what_was_spent_on_it_and_how_it_travelled_to_the_proxy(
    logprobs: Logprobs | None, spent: dict[str, float] | None, hops: tuple[HopPath, ...]
) -> None:
    end = Finished("stop", Usage(3, 4), hops)
    sent = Events((("r1", Token(0, 7, logprobs, spent, hops)), ("r2", Token(3, 8)), ("r1", end)))
    got = decode(json.loads(json.dumps(encode(sent))))
    assert isinstance(got, Events)
    assert got == sent
    assert [e.spent for _, e in got.events if isinstance(e, Token)] == [spent, None]
    assert [e.hops for _, e in got.events if isinstance(e, (Token, Finished))] == [hops, (), hops]
