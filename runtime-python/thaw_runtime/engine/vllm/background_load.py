"""Loads the layers that a full worker's model still lacks when its stage starts to answer; see window.py."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence, Set
from typing import Any, Final

from relay.thread_account import BlockedTime
from thaw.errors import ErrorInfo, PlatformError, ThawError
from thaw.logs import Log
from thaw.model import TensorInfo
from thaw_runtime.engine.vllm.packing import DeferredModules, pack
from thaw_runtime.engine.vllm.weights import arriving_tensors
from thaw_runtime.weights.readable_segment import Segment

_log = Log("engine")
_LOWEST_PRIORITY: Final = 19


class BackgroundLoad:
    """Fills the layers outside the window and packs them, while the engine computes those inside."""

    def __init__(
        self,
        model: Any,
        segment: Segment,
        tensors: Sequence[TensorInfo],
        deferred: DeferredModules,
        check: Callable[[], None],
        complete: Callable[[Set[str] | None], None],
    ) -> None:
        """``check`` raises an error when waiting has become pointless.  ``complete`` gets the names of the filled
        parameters, and raises an error if parameters are missing.
        """
        self._model, self._segment, self._tensors = model, segment, tensors
        self._deferred, self._check, self._complete = deferred, check, complete
        self._begun, self._ended = threading.Lock(), threading.Event()
        self._when_ended: list[Callable[[], None]] = []
        self.error: ErrorInfo | None = None

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def begin(self, when_ended: Callable[[], None]) -> None:
        """Run on a low-priority thread, so the engine thread is scheduled first.  A second call begins nothing.

        ``when_ended`` is called on that thread, or now if the load has ended.
        """
        self._when_ended.append(when_ended)
        if self._begun.acquire(blocking=False):
            threading.Thread(target=self._run, name="background-load", daemon=True).start()
        if self.has_ended:
            when_ended()

    def wait(self, deadline_s: float) -> bool:
        """Wait until the model is whole.  False after ``deadline_s`` seconds, or when the load has failed."""
        return self._ended.wait(deadline_s) and self.error is None

    def _run(self) -> None:
        """Load the layers.  If this fails, the stage goes on computing its own layers, but never becomes a whole
        worker.
        """
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        waited = BlockedTime()
        try:
            tensors = arriving_tensors(self._segment, self._tensors, self._check, waited)
            filled = self._model.load_weights(tensors)
            pack(self._model, self._deferred)
            self._complete(filled)
            _log.event("rest_loaded", n_bytes=sum(t.n_bytes for t in self._tensors), wait_s=round(waited.seconds, 3))
        except ThawError as e:
            self.error = e.info()
        except Exception as e:  # noqa: BLE001  the edge to vLLM's loaders, and of a thread
            self.error = ErrorInfo(PlatformError.__name__, f"{type(e).__name__}: {e}")
        if self.error is not None:
            _log.event("rest_failed", error=self.error.code, reason=self.error.message)
        self._ended.set()
        for call in self._when_ended:
            call()
