"""Every number the simulator takes from elsewhere.  Its hash is printed with each result: same hash, same constants.

Sources: P the ParaServe paper, A the figures published with HydraServe's artifact, fit = least squares over A's cold
starts (what rests on a fit is reported as calibration, not as validation), assume = in no source.  Bytes, bytes/s, s.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

GBIT: Final = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    n_bytes: int
    t_p: float  # prefill of 1024 tokens in a batch of 8, on a whole device (P Table 1; assume: bytes ratio elsewhere)
    t_d: float  # one token at batch 8
    kv_bytes: float  # for one token


@dataclass(frozen=True, slots=True)
class GpuKind:
    """Durations of a start's phases on one kind of device (sums fit, splits assume)."""

    name: str
    memory: int  # A: usable
    pcie: float  # assume
    t_cc: float
    t_cu: float
    t_l: float
    tail: float  # last byte → engine, plus tail_per_byte · bytes (fit)
    tail_per_byte: float
    vllm_extra: float  # fit
    vllm_load: float  # fit
    sllm_start: float  # ServerlessLLM with its container pre-created (fit)
    sllm_copy: float  # host → device (fit)


@dataclass(frozen=True, slots=True)
class ServerSpec:
    gpu: str
    n_gpus: int
    link: float
    memory: int

    @property
    def cache_bytes(self) -> float:
        """A: 0.9 of the memory less what the devices' workers need."""
        return max(0.0, 0.9 * self.memory - (GPUS[self.gpu].memory + 4e9) * self.n_gpus - 5e9)


@dataclass(frozen=True, slots=True)
class App:
    name: str
    ttft: tuple[float, float]  # objective of 7B, 13B (P Table 2)
    tpot: tuple[float, float]
    share: float  # share of the requests (A's shares at CV 8, RPS 0.6)
    system_prompt: int
    prompt: tuple[float, float, float]  # tokens: median, 95th percentile, largest
    output: tuple[float, float, float]


def _model(name: str, n_bytes: float, like: str, kv: float = 524e3) -> Model:
    base = {"7b": (13.476839424e9, 1.5, 0.042), "13b": (26.03173888e9, 2.4, 0.058)}[like]
    scale = n_bytes / base[0]
    return Model(name, int(n_bytes), base[1] * scale, base[2] * scale, kv)


MODELS: Final = {
    m.name: m
    for m in (
        _model("llama2-7b", 13.476839424e9, "7b"),
        _model("llama2-13b", 26.03173888e9, "13b", 819e3),
        _model("opt-2.7b", 5.30e9, "7b"),
        _model("opt-6.7b", 13.3e9, "7b"),
        _model("opt-13b", 25.7e9, "13b", 819e3),
        _model("llama3-8b", 16.1e9, "7b"),
        _model("falcon-7b", 14.4e9, "7b"),
    )
}
GPUS: Final = {
    "A10": GpuKind("A10", 22 * 10**9, 20e9, 1.0, 0.8, 2.9, 1.7, 0.0, 1.1, 3.3e9, 6.4, 6.5e9),
    "V100": GpuKind("V100", 32 * 10**9, 12e9, 1.5, 1.3, 5.0, 3.0, 0.055e-9, 1.5, 1.5e9, 9.6, 4.9e9),
    # the 40 s of P's production profile at 5 Gbit/s (assume: how they split)
    "A10-production": GpuKind("A10-production", 24 * 10**9, 20e9, 8.0, 1.3, 5.0, 1.7, 0.0, 0.0, 5.2e9, 6.4, 6.5e9),
}
TESTBEDS: Final = {
    "i": (ServerSpec("A10", 1, 16 * GBIT, 188 * 10**9),) * 4 + (ServerSpec("V100", 4, 16 * GBIT, 368 * 10**9),) * 4,
    # V100 servers first: first fit goes by number
    "ii": (ServerSpec("V100", 4, 16 * GBIT, 368 * 10**9),) * 4 + (ServerSpec("A10", 4, 64 * GBIT, 752 * 10**9),) * 2,
    "i-a10": (ServerSpec("A10", 1, 16 * GBIT, 188 * 10**9),) * 4,
    "i-v100": (ServerSpec("V100", 4, 16 * GBIT, 368 * 10**9),) * 4,
    "brownfield": (ServerSpec("A10-production", 1, 5 * GBIT, 188 * 10**9),) * 4,
}
APPS: Final = {
    a.name: a
    for a in (
        App("chatbot", (7.5, 12.0), (0.2, 0.2), 0.55, 64, (1730, 6563, 8192), (415, 920, 1024)),
        App("code", (7.5, 12.0), (0.084, 0.116), 0.35, 112, (155, 334, 450), (63, 188, 250)),
        App("summarization", (15.0, 24.0), (0.084, 0.116), 0.10, 104, (2730, 3813, 4096), (167, 512, 512)),
    )
}
BLOCKS: Final = tuple((app, model) for app in APPS for model in ("llama2-13b", "llama2-7b"))
FUNCTIONS_PER_BLOCK: Final = 64
LONGEST_INPUT: Final = 1024  # A truncates prompts
LONGEST_OUTPUT: Final = 1024
POPULARITY_SIGMA: Final = 3.27  # log of a function's count over 14 days, fitted to the 119 apps of the 2021 trace
WINDOW_S: Final = 600 / 336  # a window of the 14-day trace after its compression into one hour
WINDOW_CV: Final = 3.0  # between windows (assume)

KV_RESERVE: Final = 5 * 10**9  # for a full worker (A)
SLOTS: Final = 8  # requests at once on a worker (P 8.4, A)
KEEP_ALIVE_S: Final = 30.0  # A
SCALING_WINDOW_S: Final = 1.0  # A
LARGEST_GROUP: Final = 4  # P
HOP_S: Final = 0.001  # A
HOP_BYTES: Final = 8e3  # a token's hidden states (7B; H)
PREFILL_BASE_S: Final = 0.02  # assume
A_TAIL_S: Final = 2.0  # A's scheduler subtracts this from every deadline
STEM_FORK_S: Final = (
    0.2  # a start from a stem cell (what gateway/scheduler/view/history.py supposes before it has seen one)
)
SWITCH_STEPS: Final = 4  # decode steps without a token at a group's switch (bench/consolidate.py: stall_decode_steps)
BUILD_ENGINE_S: Final = 0.3  # for a later stage that becomes a worker (docs/decisions/0031)
HEARTBEAT_S: Final = 1.0  # the scheduler's default

HASH: Final = hashlib.blake2b(Path(__file__).read_bytes(), digest_size=8).hexdigest()


def prefill_s(model: Model, n_tokens: int) -> float:
    return model.t_p * n_tokens / 1024 + PREFILL_BASE_S


def token_s(model: Model, batch: float) -> float:
    """t_d at a batch of 8 (assume: three quarters do not depend on the batch)."""
    return model.t_d * (0.75 + 0.25 * batch / 8)
