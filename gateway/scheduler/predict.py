"""How long a start takes: ParaServe's Eq. 1, 2 and 5.  Bytes, bytes/s, seconds.

The production predictor is Eq. 5 (fetch, context and imports overlap); Eq. 1 (one after another) serves the ablation.
``F`` is how much longer a pass takes than on one full worker, ``kappa`` when one worker has its part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Times:
    """Of an action on one kind of device.  The defaults are the paper's Llama2-7B and stand until a start is seen."""

    t_c: float = 4.0  # container and runtime, Eq. 1 only
    t_cc: float = 1.5  # container
    t_cu: float = 0.5  # device context
    t_l: float = 2.0  # libraries
    t_p: float = 1.5  # prefill on one full device
    t_d: float = 0.042  # one token
    t_n: float = 0.005  # one hop between stages
    t_tail: float = 0.0  # last byte → engine accepts requests


def f_factor(s: int, w: int) -> float:
    """F for w full workers among s, when a low worker gets 1/s of its device."""
    return s - w + w / s


def f_general(shares: Sequence[float]) -> float:
    """F from the share each worker really gets: full 1, low 1/s where enforced, else what it has alone."""
    s = len(shares)
    return math.fsum(1 / s / share for share in shares)


def kappa(part_bytes: float, bandwidth: float, pcie: float, times: Times) -> float:
    """Eq. 5's inner term: fetching runs beside container → context → (copy, libraries)."""
    ready = times.t_cc + times.t_cu + max(part_bytes / pcie, times.t_l)
    return max(ready, part_bytes / bandwidth)


def kappa_sequential(part_bytes: float, bandwidth: float, pcie: float, times: Times) -> float:
    """The same for Eq. 1: everything one after another."""
    return times.t_c + part_bytes / bandwidth + part_bytes / pcie


def pass_s(s: int, factor: float, times: Times) -> float:
    """From the last worker's kappa to the first token."""
    return times.t_p * factor + times.t_n * s + times.t_tail


def ttft(t_w: float, kappas: Sequence[float], factor: float, times: Times) -> float:
    """Eq. 1 or Eq. 5, by which kappas are given; plus the learned tail."""
    return t_w + max(kappas) + pass_s(len(kappas), factor, times)


def tpot(s: int, factor: float, times: Times) -> float:
    """Eq. 2."""
    return times.t_d * factor + times.t_n * s


def bound(t_w: float, kappa_s: float, s: int, factor: float, times: Times) -> float:
    """What no start can beat: Eq. 5 without a tail, ``kappa_s`` being the largest with idle links."""
    return t_w + kappa_s + (times.t_p * factor + times.t_n * s)  # summed as ttft is: not an ulp above it


def fetch_time_left(slo_ttft: float, t_w: float, s: int, factor: float, times: Times) -> float:
    """Seconds from now by which every byte must have come (the deadline of Eq. 5)."""
    return slo_ttft - t_w - pass_s(s, factor, times)
