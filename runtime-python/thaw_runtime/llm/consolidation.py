"""How a stage of a pipeline becomes a worker, as its container sees it.

::

    PIPELINE ──POST /consolidate──▶ UNDER_WAY ──the engine is whole──▶ ONE_WORKER
        ▲                              │
        └──────it could not: an error──┘        the pipeline answers all the while, and afterwards as before

Any number of callers may wait for the same outcome: an invoker that was restarted meanwhile waits again.  The engine
decides, and this container knows at once, so its ``/health`` is right even if an invoker missed the answer.  A later
stage becomes a worker only after stage 0 has; it takes requests from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from relay.protocol.messages import ConsolidateReply, LlmInit
from thaw.errors import BadRequest, Conflict, ErrorInfo, NotFound, PlatformError, ThawError
from thaw.logs import print_traceback
from thaw.plan import StageRole
from thaw.tracing.trace import Phase, TraceEvent
from thaw_runtime.engine.protocol import Consolidated
from thaw_runtime.process.start_trace import StartTrace


@dataclass(frozen=True, slots=True)
class NotConsolidated:
    """The group is still a pipeline.  ``events`` say in the start's trace that it was tried."""

    error: ErrorInfo
    events: tuple[TraceEvent, ...] = ()


Outcome = ConsolidateReply | NotConsolidated


@dataclass(slots=True)
class _Attempt:
    ended: threading.Event = field(default_factory=threading.Event)
    outcome: Outcome | None = None


class Consolidation:
    """``consolidate`` blocks until the engine has become one worker.  It raises the error that kept it from it."""

    def __init__(self, init: LlmInit, consolidate: Callable[[], Consolidated]) -> None:
        self._init, self._consolidate = init, consolidate
        self._lock = threading.Lock()
        self._attempt: _Attempt | None = None  # the last one

    @property
    def n_stages(self) -> int:
        with self._lock:
            return 1 if self._is_one_worker() else self._init.n_stages

    @property
    def is_under_way(self) -> bool:
        with self._lock:
            return self._attempt is not None and self._attempt.outcome is None

    def begin(self) -> Outcome:
        """Become a worker; return when that has ended.  Raises Conflict when it is one or is becoming one, BadRequest
        for a stage that has only its part of the model."""
        with self._lock:
            if self._init.stage != 0 and self._init.role is not StageRole.FULL:
                raise BadRequest(f"stage {self._init.stage} of the pipeline has no memory for the whole model")
            if self._is_one_worker():
                raise Conflict("this container is one worker already")
            if self._attempt is not None and self._attempt.outcome is None:
                raise Conflict("this container is becoming one worker already", hint="GET /consolidate waits for it")
            attempt = self._attempt = _Attempt()
        outcome = self._try()
        with self._lock:
            attempt.outcome = outcome
        attempt.ended.set()
        return outcome

    def wait(self) -> Outcome:
        """Return how the last attempt ended, once it has.  Raises NotFound when no attempt was requested."""
        with self._lock:
            attempt = self._attempt
        if attempt is None:
            raise NotFound("nobody has asked this container to become one worker")
        attempt.ended.wait()
        assert attempt.outcome is not None  # noqa: S101  it is set before ``ended``
        return attempt.outcome

    def _is_one_worker(self) -> bool:
        attempt = self._attempt
        return self._init.n_stages == 1 or (attempt is not None and isinstance(attempt.outcome, ConsolidateReply))

    def _try(self) -> Outcome:
        init = self._init
        trace = StartTrace(group_id=init.group_id, stage=init.stage, host=init.host)
        try:
            with trace.phase(Phase.CONSOLIDATE_BEGIN) as notes:
                notes.attrs |= {"stages": init.n_stages, **({"worker": init.stage} if init.stage else {})}
                try:
                    done = self._consolidate()
                except ThawError as e:
                    notes.attrs["error"] = e.message
                    raise
                notes.n_bytes = done.n_bytes
                notes.attrs |= {"rounds": done.rounds, "tail_bytes": done.tail_bytes}
                notes.attrs |= {"whole_s": round(done.wait_s, 4), "stall_s": round(done.stall_s, 6)}
                if init.stage:
                    notes.attrs["build_s"] = round(done.build_s, 4)
        except ThawError as e:
            return NotConsolidated(e.info(), trace.events)
        except Exception as e:  # noqa: BLE001  whoever waits must hear of an end
            print_traceback()
            return NotConsolidated(PlatformError(f"the consolidation failed: {type(e).__name__}: {e}").info())
        trace.extend(done.events)
        said = (done.rounds, done.n_bytes, done.tail_bytes, done.wait_s, done.stall_s)
        return ConsolidateReply(*said, trace.events, done.build_s)
