"""The death of a thread that must last ends its process, and is reported until then."""

from __future__ import annotations

import json
import queue
import threading

import pytest

from thaw.logs import Log
from thaw.process import lasting
from thaw.process.lasting import EXIT_THREAD_DIED, LastingThread


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[int]:
    """The exit status that a guarded process would have ended with."""
    statuses: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(lasting, "GRACE_S", 0.0)
    monkeypatch.setattr(lasting, "_dead", [])
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # monkeypatch restores it after the test
    lasting.guard(Log("test"), statuses.put)
    return statuses


def raises(error: BaseException) -> None:
    raise error


def run(thread: threading.Thread) -> None:
    thread.start()
    thread.join(60)


@pytest.mark.parametrize("error", [KeyError("x"), OSError(28, "No space left on device"), SystemExit(0)])
def test_a_lasting_thread_that_dies_is_written_down_told_and_ends_the_process(
    ended: queue.SimpleQueue[int], capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    assert lasting.health(gateway="g") == (200, {"status": "ok", "gateway": "g"})
    run(LastingThread(lambda: raises(error), "heartbeat"))
    assert ended.get(timeout=60) == EXIT_THREAD_DIED
    event = json.loads(capsys.readouterr().err)
    assert (event["event"], event["thread"]) == ("thread_died", "heartbeat")
    assert type(error).__name__ in event["error"]
    assert "in raises" in event["traceback"]
    status, said = lasting.health("and more")
    assert (status, said["status"]) == (503, "failing")
    assert said["problems"] == [f"the thread heartbeat has died: {event['error']}", "and more"]


def test_any_other_thread_that_fails_is_written_down_and_the_process_goes_on(
    ended: queue.SimpleQueue[int], capsys: pytest.CaptureFixture[str]
) -> None:
    run(threading.Thread(target=lambda: raises(KeyError("x")), name="start"))
    event = json.loads(capsys.readouterr().err)
    assert (event["event"], event["thread"], event["error"]) == ("thread_failed", "start", "KeyError: 'x'")
    assert ended.empty()
    assert lasting.dead() == ()


def test_a_lasting_thread_that_was_asked_to_end_is_nothing_to_tell(ended: queue.SimpleQueue[int]) -> None:
    run(LastingThread(lambda: None, "reader"))
    assert ended.empty()
    assert lasting.dead() == ()
