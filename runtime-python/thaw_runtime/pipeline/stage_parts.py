"""The part of a model that a stage has: its tensors in its segment, and its modules in the skeleton.

A segment may hold more than the stage computes with: a full worker's later part lies behind the stage's own part.  A
model family's skeleton may have modules in every stage that only the first or the last stage calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relay.protocol.messages import LlmInit
from thaw import partition
from thaw.checkpoints.checkpoint import is_entry, layer_of, parts_of
from thaw.errors import InitFailed
from thaw.model import FileRange, TensorInfo
from thaw.plan import StageRole


@dataclass(frozen=True, slots=True)
class StagePart:
    """The part of stage ``stage`` of ``n_stages``; ``bounds`` holds the layers ``[a, b)`` of every stage."""

    stage: int
    n_stages: int
    bounds: tuple[tuple[int, int], ...]
    full: bool = False  # this stage has the skeleton of the whole model, and fetches the rest after its own part

    @classmethod
    def of(cls, init: LlmInit) -> StagePart:
        """The part that ``init`` describes.  Raises InitFailed unless the layers of the stages follow one another and
        agree with this stage's layers.
        """
        if init.n_stages == 1:
            return cls(0, 1, (init.layers,))
        bounds = tuple(shape.layers for shape in init.stages)
        ends = [0, *(b for _, b in bounds)]
        chained = all(a == ends[k] < b for k, (a, b) in enumerate(bounds))
        if len(bounds) != init.n_stages or not chained or bounds[init.stage] != init.layers:
            raise InitFailed(f"stage {init.stage} of {init.n_stages} has layers {init.layers} of {bounds}")
        return cls(init.stage, init.n_stages, bounds, init.stages[init.stage].role is StageRole.FULL)

    @property
    def whole(self) -> bool:
        return self.n_stages == 1

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.n_stages - 1

    @property
    def window(self) -> tuple[int, int]:
        return self.bounds[self.stage]

    @property
    def layer_counts(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in self.bounds)

    def tensors(self, offered: Sequence[TensorInfo]) -> tuple[TensorInfo, ...]:
        """The offered tensors that this stage loads, in the same order."""
        if self.whole:
            return tuple(offered)
        mine = partition.ranges(parts_of(offered, self.bounds[-1][1]), self.window)
        return tuple(t for t in offered if any(_holds(r, t) for r in mine))

    def rest(self, offered: Sequence[TensorInfo]) -> tuple[TensorInfo, ...]:
        """The offered tensors that a full worker loads after its own part, in the same order."""
        own = {t.name for t in self.tensors(offered)}
        return tuple(t for t in offered if t.name not in own)

    def computes(self, path: str, own: Sequence[TensorInfo]) -> bool:
        """Return whether this stage computes with a module and has its weights, in a skeleton that has all modules."""
        layer, (a, b) = layer_of(path + "."), self.window
        if layer is not None:
            return a <= layer < b
        return self.needs_module(path, own)

    def needs_module(self, path: str, own: Sequence[TensorInfo]) -> bool:
        """Return whether this stage computes with a module that is outside the layers and has weights of its own.

        ``own`` are the stage's tensors.  The last stage also needs a tied embedding, which is then among its tensors.
        """
        if self.whole or (self.first if is_entry(path) else self.last):
            return True
        return _is_among(path, own)


def _is_among(path: str, own: Sequence[TensorInfo]) -> bool:
    name = path.rpartition(".")[2]
    return any(layer_of(t.name) is None and name in t.name.split(".") for t in own)


def _holds(r: FileRange, t: TensorInfo) -> bool:
    return r.file == t.file and r.offset <= t.offset and t.offset + t.n_bytes <= r.offset + r.n_bytes
