"""A full worker's model in a pipeline: the skeleton of the whole, of which a window computes.

::

    layer 0 ──────── a ══════ b ──────── n        a ══ b  the stage's: fetched first, computes
          │   rest   │ window │   rest   │        ────    comes while the pipeline answers, computes nothing

Its modules, attention layers and KV cache are a whole model's from the start, so that becoming one means filling the
rest and moving the window: nothing is built any more.  What has not been touched takes no memory.  A low-memory worker
has the modules of its stage and no others.

Knows how the engine's models are made, but imports no engine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, Final

import torch

from relay.thread_account import Asleep
from thaw.checkpoint import layer_of
from thaw.errors import ErrorInfo, ModelCorrupt, PlatformError, ThawError
from thaw.logs import Log
from thaw.model import TensorInfo
from thaw_runtime.engine.vllm.packing import Aside, Kinds, pack
from thaw_runtime.engine.vllm.stage import StageGroup
from thaw_runtime.engine.vllm.weights import arriving_tensors
from thaw_runtime.pipeline.stage_parts import StagePart
from thaw_runtime.weights.segment import Segment

_log = Log("engine")
PARTITION: Final = "VLLM_PP_LAYER_PARTITION"
_LOWEST: Final = 19


@contextmanager
def whole_skeleton(parallel_state: Any) -> Iterator[None]:
    """While the block runs, a model is made with all its layers: its pipeline group says that there is one stage."""
    group, partition = parallel_state._PP, os.environ.pop(PARTITION, None)
    parallel_state._PP = StageGroup(0, 1)
    try:
        yield
    finally:
        parallel_state._PP = group
        if partition is not None:
            os.environ[PARTITION] = partition


def set_window(model: torch.nn.Module, layers: tuple[int, int]) -> None:
    """From the next batch on, layers ``[a, b)`` compute."""
    for module in model.modules():
        if hasattr(module, "start_layer") and hasattr(module, "end_layer"):
            module.start_layer, module.end_layer = layers


def drop_foreign(model: torch.nn.Module, part: StagePart, own: Sequence[TensorInfo], missing: type[Any]) -> None:
    """Of a low-memory worker's: some families make embedding, head and final norm in every stage; what this one never
    calls holds memory."""
    for path, module in list(model.named_modules()):
        outer = layer_of(path + ".") is None and next(module.parameters(recurse=False), None) is not None
        if outer and not part.needs_module(path, own):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, missing())


def check_filled(parameters: Set[str], filled: Set[str] | None) -> None:
    """A parameter that no tensor filled would hold whatever its memory held before.  Raises ModelCorrupt.

    ``filled`` is what a model's loader says; some say nothing.
    """
    missing = sorted(parameters - filled) if filled is not None else []
    if missing:
        raise ModelCorrupt(f"the checkpoint lacks {len(missing)} of the model's tensors, first {missing[0]}")


class Rest:
    """What a full worker's model lacks when its stage starts to answer."""

    def __init__(
        self,
        model: Any,
        segment: Segment,
        tensors: Sequence[TensorInfo],
        aside: Aside,
        kinds: Kinds,
        check: Callable[[], None],
        complete: Callable[[Set[str] | None], None],
    ) -> None:
        """``complete`` is told the names of the parameters that were filled, and raises what is wrong with them."""
        self._model, self._segment, self._tensors = model, segment, tensors
        self._aside, self._kinds = aside, kinds
        self._check, self._complete = check, complete
        self._ended = threading.Event()
        self.error: ErrorInfo | None = None

    def begin(self) -> None:
        """On a thread that the engine's goes before."""
        threading.Thread(target=self._run, name="rest", daemon=True).start()

    def wait(self, deadline_s: float) -> bool:
        """Until the model is whole.  False when ``deadline_s`` seconds did not suffice, or it never will be."""
        return self._ended.wait(deadline_s) and self.error is None

    def _run(self) -> None:
        """A stage goes on computing its layers whatever happens here: it only never becomes a whole worker."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        waited = Asleep()
        try:
            tensors = arriving_tensors(self._segment, self._tensors, self._check, waited)
            filled = self._model.load_weights(tensors)
            pack(self._model, self._aside, self._kinds)
            self._complete(filled)
            _log.event("rest_loaded", n_bytes=sum(t.n_bytes for t in self._tensors), wait_s=round(waited.seconds, 3))
        except ThawError as e:
            self.error = e.info()
        except Exception as e:  # noqa: BLE001  the edge to the engine's loaders, and of a thread
            self.error = ErrorInfo(PlatformError.__name__, f"{type(e).__name__}: {e}")
        if self.error is not None:
            _log.event("rest_failed", error=self.error.code, reason=self.error.message)
        self._ended.set()
