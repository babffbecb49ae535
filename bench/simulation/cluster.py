"""Servers, their devices and their memory for models.  ``hold`` raises if a device has too little free memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from bench.simulation.constants import GPUS, GpuKind, ServerSpec
from bench.simulation.engine import Engine
from bench.simulation.heedless import HeedlessLedger
from bench.simulation.network import Link
from gateway.scheduler.placement.link_ledger import Discipline, LinkLedger
from gateway.scheduler.placement.schemes import Gpu


class OverCommitted(AssertionError):
    """A policy promised memory that does not exist."""


class Device:
    __slots__ = ("memory", "n_workers", "used")

    def __init__(self, memory: int) -> None:
        self.memory, self.used, self.n_workers = memory, 0, 0

    @property
    def free(self) -> int:
        return self.memory - self.used


class ModelCache:
    """Whole models in host memory.  The least recently used one is evicted first.  A capacity of 0 keeps nothing."""

    def __init__(self, capacity: float) -> None:
        self.capacity, self.used = capacity, 0.0
        self.n_changes = 0  # how often its content changed
        self._models: OrderedDict[int, int] = OrderedDict()

    def __contains__(self, function: int) -> bool:
        return function in self._models

    def models(self) -> list[tuple[int, int]]:
        """(function, bytes) for each model."""
        return list(self._models.items())

    def use(self, function: int) -> None:
        self._models.move_to_end(function)

    def put(self, function: int, n_bytes: int) -> None:
        if function in self._models:
            return self.use(function)
        if n_bytes > self.capacity:
            return
        while self.used + n_bytes > self.capacity:
            self.used -= self._models.popitem(last=False)[1]
        self._models[function] = n_bytes
        self.used += n_bytes
        self.n_changes += 1


class SimServer:
    def __init__(
        self, index: int, spec: ServerSpec, engine: Engine, discipline: Discipline, *, cache: bool, admission: bool
    ) -> None:
        self.index, self.spec = index, spec
        self.kind: GpuKind = GPUS[spec.gpu]
        self.devices = [Device(self.kind.memory) for _ in range(spec.n_gpus)]
        self.link = Link(engine, spec.link, discipline)
        self.ledger = (LinkLedger if admission else HeedlessLedger)(spec.link, discipline)
        self.cache = ModelCache(spec.cache_bytes if cache else 0.0)
        self._offer: tuple[Gpu, ...] | None = None
        self.n_changes = 0  # how often the memory of its devices changed
        self.held_byte_s = 0.0
        self._held, self._held_at = 0, 0.0

    def hold(self, device: int, n_bytes: int, now: float) -> None:
        at = self.devices[device]
        if n_bytes > at.free:
            raise OverCommitted(f"server {self.index} device {device}: {n_bytes} of {at.free} free bytes")
        at.used += n_bytes
        at.n_workers += 1
        self.account(n_bytes, now)

    def let_go(self, device: int, n_bytes: int, now: float) -> None:
        at = self.devices[device]
        at.used -= n_bytes
        at.n_workers -= 1
        if at.used < 0 or at.n_workers < 0:
            raise OverCommitted(f"server {self.index} device {device}: more given back than taken")
        self.account(-n_bytes, now)

    def account(self, change: int, now: float) -> None:
        self.held_byte_s += self._held * (now - self._held_at)
        self._held, self._held_at = self._held + change, now
        self.n_changes += 1
        self._offer = None

    def offer(self) -> tuple[Gpu, ...]:
        """Its devices as Algorithm 1 sees them.  The value is cached until a device changes."""
        if self._offer is None:
            self._offer = tuple(Gpu(d.free, d.n_workers) for d in self.devices)
        return self._offer

    def best_fit(self, n_bytes: int) -> int | None:
        fitting = [(d.free, i) for i, d in enumerate(self.devices) if d.free >= n_bytes]
        return min(fitting)[1] if fitting else None

    def idle_device(self, n_bytes: int) -> int | None:
        return next((i for i, d in enumerate(self.devices) if d.n_workers == 0 and d.memory >= n_bytes), None)


def build(
    specs: Sequence[ServerSpec], engine: Engine, discipline: Discipline, *, cache: bool, admission: bool = True
) -> list[SimServer]:
    return [SimServer(i, s, engine, discipline, cache=cache, admission=admission) for i, s in enumerate(specs)]
