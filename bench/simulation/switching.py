"""How a group of the simulated platform becomes one worker, or several, when ``decide()`` asks for it.

Stage 0 loads the rest of the model once its bytes have arrived.  The KV cache of the other stages follows while the
group answers; then the group makes no token for SWITCH_STEPS steps.  A later stage that stays loads meanwhile, leaves
the group with the switch of stage 0, and builds an engine of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bench.simulation.constants import BUILD_ENGINE_S, SLOTS, SWITCH_STEPS
from bench.simulation.engine import Engine
from bench.simulation.serving import Endpoint
from bench.simulation.specs import Mechanism
from bench.simulation.starting import Worker
from bench.simulation.system import Consolidation, Unit
from gateway.scheduler.decisions import ConsolidateInstance
from gateway.scheduler.events import Event
from relay.protocol.messages import CommandRefused, InstanceChanged
from thaw.errors import InstanceGone
from thaw.ids import GroupId, own_group
from thaw.instance import InstanceRecord


@dataclass(slots=True)
class Stage:
    """The instance of one stage."""

    record: InstanceRecord
    unit: Unit  # the unit of its whole group, until the group has left it behind
    worker: Worker
    resident: bool
    later: float  # bytes that it fetches in the background once its first part has arrived
    rest: float  # bytes that it loads to become a worker
    has_arrived: bool = False  # the host has the whole model
    is_asked: bool = False
    is_loaded: bool = False
    is_apart: bool = False  # it stays, and its group has switched


class Platform(Protocol):
    engine: Engine
    used: Counter[Mechanism]
    consolidations: list[Consolidation]

    def tell(self, event: Event) -> None: ...

    def stages(self, group_id: GroupId) -> Sequence[Stage]: ...

    def becomes_worker(self, stage: Stage, record: InstanceRecord) -> None: ...

    def serve(self, unit: Unit, endpoint: Endpoint, last: Worker) -> None: ...

    def completed(self, unit: Unit) -> None: ...

    def say(self, unit: Unit) -> None: ...


class Switching:
    def __init__(self, platform: Platform) -> None:
        self._platform = platform

    def ask(self, stage: Stage | None, decision: ConsolidateInstance) -> None:
        if stage is None:
            error = InstanceGone("it has gone").info()
            refused = CommandRefused(decision.command_id, decision.host_id, decision.group_id, error)
            return self._platform.tell(refused)
        if stage.record.n_stages > 1 and not stage.is_asked:
            stage.is_asked = True
            stage.record = replace(stage.record, is_consolidating=True)
            self._load(stage)
        self._platform.tell(InstanceChanged(stage.record))

    def arrived(self, stage: Stage) -> None:
        """The host has the whole model."""
        stage.has_arrived = True
        self._load(stage)

    def _load(self, stage: Stage) -> None:
        if stage.is_asked and stage.has_arrived:
            self._platform.engine.after(stage.rest / stage.worker.server.kind.pcie, self._loaded, stage)

    def _is_here(self, stage: Stage) -> bool:
        return stage in self._platform.stages(stage.record.group_id)

    def _loaded(self, stage: Stage) -> None:
        if not self._is_here(stage):
            return
        stage.is_loaded = True
        if stage.record.stage == 0:
            self._take_kv(stage)
        elif stage.is_apart:
            self._build(stage)

    def _take_kv(self, stage: Stage) -> None:
        """Copy the other stages' blocks while the group answers."""
        n, endpoint = stage.record.n_stages, _endpoint(stage)
        n_bytes = endpoint.context * endpoint.model.kv_bytes * (n - 1) / n
        self._platform.engine.after(n_bytes / stage.worker.server.spec.link, self._switch, stage)

    def _switch(self, stage: Stage) -> None:
        if not self._is_here(stage):
            return
        platform, unit, endpoint = self._platform, stage.unit, _endpoint(stage)
        stall_s = SWITCH_STEPS * endpoint.step_s
        endpoint.reshape(s=1, factor=1.0, hops=1, slots=SLOTS)
        endpoint.stall(stall_s)
        platform.used[Mechanism.CONSOLIDATION] += 1
        platform.consolidations.append(Consolidation(platform.engine.now, stall_s))
        unit.workers, unit.slots = [stage.worker], SLOTS
        for other in platform.stages(stage.record.group_id):
            if other is not stage:
                self._leave_behind(other)
        platform.becomes_worker(stage, _as_worker(stage.record))
        platform.say(unit)

    def _leave_behind(self, stage: Stage) -> None:
        unit = stage.unit
        stage.unit = Unit(unit.index, unit.function, [stage.worker], 1, SLOTS, self._platform.engine.now)
        stage.is_apart = stage.is_asked
        if stage.is_apart and stage.is_loaded:
            self._build(stage)

    def _build(self, stage: Stage) -> None:
        self._platform.engine.after(BUILD_ENGINE_S, self._built, stage)

    def _built(self, stage: Stage) -> None:
        """Requests reach the stage from now on."""
        if not self._is_here(stage):
            return
        platform, unit = self._platform, stage.unit
        endpoint = Endpoint(
            platform.engine, unit.function.model, SLOTS, hops=1, done=lambda _: platform.completed(unit)
        )
        unit.function.starting.append(unit)
        platform.becomes_worker(stage, _as_worker(stage.record))
        platform.serve(unit, endpoint, stage.worker)
        platform.say(unit)


def _endpoint(stage: Stage) -> Endpoint:
    """The endpoint of a group that serves.  No other group is asked to become a worker."""
    if stage.unit.endpoint is None:
        raise ValueError(f"unit {stage.unit.index} does not serve")
    return stage.unit.endpoint


def _as_worker(record: InstanceRecord) -> InstanceRecord:
    """Return the record as the invoker writes it (invoker/containers/consolidate.py)."""
    return replace(
        record,
        group_id=own_group(record.group_id, record.stage),
        stage=0,
        n_stages=1,
        slots=SLOTS,
        is_consolidating=False,
    )
