"""Gives a model's loader the weights one after another, while the next ones arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch

from relay.thread_account import BlockedTime
from thaw.model import TensorInfo
from thaw_runtime.engine.vllm.packing import LayerPacker, Rehearsal
from thaw_runtime.weights.arriving import arriving
from thaw_runtime.weights.readable_segment import ARRIVAL_DEADLINE_S, Segment


def arriving_tensors(
    segment: Segment,
    tensors: Sequence[TensorInfo],
    check: Callable[[], None],
    waited: BlockedTime,
    packer: LayerPacker | None = None,
    rehearsal: Rehearsal | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each of ``tensors`` in load order, as soon as its last byte is below the watermark.

    The tensors are views, not copies: they are valid while the segment is.  ``waited`` counts the sleep until bytes
    come.  ``packer.kernels`` counts the wait for other threads while the model uses a tensor.  ``check`` raises an
    error when waiting has become pointless.
    """
    source = arriving(segment, tensors)
    ends = [segment.locate(t.file, t.offset) + t.n_bytes for t in tensors]
    end = segment.wait(0, 0.0)
    for i, info in enumerate(tensors):
        check()
        if rehearsal is not None:
            rehearsal.hold_if_due()
        # counting the wait costs more than a wait that is over at once
        with waited.counted() if end < ends[i] else nullcontext():
            source.wait(i, ARRIVAL_DEADLINE_S)
        end = end if end >= ends[i] else segment.wait(0, 0.0)
        tensor = source.take(i)
        if packer is not None:
            packer.handing_out(info.name, tensor)
        with packer.kernels.counted() if packer is not None else nullcontext():
            yield info.name, tensor
        del tensor  # drop our own reference, which would look as if the model still held the tensor
        if packer is not None:
            packer.pack_complete()
