"""The view's entries for one instance, one request, one group and one action."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gateway.scheduler.events import ActionFacts
from gateway.scheduler.placement.window import Window
from relay.protocol.messages import DemandAdded
from thaw.ids import ActivationId, CommandId, GroupId, HostId, InstanceId
from thaw.instance import InstanceRecord, InstanceState
from thaw.plan import Plan


@dataclass(slots=True)
class InstanceView:
    record: InstanceRecord
    changed_s: float
    idle_since_s: float | None = None
    releasing: CommandId | None = None
    started_by: CommandId | None = None  # the start was decided, and its host has not reported it yet
    wake_s: float | None = None  # when it is examined again

    @property
    def state(self) -> InstanceState:
        return self.record.state

    @property
    def is_idle(self) -> bool:
        return self.state is InstanceState.READY and self.idle_since_s is not None and self.releasing is None


@dataclass(slots=True)
class DemandView:
    demand: DemandAdded
    queued_s: float
    held_until_s: float = math.inf  # its gateway has given it up by then
    attempts: int = 0  # starts that were made for it and failed
    group_id: GroupId | None = None  # the start that it waits for


@dataclass(slots=True)
class Consolidation:
    """How far a pipeline is on its way to one worker or several (policy/consolidation.py, policy/scale_up.py)."""

    asked: CommandId | None = None  # its host was asked and has not answered
    due_s: float = math.inf  # when that is late, or when the host is asked again
    n_failed: int = 0
    is_over: bool = False  # it stays a pipeline
    n_workers: int = 1  # the number of workers that are to stay
    kept: dict[InstanceId, CommandId] = field(default_factory=dict)  # later stages that were asked to stay


@dataclass(slots=True)
class KeptStage:
    """A later stage that its pipeline has left, and that builds an engine of its own (policy/scale_up.py)."""

    plan: Plan  # the plan of the worker that it becomes
    pipeline: GroupId
    stage: int
    since_s: float  # when it last made progress
    later_bytes: int | None = None  # the bytes that it lacked then


@dataclass(slots=True)
class GroupView:
    """The stages that answer as one.  A group lasts from its decision until the first of its stages has gone, which
    ends it.  Stages that a consolidation left behind belong to it no more."""

    plan: Plan
    instance_ids: tuple[InstanceId, ...]  # by stage
    command_ids: tuple[CommandId, ...]
    slots: int  # requests it holds at once
    activation_ids: set[ActivationId]  # the requests that wait for its start
    progress_s: float
    done_bytes: dict[tuple[HostId, int], int] = field(default_factory=dict)  # by host and stage
    is_starting: bool = True  # not every stage is READY yet
    served: tuple[ActivationId, ...] = ()  # the requests that it was started for
    gives_way: bool = False  # it was asked to leave its place to one worker
    consolidation: Consolidation | None = None  # None: it was never asked to become one worker


@dataclass(slots=True)
class ActionView:
    window: Window
    facts: ActionFacts | None = None  # None: it was deleted
    waiting: dict[ActivationId, None] = field(default_factory=dict)  # in order of arrival
    instances: set[InstanceId] = field(default_factory=set)
    serving: dict[str, int] = field(default_factory=dict)  # groups that start or are ready and stay, by version
    failures: int = 0  # starts failed since the last one that went well
    retry_at_s: float = 0.0
    gathers_until_s: float = 0.0  # requests that come before then are met together
    wake_s: float | None = None  # when it is examined again
    late_s: float = -math.inf  # when a start was last found to be in time only after a release
    late_on: frozenset[HostId] = frozenset()  # the hosts of that start
    broken_version: str = ""  # a DeveloperError: min_instances stops trying until the action changes

    @property
    def minimum(self) -> int:
        return 0 if self.facts is None else self.facts.min_instances

    @property
    def n_serving(self) -> int:
        """Groups of the current version that start or are ready and stay."""
        return sum(self.serving.values()) if self.facts is None else self.serving.get(self.facts.version, 0)

    @property
    def is_spare(self) -> bool:
        """One of its idle groups may be evicted for another action: no request waits, and the minimum stays kept."""
        return not self.waiting and self.n_serving > self.minimum
