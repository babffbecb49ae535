"""The weights as a model's loader wants them: one after another, while the next ones arrive."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from thaw.model import TensorInfo
from thaw_runtime.arriving import arriving
from thaw_runtime.engine import ARRIVAL_DEADLINE_S, Segment
from thaw_runtime.packing import Finisher, Rehearsal


def arriving_tensors(
    segment: Segment,
    tensors: Sequence[TensorInfo],
    check: Callable[[], None],
    waited: list[float],
    finisher: Finisher | None = None,
    rehearsal: Rehearsal | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each of ``tensors`` in load order, as soon as its last byte is below the watermark.

    Views, not copies: valid while the segment is.  The seconds slept are added to ``waited[0]``.  ``check`` raises
    what makes waiting pointless.
    """
    source = arriving(segment, tensors)
    for i, info in enumerate(tensors):
        check()
        if rehearsal is not None:
            rehearsal.hold_if_due()
        began = time.perf_counter()
        source.wait(i, ARRIVAL_DEADLINE_S)
        waited[0] += time.perf_counter() - began
        tensor = source.take(i)
        if finisher is not None:
            finisher.handing_out(info.name, tensor)
        yield info.name, tensor
        del tensor  # ours must not be the reference that looks like a consumer's
        if finisher is not None:
            finisher.finish_complete()
