"""A later stage that outlives its pipeline: it becomes a worker, once stage 0 has left (docs/consolidation.md).

::

    FOLLOWS ──asked──▶ LOADS the rest behind the batches ──stage 0 has left, and the load is done──▶ builds its engine
       ▲                  │                                                                             │
       └─the load failed──┘          stage 0 leaves before it is asked: it waits          worker ◀──────┴──▶ failed

No request needs this stage before it has become a worker, so a failure costs only time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Final, Protocol

from thaw.errors import BadRequest, Conflict, ErrorInfo
from thaw_runtime.engine.protocol import ConsolidationEnded

UNASKED_S: Final = 180.0
"""How long a stage waits to be asked.  The scheduler asks some stages to stay, and ends the others, within seconds.  It
repeats the message to a host after a minute.
"""

EndConsolidation = Callable[[ConsolidationEnded], None]


class Rest(Protocol):
    """The load of the part of the model that a full worker lacks."""

    @property
    def error(self) -> ErrorInfo | None: ...

    @property
    def has_ended(self) -> bool: ...

    def begin(self, when_ended: Callable[[], None]) -> None:
        """``when_ended`` is called on another thread, or now if the load has ended."""
        ...


class Staying:
    """``ask`` and ``end`` may be called on any thread, ``wait`` on the engine's."""

    def __init__(self, changed: threading.Condition, rest: Rest | None) -> None:
        """``changed`` is notified when ``wait`` may have something to do.  ``rest`` is None where the stage is low."""
        self._changed, self._rest = changed, rest
        self._asked: EndConsolidation | None = None
        self._asked_s = 0.0
        self._is_worker = False

    def ask(self, ended: EndConsolidation) -> None:
        """Begin to load.  ``ended`` is called once, with the outcome."""
        rest = self._rest
        if rest is None:
            ended(
                BadRequest("this stage of the pipeline has only its part of the model, so it becomes no worker").info()
            )
            return
        with self._changed:
            refused = self._is_worker or self._asked is not None
            if not refused:
                self._asked, self._asked_s = ended, monotonic()
        if refused:
            ended(Conflict("this stage is a worker, or is becoming one").info())
        else:
            rest.begin(self._loaded)

    def _loaded(self) -> None:
        with self._changed:
            self._changed.notify_all()
        if self._rest is not None and self._rest.error is not None:
            self.end(self._rest.error)

    def wait(self, is_stopping: Callable[[], bool]) -> float | None:
        """Stage 0 has left: wait until the engine can be built.  Returns the seconds since the stage was asked to stay,
        or None when the engine shall stop.

        A load has its own deadline.  A stage that is not asked to stay ends after ``UNASKED_S``, if its host has not
        ended it before.
        """
        with self._changed:
            self._changed.wait_for(lambda: is_stopping() or self._asked is not None, timeout=UNASKED_S)
            self._changed.wait_for(lambda: is_stopping() or self._asked is None or self._is_due())
            return None if is_stopping() or self._asked is None else monotonic() - self._asked_s

    def _is_due(self) -> bool:
        rest = self._rest
        return self._asked is not None and rest is not None and rest.has_ended and rest.error is None

    def end(self, outcome: ConsolidationEnded) -> None:
        """Report the outcome, if the stage was asked to stay."""
        with self._changed:
            asked, self._asked = self._asked, None
            self._is_worker = not isinstance(outcome, ErrorInfo)
        if asked is not None:
            asked(outcome)
