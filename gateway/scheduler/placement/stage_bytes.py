"""The bytes that each stage of a model fetches, for every number of stages, worked out once for each version of the
model."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.scheduler.placement.pool_account import Claim
from relay.protocol.pool import content_key, n_slabs
from thaw import partition
from thaw.errors import ModelUnsupported
from thaw.model import FileRange, ModelFacts, ModelParts


@dataclass(frozen=True, slots=True)
class StageBytes:
    """The bytes that one stage fetches.  ``rest``: the ranges that it lacks of the whole model."""

    layers: tuple[int, int]
    first: tuple[FileRange, ...]
    rest: tuple[FileRange, ...]
    n_bytes: int  # the bytes of ``first``


@dataclass(slots=True)
class Stages:
    facts: ModelFacts
    _known: dict[int, tuple[StageBytes, ...]] = field(default_factory=dict)
    _largest: list[float] = field(default_factory=list)
    _slabs: dict[tuple[int, int], int] = field(default_factory=dict)
    _whole: Claim | None = None

    @property
    def most(self) -> int:
        """The largest number of stages that the model can have."""
        return 1 if self.facts.parts is None else max(1, len(self.facts.parts.layers))

    def of(self, n_stages: int) -> tuple[StageBytes, ...]:
        """Return what each stage fetches.  Raises ModelUnsupported when the model cannot be divided into ``n_stages``
        stages."""
        if (known := self._known.get(n_stages)) is None:
            known = self._known[n_stages] = self._divide(n_stages)
        return known

    def largest(self, up_to: int) -> tuple[float, ...]:
        """Return the bytes of the largest stage of 1, 2, … stages.  This is cheap, because ranges are made only for the
        number of stages that is chosen."""
        if not self._largest:
            self._largest.append(float(sum(self.facts.files.values())))
        parts, wanted = self.facts.parts, min(up_to, self.most)
        if parts is not None and len(self._largest) < wanted:
            beside = partition.size(self._sidecars(parts))
            further = range(len(self._largest) + 1, wanted + 1)
            self._largest += [float(beside + n_bytes) for n_bytes in partition.largest_stages(parts, further)]
        return tuple(self._largest[:up_to])

    def slabs(self, n_stages: int, slab_bytes: int) -> int:
        """Return how many slabs of a pool the largest of ``n_stages`` stages takes with its first part.  Raises
        ModelUnsupported."""
        if (known := self._slabs.get((n_stages, slab_bytes))) is None:
            known = max(n_slabs(stage.first, slab_bytes) for stage in self.of(n_stages))
            self._slabs[n_stages, slab_bytes] = known
        return known

    @property
    def whole(self) -> Claim:
        """The claim of one worker with the whole model on a pool."""
        if self._whole is None:
            ranges = self.of(1)[0].first
            self._whole = Claim(content_key(self.facts.uri, self.facts.version, ranges, ()), ranges)
        return self._whole

    def _sidecars(self, parts: ModelParts) -> tuple[FileRange, ...]:
        weights = partition.files(parts)
        return tuple(
            FileRange(name, 0, n_bytes)
            for name, n_bytes in self.facts.files.items()
            if name not in weights and not name.endswith(".safetensors")
        )

    def _divide(self, n_stages: int) -> tuple[StageBytes, ...]:
        parts = self.facts.parts
        if n_stages == 1:  # every file from end to end, in the order of the facts: sidecars first
            whole = tuple(FileRange(name, 0, n_bytes) for name, n_bytes in self.facts.files.items())
            return (StageBytes((0, self.facts.n_layers), whole, (), partition.size(whole)),)
        if parts is None:
            raise ModelUnsupported(
                f"{self.facts.uri} cannot be divided into {n_stages} stages: where its layers lie is not known",
                hint="remove scaling.stages from the function's config",
            )
        sidecars, found = self._sidecars(parts), list[StageBytes]()
        whole = partition.ranges(parts, (0, len(parts.layers)))
        for layers in partition.split(parts, n_stages):
            weights = partition.ranges(parts, layers)
            first = sidecars + weights
            found.append(StageBytes(layers, first, partition.rest(whole, weights), partition.size(first)))
        return tuple(found)
