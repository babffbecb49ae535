"""The running inspections, by question: a caller with the same question waits for the answer, and takes no place of its
namespace.

::

    asked      1 ──────────── inspection ─────────► answer
                    2 ┄┄┄┄┄┄┄┄┄┄ waits ┄┄┄┄┄┄┄┄┄┄┄► error: the same     else ── inspection ──► answer
                         3 ┄┄┄┄┄ waits ┄┄┄┄┄┄┄┄┄┄┄► error: the same     else ┄┄┄┄ waits ┄┄┄┄► the same

An answer is valid only for callers that asked before its inspection began: a push may have come between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Final

from fetchd.places import Places
from thaw.errors import ErrorInfo, PlatformError, ThawError, Throttled, from_info
from thaw.model import ModelFacts

WAITING: Final = 16
"""The largest number of callers that wait for one inspection.  A scheduler asks again every few seconds, and each
caller occupies a conversation."""
WAITING_OF_ALL: Final = 128


class _Running:
    """An inspection.  ``facts`` or ``error`` is set when it has ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.n_waiting = 0
        self.facts: ModelFacts | None = None
        self.error: ErrorInfo | None = None


class Inspections:
    """Thread-safe."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._running: dict[Hashable, _Running] = {}

    def run(self, question: Hashable, namespaces: Sequence[str], inspect: Callable[[], ModelFacts]) -> ModelFacts:
        """Call ``inspect``, which ends by its own deadline, or wait for the answer to the same question: a model's URI,
        or all that is asked of an adapter.

        Raises what ``inspect`` raises, and Throttled.
        """
        with ExitStack() as place:
            earlier = self._join(question, namespaces, place)
            if isinstance(earlier, _Running):
                self._wait(earlier)
                later = self._join(question, namespaces, place)
                if isinstance(later, _Running):
                    return self._wait(later)
            return self._lead(question, inspect, place)

    def _join(self, question: Hashable, namespaces: Sequence[str], place: ExitStack) -> _Running | None:
        """Return the inspection that runs; None when there was none, and this one begins at a place of its own."""
        with self._lock:
            running = self._running.get(question)
            if running is None:
                place.enter_context(self._places.one_of(namespaces))
                self._running[question] = _Running()
                return None
            n_all = sum(r.n_waiting for r in self._running.values())
            if running.n_waiting >= WAITING or n_all >= WAITING_OF_ALL:
                raise Throttled(
                    f"too many questions about models that are being inspected: {running.n_waiting} about "
                    f"{question!s:.300}, {n_all} in all",
                    hint="wait for an answer; is the store slow?",
                )
            running.n_waiting += 1
            return running

    def _lead(self, question: Hashable, inspect: Callable[[], ModelFacts], place: ExitStack) -> ModelFacts:
        running = self._running[question]
        try:
            running.facts = inspect()
            return running.facts
        except ThawError as e:
            running.error = e.info()
            raise
        except Exception as e:
            running.error = PlatformError(f"fetchd: {type(e).__name__}: {e}").info()
            raise
        finally:
            with self._lock:
                del self._running[question]
            place.close()  # before a waiting caller wants one
            running.ended.set()

    def _wait(self, running: _Running) -> ModelFacts:
        running.ended.wait()
        if running.facts is None:
            raise from_info(running.error or PlatformError("the inspection was interrupted").info())
        return running.facts
