"""The answers of a request with several choices become one stream.  No HTTP here."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Final

from gateway.processor import waiting
from gateway.serving.answers.openai_format import Chunks, Part, usage_event
from gateway.serving.call import Call
from gateway.serving.hangup import Hangup
from relay.protocol.messages import RunFinished, RunToken
from thaw.errors import PlatformError, ThawError, TimeLimitExceeded, Unavailable

Step = str | RunToken | RunFinished
_AHEAD: Final = 256
"""Steps that a slow client has not read yet; then the parts wait for it."""
_LATE_S: Final = 10.0
"""How long after its limit the end of a part may come."""


class Merging:
    """The steps of all parts in the order in which they come."""

    def __init__(
        self, threads: Executor, calls: Sequence[Call], stop: Hangup, steps: Callable[[Call], Iterator[Step]]
    ) -> None:
        """``steps`` runs a call.  ``stop`` ends all of them."""
        self._calls, self._stop, self._run_steps = calls, stop, steps
        self._steps: queue.SimpleQueue[tuple[int, Step | ThawError]] = queue.SimpleQueue()
        self._room = threading.Semaphore(_AHEAD)
        for index, call in enumerate(calls):
            threads.submit(self._run, index, call).add_done_callback(partial(self._ended, index))

    def _ended(self, index: int, part: Future[None]) -> None:
        """A part that never ran, because the gateway stops, puts no step."""
        if part.cancelled() or part.exception() is not None:
            self._steps.put((index, Unavailable("the gateway ends: send the request again")))

    def end(self) -> None:
        """The connection is over: no part waits for its client any more."""
        self._stop.set()
        self._room.release(1_000_000)

    def texts(self, n_each: int) -> Iterator[str]:
        """``n_each``: the choices of each prompt.  Raises ThawError, and ClientGone."""
        head = self._calls[0]
        chunks = [Chunks(call, None, part=Part(i, head)) for i, call in enumerate(self._calls)]
        finished: dict[int, RunFinished] = {}
        while len(finished) < len(chunks):
            index, step = self._next(head.wait_deadline_s + _LATE_S)
            self._room.release()
            if isinstance(step, ThawError):
                raise step
            if isinstance(step, RunToken):
                text = chunks[index].token(step)
            elif isinstance(step, str):
                text = chunks[index].comment(step) if index == 0 else ""
            else:
                finished[index] = step
                text = chunks[index].finished(step)
            if text:
                yield text
        yield usage_event(head, [finished[i] for i in sorted(finished)], n_each) + "data: [DONE]\n\n"

    def _next(self, deadline_s: float) -> tuple[int, Step | ThawError]:
        """Raises TimeLimitExceeded.  Each part has its own limit, and says so itself."""
        try:
            with waiting():
                return self._steps.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise TimeLimitExceeded("The action exceeded its time limits: a choice has not ended.") from None

    def _run(self, index: int, call: Call) -> None:
        try:
            for step in self._run_steps(call):
                self._room.acquire()
                self._steps.put((index, step))
        except ThawError as e:
            self._steps.put((index, e))  # before the others are stopped: they would report that their client has gone
            self._stop.set()
        except Exception as e:  # noqa: BLE001  the edge of a thread: its reader would wait for ever
            self._steps.put((index, PlatformError(f"There was an internal server error: {type(e).__name__}.")))
            self._stop.set()
