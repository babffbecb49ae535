"""The compared systems, each as a row of choices, and the mechanisms that follow from these choices."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Final, Literal

from bench.simulation.constants import APPS, LARGEST_GROUP, MODELS
from bench.simulation.starting import Phases
from gateway.scheduler.placement.link_ledger import Discipline
from gateway.scheduler.placement.schemes import Variant


class Placing(enum.StrEnum):
    FIRST_FIT = "first fit"
    STARTUP = "least start-up time"  # gateway/scheduler/placement/serverlessllm.py
    SELECT = "Algorithm 1"  # gateway/scheduler/placement/select.py and its ledger
    PRODUCTION = "decide()"  # the whole of gateway/scheduler/policy/decide.py


class Mechanism(enum.StrEnum):
    """A mechanism that lets a system answer more requests in time."""

    OVERLAP = "overlap of fetch and runtime"
    PRECREATED = "containers created beforehand"
    STEM_CELLS = "stem cells, with their imports done"
    GROUPS = "pipeline groups"
    CONSOLIDATION = "consolidation of a group that serves"
    SUCCESSION = "one worker in the place of an idle group"
    ALGORITHM_1 = "Algorithm 1"
    ADMISSION = "admission by the ledger of each link"
    DEADLINE_ORDER = "fetches in order of deadline"
    RETAINED = "models that stay in host memory"
    EVICTION = "eviction of idle workers"
    SHARED_DEVICE = "several workers on one device"
    MIGRATION = "migration of runs"
    SSD_TIER = "models on SSDs"


@dataclass(frozen=True, slots=True)
class SystemSpec:
    name: str
    label: str
    placing: Placing
    phases: Phases = Phases.OVERLAPPED
    cache: bool = False
    max_stages: int = 1
    min_stages: int = 1
    forced_stages: int | None = None  # as ``scaling.stages`` of an action: only this number of stages
    variant: Variant = "paper"
    discipline: Discipline = "equal"
    admission: bool = True
    equation: Literal[1, 5] = 5  # predicts a start: 5 for overlapped phases, 1 for phases one after another
    consolidate: bool = False  # consolidate groups that serve
    succession: bool = False  # replace idle groups by one worker
    stem_cells: bool = False
    largest_group: int = LARGEST_GROUP
    not_simulated: frozenset[Mechanism] = frozenset()  # mechanisms of the published system that the simulated one lacks

    @property
    def mechanisms(self) -> frozenset[Mechanism]:
        """The mechanisms of a simulated system of this kind."""
        by_placing = self.placing in (Placing.SELECT, Placing.PRODUCTION)
        groups = by_placing and max(self.max_stages, self.forced_stages or 1) > 1 and self.forced_stages != 1
        has = {
            Mechanism.OVERLAP: self.phases is Phases.OVERLAPPED,
            Mechanism.PRECREATED: self.phases is Phases.PRECREATED,
            Mechanism.STEM_CELLS: self.stem_cells,
            Mechanism.GROUPS: groups,
            Mechanism.CONSOLIDATION: groups and self.consolidate,
            Mechanism.SUCCESSION: groups and self.succession,
            Mechanism.ALGORITHM_1: by_placing,
            Mechanism.ADMISSION: by_placing and self.admission,
            Mechanism.DEADLINE_ORDER: self.discipline == "edf",
            Mechanism.RETAINED: self.cache,
            Mechanism.EVICTION: self.placing is Placing.PRODUCTION,
            Mechanism.SHARED_DEVICE: self.placing is not Placing.STARTUP,
        }
        return frozenset(mechanism for mechanism, it_has in has.items() if it_has)


_SERVERLESSLLM = SystemSpec(
    "serverlessllm",
    "ServerlessLLM",
    Placing.STARTUP,
    Phases.PRECREATED,
    not_simulated=frozenset((Mechanism.MIGRATION, Mechanism.SSD_TIER)),
)
_PARASERVE = SystemSpec("paraserve", "ParaServe", Placing.SELECT, max_stages=4, consolidate=True)
_THAW = SystemSpec(
    "thaw",
    "Thaw",
    Placing.PRODUCTION,
    cache=True,
    max_stages=4,
    variant="min_sharing",
    discipline="edf",
    consolidate=True,
    succession=True,
    stem_cells=True,
)
SYSTEMS: Final = {
    s.name: s
    for s in (
        SystemSpec("vllm", "Serverless vLLM", Placing.FIRST_FIT, Phases.SEQUENTIAL),
        _SERVERLESSLLM,
        replace(_SERVERLESSLLM, name="serverlessllm-cache", label="ServerlessLLM, cached", cache=True),
        replace(_PARASERVE, name="paraserve-single", label="ParaServe, one worker", max_stages=1),
        _PARASERVE,
        replace(_PARASERVE, name="paraserve-cache", label="ParaServe, cached", cache=True),
        _THAW,
    )
}


def _changed(base: SystemSpec, name: str, label: str, **changes: object) -> SystemSpec:
    return replace(base, name=f"{base.name}: {name}", label=label, **changes)  # type: ignore[arg-type]


def _ablations() -> list[SystemSpec]:
    base = _THAW
    return [
        base,
        _changed(base, "no admission", "no admission: promises of a link are ignored", admission=False),
        _changed(base, "Eq. 1", "Eq. 1 foretells starts, instead of Eq. 5", equation=1),
        _changed(base, "apart", "phases do not overlap, and Eq. 1 foretells them", equation=1, phases=Phases.APART),
        _changed(base, "always 1", "every start has one stage", forced_stages=1),
        _changed(base, "at most 2", "two stages at most", max_stages=2),
        _changed(base, "always 4", "every start has four stages, and stays a group", forced_stages=4),
        _changed(base, "only idle", "a group becomes one worker only when it is idle", consolidate=False),
        _changed(base, "no scale-down", "no scale-down: a group stays one", consolidate=False, succession=False),
        _changed(base, "no stem cells", "no stem cells", stem_cells=False),
        _changed(base, "no cache", "models are not kept in host memory", cache=False),
        _changed(base, "paper", "`paper` instead of `min_sharing`", variant="paper"),
        _changed(base, "equal", "equal shares of a link instead of EDF", discipline="equal"),
    ]


ABLATIONS: Final = {s.name: s for s in _ablations()}
"""Thaw, and variants of Thaw with one thing changed."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """P Table 2.  ``scale`` multiplies TTFT and TPOT; ``summarization`` also multiplies that application's TTFT."""

    scale: float = 1.0
    summarization: float = 1.0

    def ttft(self, app: str, model: str) -> float:
        further = self.summarization if app == "summarization" else 1.0
        return APPS[app].ttft[_size(model)] * self.scale * further

    def tpot(self, app: str, model: str) -> float:
        return APPS[app].tpot[_size(model)] * self.scale


def _size(model: str) -> int:
    """0 for the 7B column, 1 for the 13B column."""
    return int(MODELS[model].n_bytes > 20e9)
