"""How long a start takes: the one cost model of placement, of its explanation and of the simulator.

It is ParaServe's Eq. 5 (fetch, context and imports overlap) with ServerlessLLM's loading time as its fetch (6.1: the
tier in which the bytes lie, and the queue in front of it).  ``worker_start`` says when one worker has its part::

    container ▶ context ─┬─▶ libraries ───────────────┐
      (behind a cell     └─▶ copy to the device ──────┼─▶ ready     copy: no sooner than the first byte
       that is made)  queue ▶ fetch ─────────────────┘

With no queue and the runtime's times it is Eq. 5's kappa; without the runtime it is ServerlessLLM's ``q + n/b``.
``F`` is how much longer a pass takes than on one full worker.  Eq. 1 (one after another) serves the ablation.
Units are bytes, bytes/s and seconds.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple


@dataclass(frozen=True, slots=True)
class Times:
    """The times of an action on one kind of device.  The defaults are the paper's for Llama2-7B and hold until a start
    is seen."""

    t_c: float = 4.0  # container and runtime, Eq. 1 only
    t_cc: float = 1.5  # container
    t_cu: float = 0.5  # device context
    t_l: float = 2.0  # libraries
    t_p: float = 1.5  # prefill on one full device
    t_d: float = 0.042  # one token
    t_n: float = 0.005  # one hop between stages
    t_tail: float = 0.0  # last byte → engine accepts requests


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes/s within one host, as its starts have shown them."""

    copy: float  # host memory → device
    memory: float  # from one segment of the host's memory into another


NO_RUNTIME: Final = Times(t_c=0.0, t_cc=0.0, t_cu=0.0, t_l=0.0)
"""The container is there and has its libraries and its context, as ServerlessLLM assumes."""


class Tier(enum.StrEnum):
    """The place of the bytes of a worker's part when it starts."""

    RESIDENT = "resident"  # in host memory, in the worker's own segment
    MEMORY = "memory"  # in host memory, in another segment: they are copied into its own
    SSD = "ssd"
    REMOTE = "remote"


class WorkerStart(NamedTuple):
    """Seconds from now until each of these is done; the worker has its part when all are."""

    runtime_s: float  # container, context, libraries
    fetched_s: float  # the last byte is in the host's memory
    copied_s: float  # the last byte would be on the device if the fetch did not delay it

    @property
    def ready_s(self) -> float:
        return max(self)


def worker_start(
    part_bytes: float, bandwidth: float, copy: float, times: Times, *, queue_s: float = 0.0, cell_wait_s: float = 0.0
) -> WorkerStart:
    """Return when one worker has its part.

    ``bandwidth``: the rate of the slowest tier on the way to the host's memory; infinite if the part lies there.
    ``copy``: the rate from the host's memory to the device.  ``queue_s``: the time until the first byte may move
    (fetches that are served before, runs that leave first).  ``cell_wait_s``: the time until the stem cell that the
    start will take is there.
    """
    context_s = cell_wait_s + times.t_cc + times.t_cu
    fetched_s = queue_s + part_bytes / bandwidth
    return WorkerStart(context_s + times.t_l, fetched_s, max(context_s, queue_s) + part_bytes / copy)


def limited_rate(n_bytes: float, bandwidth: float, link: float, most: float) -> float:
    """Return the mean rate of a fetch that may take ``most`` of the link, where an unlimited one would get
    ``bandwidth``.

    It waits for the same fetches before it, ``n/bandwidth - n/link``, and then reads at ``most``.  Infinite and 0 keep
    their meanings: nothing is fetched, and the fetch must not start.
    """
    if most >= link or bandwidth <= 0 or math.isinf(bandwidth) or n_bytes <= 0:
        return bandwidth
    return n_bytes / (max(0.0, n_bytes / bandwidth - n_bytes / link) + n_bytes / most)


def kappa_sequential(part_bytes: float, bandwidth: float, pcie: float, times: Times) -> float:
    """Eq. 1's inner term: everything one after another."""
    return times.t_c + part_bytes / bandwidth + part_bytes / pcie


def f_factor(s: int, w: int) -> float:
    """F for w full workers among s, when a low worker gets 1/s of its device."""
    return s - w + w / s


def f_general(shares: Sequence[float], s: int | None = None) -> float:
    """F from the share each worker really gets: full 1, low 1/s where enforced, else what it has alone.  ``s``: the
    number of stages, when ``shares`` are those of some workers only."""
    return math.fsum(1 / (s or len(shares)) / share for share in shares)


def low_share(s: int, *, is_enforced: bool, is_alone: bool) -> float:
    """Return the share of its device that a low worker gets.  Where 1/s is not enforced, a worker that is alone has the
    whole device; if others use the device too, the share is not known, and 1/s is assumed."""
    return 1.0 if is_alone and not is_enforced else 1 / s


def work_s(n: int, factor: float, times: Times) -> float:
    """Return the seconds that ``n`` workers on one kind of device add between readiness and the first token."""
    return times.t_p * factor + times.t_n * n


def pass_s(s: int, factor: float, times: Times) -> float:
    """From the last worker's kappa to the first token."""
    return work_s(s, factor, times) + times.t_tail


def ttft(t_w: float, kappas: Sequence[float], factor: float, times: Times) -> float:
    """Eq. 1 or Eq. 5, depending on the given kappas; plus the learned tail."""
    return t_w + max(kappas) + pass_s(len(kappas), factor, times)


def tpot(s: int, factor: float, times: Times) -> float:
    """Eq. 2."""
    return times.t_d * factor + times.t_n * s


def fetch_time_left(slo_ttft: float, t_w: float, s: int, factor: float, times: Times) -> float:
    """Seconds from now by which every byte must have come (the deadline of Eq. 5)."""
    return slo_ttft - t_w - pass_s(s, factor, times)
