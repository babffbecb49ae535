"""A server's link as it really behaves: a fluid model in which the fetches in progress share the bandwidth.

This is deliberately independent of the scheduler's ledger: the ledger predicts, and the link decides what happens.
Both have the same two disciplines, which fetchd has to enforce: fetches with a deadline come first (in equal shares, or
the earliest deadline alone), then the other fetches.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from bench.simulation.engine import Engine
from gateway.scheduler.placement.link_ledger import Discipline

_DONE = 1e-3  # bytes


class Transfer:
    __slots__ = ("deadline", "done", "order", "pending", "rate", "shared_s")

    def __init__(self, order: int, pending: float, deadline: float, done: Callable[[], None]) -> None:
        self.order, self.pending, self.deadline, self.done, self.rate = order, pending, deadline, done, 0.0
        self.shared_s = 0.0  # the part of the link that others used, in seconds of the whole link


class Link:
    def __init__(self, engine: Engine, bytes_per_s: float, discipline: Discipline) -> None:
        self._engine, self.bytes_per_s, self.discipline = engine, bytes_per_s, discipline
        self.transfers: list[Transfer] = []
        self._at = 0.0
        self._order = 0
        self._plan = 0

    def start(self, n_bytes: float, deadline: float, done: Callable[[], None]) -> Transfer:
        self._advance()
        self._order += 1
        transfer = Transfer(self._order, n_bytes, deadline, done)
        self.transfers.append(transfer)
        self._replan()
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        self._advance()
        if transfer in self.transfers:
            self.transfers.remove(transfer)
            self._replan()

    def pending(self) -> list[float]:
        self._advance()
        return [t.pending for t in self.transfers]

    def _advance(self) -> None:
        now = self._engine.now
        passed, self._at = now - self._at, now
        if passed > 0:
            for transfer in self.transfers:
                transfer.pending -= transfer.rate * passed
                transfer.shared_s += (1 - transfer.rate / self.bytes_per_s) * passed

    def _replan(self) -> None:
        """Set the rates, which stay the same until a transfer starts or ends, and schedule the first end."""
        self._plan += 1
        if not self.transfers:
            return
        favoured = [t for t in self.transfers if t.deadline < math.inf]
        if favoured and self.discipline == "edf":
            favoured = [min(favoured, key=lambda t: (t.deadline, t.order))]
        for transfer in self.transfers:
            transfer.rate = 0.0
        favoured = favoured or self.transfers
        for transfer in favoured:
            transfer.rate = self.bytes_per_s / len(favoured)
        first = min(t.pending / t.rate for t in favoured)
        self._engine.after(max(0.0, first), self._due, self._plan)

    def _due(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        slack = max(_DONE, self.bytes_per_s * 1e-9)  # the bytes of one nanosecond
        ended = [t for t in self.transfers if t.pending <= slack]
        self.transfers = [t for t in self.transfers if t.pending > slack]
        self._replan()
        for transfer in ended:
            transfer.done()
