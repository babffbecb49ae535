"""Streams and their readers, without processes: how readers replace one another, and how streams end."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from gateway.serving import streams as module
from gateway.serving.answers.event_ids import fingerprint
from gateway.serving.answers.kept import Bounds, token_bytes
from gateway.serving.call import Call
from gateway.serving.dispatch import Dispatcher
from gateway.serving.hangup import ClientGone, Hangup
from gateway.serving.routing.throttle import Throttle
from gateway.serving.runs import Outcome
from gateway.serving.streams import Reader, Streams
from relay.protocol.messages import RunFinished, RunToken
from relay.state.streams import HandedOver
from tests.conftest import Clock
from tests.gateway.calls import CHAT, GUEST, action_of, call_of
from thaw.action import KIND_LLM
from thaw.activation import ActivationStatus
from thaw.errors import Conflict, PlatformError, Throttled, TimeLimitExceeded, WorkerLost
from thaw.ids import ActivationId, Namespace

ACTION = action_of(CHAT, KIND_LLM)
END = RunFinished("length", 3, 2)
ONE = ActivationId("1")
W0, W1 = (RunToken(i, 100 + i, f"w{i} ") for i in range(2))


class Worker:
    """Replaces llm_tokens(): it yields the test's items, and ends when its client goes, as a run does."""

    def __init__(self) -> None:
        self.steps: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def tokens(self, _: Dispatcher, call: Call) -> Iterator[Any]:
        with call.hangup.waking(lambda: self.steps.put(None)):
            while (step := self.steps.get(timeout=20)) is not None:
                if isinstance(step, Exception):
                    raise step
                yield step
                if isinstance(step, RunFinished):
                    return
        call.hangup.check()

    def fault(self, _: Call, error: Exception) -> PlatformError:
        return PlatformError(f"our own: {error}")

    def put(self, count: int, first: int = 0) -> None:
        for index in range(first, first + count):
            self.steps.put(RunToken(index, 100 + index, f"w{index} "))


class RunsHangup(Hangup):
    """``waits``: released when the run begins, and whenever it waits for its reader."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Semaphore(0)

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        with super().waking(wake):
            self.waits.release()
            yield


class Platform:
    """One gateway's streams, with a throttle of one request."""

    def __init__(self, worker: Worker, patch: pytest.MonkeyPatch) -> None:
        self.worker, self.patch = worker, patch
        self.ended: queue.SimpleQueue[tuple[Call, Outcome]] = queue.SimpleQueue()
        self.throttle = Throttle(100, 1, Clock())
        bounds = Bounds(60, 1 << 20, 1 << 20)
        put = lambda call, outcome: self.ended.put((call, outcome))  # noqa: E731
        self.streams = Streams(cast(Dispatcher, worker), put, self.throttle, bounds, 4)
        self.streams.start()
        self.cuts: list[str] = []

    def begin(self, hangup: Hangup | None = None, *, body: Any = (), age_s: float = 0, **more: Any) -> Reader:
        body = dict(body)
        call = call_of(ONE, ACTION, body, hangup=RunsHangup(), endpoint="chat", received_s=time.monotonic() - age_s)
        self.throttle.enter(GUEST)
        n_bytes = fingerprint(ACTION, "chat", body).n_bytes
        cut = lambda: self.cuts.append("first")  # noqa: E731
        return self.streams.begin(call, hangup or Hangup(), cut, body_bytes=n_bytes, **more)

    def begin_lagging(self, hangup: Hangup | None = None, *, age_s: float = 0) -> Reader:
        """A stream of four tokens whose reader has fetched none, so the run waits after the second one."""
        reader = self.begin(hangup, age_s=age_s)
        for index in range(4):
            self.worker.steps.put(RunToken(index, 100 + index, "x" * (1 << 19)))
        self.worker.steps.put(END)
        waits = cast(RunsHangup, reader.stream.call.hangup).waits
        for _ in ("the run", "its wait"):
            assert waits.acquire(timeout=60)
        assert (len(reader.stream.kept.tokens), self.worker.steps.qsize()) == (2, 3)
        return reader

    def must_leave_within(self, seconds: float) -> None:
        """A reader that another one replaces."""
        self.patch.setattr(module, "_LEAVES_S", seconds)

    def attach(self) -> Reader:
        found = self.streams.attach(ONE, Hangup(), lambda: self.cuts.append("next"))
        assert found is not None
        return found

    def outcome(self) -> Outcome:
        return self.ended.get(timeout=60)[1]

    def is_counted(self) -> bool:
        try:
            with self.throttle.counted(GUEST):
                return False
        except Throttled:
            return True


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    worker = Worker()
    monkeypatch.setattr(module, "llm_tokens", worker.tokens)
    made = Platform(worker, monkeypatch)
    yield made
    made.streams.stop(10)


def indexes(reader: Reader) -> list[int]:
    return [step.index for step in reader.steps() if isinstance(step, RunToken)]


def test_each_reader_gets_the_answer_from_its_first_token(platform: Platform) -> None:
    first = platform.begin()
    platform.worker.put(2)
    steps = first.steps()
    assert [next(steps), next(steps)] == [W0, W1]
    assert platform.streams.leave(first, resumable=True)
    assert not platform.streams.leave(first, resumable=True)
    second = platform.attach()
    platform.worker.steps.put(END)
    assert list(second.steps()) == [W0, W1, END]
    assert platform.outcome().status is ActivationStatus.SUCCESS


def test_a_reader_learns_what_the_run_waits_for_now_and_not_what_it_waited_for(platform: Platform) -> None:
    first = platform.begin()
    for step in ("queued", W0, "the worker was lost", "queued"):
        platform.worker.steps.put(step)
    steps = first.steps()
    for _ in range(4):
        next(steps)
    platform.streams.leave(first, resumable=True)
    second = platform.attach().steps()
    assert [next(second), next(second)] == ["queued", W0]


def test_a_reader_that_does_not_leave_in_time_is_cut(platform: Platform) -> None:
    """It may be blocked in a write to a client that reads nothing, and would keep its thread for ever."""
    platform.must_leave_within(0.01)
    stuck = platform.begin()
    second = platform.attach()
    assert platform.cuts == ["first"]
    with pytest.raises(Conflict):
        next(stuck.steps())
    assert not platform.streams.leave(stuck, resumable=True)
    platform.worker.put(2)
    platform.worker.steps.put(END)
    assert indexes(second) == [0, 1]
    assert platform.cuts == ["first"]


def test_a_reader_of_a_stream_that_moved_is_cut_as_well(platform: Platform) -> None:
    platform.must_leave_within(0.01)
    stuck = platform.begin()
    platform.streams.give_away(ONE)
    assert platform.cuts == ["first"]
    assert not platform.streams.leave(stuck, resumable=True)


def test_one_client_at_a_time_waits_for_the_reader_that_it_replaces(platform: Platform) -> None:
    platform.must_leave_within(20.0)
    stuck = platform.begin()
    found: list[Reader] = []
    replacing = threading.Thread(target=lambda: found.append(platform.attach()))
    waits, wait_for = threading.Event(), stuck.stream.changed.wait_for
    stuck.stream.changed.wait_for = lambda *args: (waits.set(), wait_for(*args))[1]  # type: ignore[method-assign]
    replacing.start()
    assert waits.wait(60)
    with pytest.raises(Conflict):
        platform.attach()
    assert not platform.streams.leave(stuck, resumable=True)
    replacing.join()
    assert platform.cuts == []
    platform.streams.leave(found[0], resumable=True)
    platform.attach()


def test_reconnections_to_a_stream_count_in_their_minute(platform: Platform) -> None:
    reader = platform.begin()
    for _ in range(99):
        platform.streams.leave(reader, resumable=True)
        reader = platform.attach()
    platform.streams.leave(reader, resumable=True)
    with pytest.raises(Throttled, match="in the last minute"):
        platform.attach()


def test_a_reader_that_leaves_is_not_cut(platform: Platform) -> None:
    platform.must_leave_within(20.0)
    first = platform.begin()
    platform.worker.put(1)
    steps = first.steps()
    next(steps)

    def read_on() -> None:
        with pytest.raises(Conflict):
            next(steps)
        platform.streams.leave(first, resumable=True)

    reading = threading.Thread(target=read_on)
    reading.start()
    second = platform.attach()
    reading.join()
    assert platform.cuts == []
    assert next(second.steps()) == W0


def test_a_stream_counts_while_it_runs_or_is_read_and_never_twice(platform: Platform) -> None:
    first = platform.begin()
    platform.streams.leave(first, resumable=True)
    assert platform.is_counted()
    second = platform.attach()
    platform.worker.steps.put(END)
    assert list(second.steps()) == [END]
    assert platform.is_counted()  # its client still reads
    platform.streams.leave(second, resumable=True)
    assert not platform.is_counted()
    with platform.throttle.counted(GUEST), pytest.raises(Throttled):
        platform.attach()
    third = platform.attach()
    assert platform.is_counted()
    platform.streams.leave(third, resumable=True)
    assert not platform.is_counted()


def test_a_stream_without_a_reader_gives_the_place_of_its_thread_to_another_request(platform: Platform) -> None:
    throttle = platform.throttle = platform.streams._throttle = Throttle(1_000, 1, places=1)
    other = Namespace("other")
    first = platform.begin()
    with pytest.raises(Throttled):
        throttle.enter(other)
    platform.streams.leave(first, resumable=True)
    throttle.enter(other)
    with pytest.raises(Throttled, match="0 of this gateway's threads are free"):
        platform.attach()
    throttle.leave(other)
    second = platform.attach()
    with pytest.raises(Throttled):
        throttle.enter(other)
    platform.streams.leave(second, resumable=True)
    assert platform.is_counted()
    platform.worker.steps.put(END)
    platform.outcome()
    platform.streams.stop(10)
    throttle.enter(GUEST)


def test_a_reader_whose_client_hangs_up_wakes(platform: Platform) -> None:
    hangup = Hangup()
    steps = platform.begin(hangup).steps()
    threading.Timer(0.05, hangup.set).start()
    with pytest.raises(ClientGone):
        next(steps)


@pytest.mark.parametrize("error", [WorkerLost("lost"), ValueError("a defect")])
def test_an_error_reaches_the_reader_and_the_record(platform: Platform, error: Exception) -> None:
    reader = platform.begin()
    platform.worker.put(1)
    platform.worker.steps.put(error)
    steps = reader.steps()
    assert next(steps) == W0
    with pytest.raises(PlatformError) as seen:
        next(steps)
    assert seen.value is error or seen.value.message == "our own: a defect"
    assert platform.outcome().status is ActivationStatus.INTERNAL_ERROR
    platform.streams.leave(reader, resumable=True)
    assert platform.streams.find(ONE) is None
    assert not platform.is_counted()


def test_a_reader_that_fetches_nothing_makes_its_run_wait(platform: Platform) -> None:
    reader = platform.begin_lagging()
    assert indexes(reader) == [0, 1, 2, 3]
    assert platform.outcome().status is ActivationStatus.SUCCESS


def test_a_run_that_waits_goes_on_with_the_next_reader(platform: Platform) -> None:
    platform.must_leave_within(0.01)
    stuck = platform.begin_lagging()
    assert indexes(platform.attach()) == [0, 1, 2, 3]
    assert not platform.streams.leave(stuck, resumable=True)


def test_a_run_that_waits_ends_when_its_client_leaves_more_than_is_kept(platform: Platform) -> None:
    reader = platform.begin_lagging()
    assert not platform.streams.leave(reader, resumable=True)
    assert platform.outcome().status is ActivationStatus.APPLICATION_ERROR


def test_a_reader_whose_client_hangs_up_while_its_run_waits_is_cut(platform: Platform) -> None:
    hangup, was_cut = Hangup(), threading.Event()
    reader = platform.begin_lagging(hangup)
    reader.cut = was_cut.set
    with hangup.waking(reader.stream.wake):  # as in steps(), and it is blocked in a write there
        hangup.set()
    assert was_cut.wait(60)
    platform.streams.leave(reader, resumable=True)


def test_a_run_that_waits_for_its_reader_ends_by_its_time_limit(platform: Platform) -> None:
    reader = platform.begin_lagging(age_s=ACTION.limits.timeout / 1000)
    assert platform.outcome().timed_out
    with pytest.raises(TimeLimitExceeded):
        indexes(reader)


LONG: dict[str, Any] = {
    "model": "chat",
    "messages": [{"role": "user", "content": "x" * 1000}],
    "stream_options": {"include_usage": True, "more": "x" * 1000},
}
NEEDED = {"model": "chat", "stream_options": {"include_usage": True}}


def test_an_answer_that_has_ended_is_kept_without_its_requests_body(platform: Platform) -> None:
    reader = platform.begin(body=LONG)
    assert reader.stream.kept.n_bytes > 2000
    platform.worker.steps.put(END)
    assert list(reader.steps()) == [END]
    assert (reader.stream.call.payload, reader.stream.kept.n_bytes) == (NEEDED, 0)


@pytest.mark.parametrize("end", [None, END], ids=["goes on", "is whole"])
def test_an_answer_that_is_taken_over_keeps_its_models_version_and_its_body_until_it_is_whole(
    platform: Platform, end: RunFinished | None
) -> None:
    reader = platform.begin(body=LONG, handed=HandedOver((W0,), end, 0, 0, "v1"))
    assert reader.stream.call.model_version == "v1"
    assert platform.streams.picture(ONE).model_version == "v1"
    if end is None:
        assert reader.stream.kept.n_bytes > 2000 + token_bytes(W0)
    else:
        assert (reader.stream.call.payload, reader.stream.kept.n_bytes) == (NEEDED, token_bytes(W0))
    platform.streams.leave(reader, resumable=False)


def test_a_stream_that_moved_leaves_its_record_to_the_other_gateway(platform: Platform) -> None:
    reader = platform.begin()
    platform.worker.put(2)
    steps = reader.steps()
    next(steps), next(steps)
    picture = platform.streams.picture(ONE)
    assert ([t.index for t in picture.tokens], picture.end) == ([0, 1], None)
    platform.streams.give_away(ONE)
    with pytest.raises(Conflict):
        next(steps)
    assert (platform.streams.find(ONE), platform.streams.picture(ONE)) == (None, None)
    platform.streams.stop(10)
    assert platform.ended.empty()
    assert not platform.is_counted()


def test_a_gateway_that_stops_records_what_goes_on_without_a_client(platform: Platform) -> None:
    platform.streams.leave(platform.begin(), resumable=True)
    platform.streams.stop(10)
    assert platform.outcome().status is ActivationStatus.APPLICATION_ERROR
    assert not platform.is_counted()
