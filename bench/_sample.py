"""One measured transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench._common import median

_GB = 1e9


@dataclass(frozen=True, slots=True)
class Sample:
    seconds: float
    cpu_s: float  # the client's CPU seconds
    n_bytes: int

    @property
    def gb_s(self) -> float:
        return self.n_bytes / _GB / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.n_bytes / _GB)

    def __str__(self) -> str:
        return f"{self.gb_s:.2f} GB/s, {self.cpu_s_per_gb:.2f} CPU-s/GB"


def gb_s(samples: Sequence[Sample]) -> float:
    return median([s.gb_s for s in samples])


def cpu_s_per_gb(samples: Sequence[Sample]) -> float:
    return median([s.cpu_s_per_gb for s in samples])
