"""The systems under comparison, each as a row of choices."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Final

from bench.simulation.constants import APPS, LARGEST_GROUP, MODELS
from gateway.scheduler.ledger import Discipline
from gateway.scheduler.schemes import Variant


class Placing(enum.StrEnum):
    FIRST_FIT = "first fit"
    STARTUP = "least start-up time"  # gateway/scheduler/startup.py
    SELECT = "Algorithm 1"  # gateway/scheduler/select.py and its ledger
    PRODUCTION = "decide()"  # gateway/scheduler/policy.py, whole


@dataclass(frozen=True, slots=True)
class SystemSpec:
    name: str
    label: str
    placing: Placing
    cache: bool = False
    max_stages: int = 1
    min_stages: int = 1
    variant: Variant = "paper"
    discipline: Discipline = "equal"
    consolidate: bool = True
    stem_cells: bool = False
    evict: bool = False  # idle units make room for who waits (decide() does so by itself)
    learned_tail: bool = False  # else what A's scheduler hard-codes
    largest_group: int = LARGEST_GROUP


_PARASERVE = SystemSpec("paraserve", "ParaServe", Placing.SELECT, max_stages=4)
_PLANNED = replace(
    _PARASERVE, name="thaw-planned", label="Thaw (planned: consolidation)", cache=True, variant="min_sharing",
    discipline="edf", stem_cells=True, evict=True, learned_tail=True,
)  # fmt: skip
SYSTEMS: Final = {
    s.name: s
    for s in (
        SystemSpec("vllm", "Serverless vLLM", Placing.FIRST_FIT),
        SystemSpec("serverlessllm", "ServerlessLLM", Placing.STARTUP),
        SystemSpec("serverlessllm-cache", "ServerlessLLM, cached", Placing.STARTUP, cache=True),
        replace(_PARASERVE, name="paraserve-single", label="ParaServe, one worker", max_stages=1),
        _PARASERVE,
        replace(_PARASERVE, name="paraserve-cache", label="ParaServe, cached", cache=True),
        SystemSpec("thaw", "Thaw (today)", Placing.PRODUCTION, cache=True, max_stages=4, variant="min_sharing",
                   discipline="edf", stem_cells=True),
        _PLANNED,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Objectives:
    """P Table 2, with a factor on both; ``summarization`` multiplies that application's TTFT once more."""

    scale: float = 1.0
    summarization: float = 1.0

    def ttft(self, app: str, model: str) -> float:
        further = self.summarization if app == "summarization" else 1.0
        return APPS[app].ttft[_size(model)] * self.scale * further

    def tpot(self, app: str, model: str) -> float:
        return APPS[app].tpot[_size(model)] * self.scale


def _size(model: str) -> int:
    """0: the 7B column, 1: the 13B one."""
    return int(MODELS[model].n_bytes > 20e9)
