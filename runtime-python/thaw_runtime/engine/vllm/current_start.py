"""The start that is in progress, for the classes that vLLM makes itself (loader, worker, executor).

vLLM gives these classes its own configuration and no object of Thaw, so they read this module.  A process has one
engine, and therefore one start at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from relay.thread_account import BlockedTime
from thaw.model import TensorInfo
from thaw.tracing.trace import Phase
from thaw_runtime.engine.kv_memory import MemoryPlan
from thaw_runtime.engine.vllm.background_load import BackgroundLoad
from thaw_runtime.engine.vllm.packing import LayerPacker, Rehearsal
from thaw_runtime.engine.vllm.weights import arriving_tensors
from thaw_runtime.pipeline.link import StageLink
from thaw_runtime.pipeline.stage_parts import StagePart
from thaw_runtime.process.start_trace import PhaseNotes, StartTrace
from thaw_runtime.weights.readable_segment import Segment
from thaw_runtime.weights.sidecars import model_tensors


@dataclass(slots=True)
class CurrentStart:
    segment: Segment
    trace: StartTrace
    part: StagePart
    link: StageLink | None
    offered: tuple[TensorInfo, ...]  # the whole model's
    tensors: tuple[TensorInfo, ...]  # those of the part
    background: BackgroundLoad | None = None  # set by the loader of a full worker in a pipeline
    memory: MemoryPlan | None = None  # how the reserve is divided; set before the engine is built
    load: Callable[[Callable[[], None]], None] | None = None  # set by a loader that postpones the weights
    phases: ExitStack = field(default_factory=ExitStack)  # holds the open phase, if there is one

    def turn_to(self, begin: Phase) -> PhaseNotes:
        """End the open phase and begin another, so that no time lies between the two."""
        self.phases.close()
        return self.phases.enter_context(self.trace.phase(begin))

    def arriving(
        self, waited: BlockedTime, packer: LayerPacker | None, rehearsal: Rehearsal | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor of the start when it has come.  Raises WorkerLost when the pipeline breaks before that."""
        return arriving_tensors(self.segment, self.tensors, self.check, waited, packer, rehearsal)

    def check(self) -> None:
        if self.link is not None:
            self.link.check()


_current: CurrentStart | None = None


@contextmanager
def starting_from(
    segment: Segment, trace: StartTrace, part: StagePart, link: StageLink | None
) -> Iterator[CurrentStart]:
    """While the block runs, the loader reads ``part`` of ``segment`` and writes its phases to ``trace``.

    The phases are context (configuration, worker), model, and kv.  The last one goes on until load_postponed().
    """
    global _current
    offered = model_tensors(segment)
    _current = CurrentStart(segment, trace, part, link, offered, part.tensors(offered))
    try:
        with _current.phases:
            _current.turn_to(Phase.CONTEXT_BEGIN)
            yield _current
    finally:
        _current = None


def current_start() -> CurrentStart:
    if _current is None:
        raise RuntimeError("the segment loader runs inside starting_from() only")
    return _current


def load_postponed(rehearse: Callable[[], None]) -> None:
    """Fill the model, now that the engine is built around it.  ``rehearse`` runs a batch; see Rehearsal."""
    start = current_start()
    start.phases.close()
    if start.load is not None:
        start.load(rehearse)
