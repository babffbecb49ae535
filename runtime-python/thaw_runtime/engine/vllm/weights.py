"""The weights as a model's loader wants them: one after another, while the next ones arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch

from relay.thread_account import Asleep
from thaw.model import TensorInfo
from thaw_runtime.engine.vllm.packing import Finisher, Rehearsal
from thaw_runtime.weights.arriving import arriving
from thaw_runtime.weights.segment import ARRIVAL_DEADLINE_S, Segment


def arriving_tensors(
    segment: Segment,
    tensors: Sequence[TensorInfo],
    check: Callable[[], None],
    waited: Asleep,
    finisher: Finisher | None = None,
    rehearsal: Rehearsal | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each of ``tensors`` in load order, as soon as its last byte is below the watermark.

    Views, not copies: valid while the segment is.  ``waited`` counts the sleep until bytes come, ``finisher.kernels``
    the wait for other threads in what the model does with them.  ``check`` raises what makes waiting pointless.
    """
    source = arriving(segment, tensors)
    ends = [segment.locate(t.file, t.offset) + t.n_bytes for t in tensors]
    end = segment.wait(0, 0.0)
    for i, info in enumerate(tensors):
        check()
        if rehearsal is not None:
            rehearsal.hold_if_due()
        # counting costs more than not having to wait
        with waited.counted() if end < ends[i] else nullcontext():
            source.wait(i, ARRIVAL_DEADLINE_S)
        end = end if end >= ends[i] else segment.wait(0, 0.0)
        tensor = source.take(i)
        if finisher is not None:
            finisher.handing_out(info.name, tensor)
        with finisher.kernels.counted() if finisher is not None else nullcontext():
            yield info.name, tensor
        del tensor  # ours must not be the reference that looks like a consumer's
        if finisher is not None:
            finisher.finish_complete()
