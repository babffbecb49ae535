"""The scheduler's knowledge of one model and of its inspections.

A name may lead to another version at any time, so a start needs facts that a host has confirmed less than TRUST_S ago.
A pin needs no further look.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from gateway.scheduler.placement.stage_bytes import Stages
from thaw.checkpoints import versions
from thaw.ids import ActionName, CommandId, HostId
from thaw.model import ModelFacts

TRUST_S: Final = 1.0
"""Starts that are decided within this time share one look at the store."""


@dataclass(slots=True)
class ModelView:
    stages: Stages | None = None
    fresh: bool = False  # nothing has contradicted the facts since the last look
    looked_s: float = -math.inf  # when a host confirmed them
    asked: tuple[HostId, CommandId] | None = None
    asked_s: float = 0.0
    due_s: float = 0.0  # when an answer to that question must have come; its timer is set for this moment
    failed_on: HostId | None = None  # the host of the last inspection that failed
    doubted: bool = False  # one host has called known facts wrong, and another one is asked
    attempts: int = 0  # inspections since the last one that went well
    failing_since_s: float | None = None  # when the first of them failed
    again_s: float = 0.0  # the end of the pause after the last of them
    actions: set[ActionName] = field(default_factory=set)

    @property
    def facts(self) -> ModelFacts | None:
        return None if self.stages is None else self.stages.facts

    def take(self, facts: ModelFacts, looked_s: float) -> None:
        """Take over the model's facts as a host saw them at ``looked_s``."""
        self.stages = Stages(facts) if facts != self.facts else self.stages
        self.fresh, self.looked_s = True, looked_s

    def is_current(self, now_s: float) -> bool:
        """True when a start may be planned with the facts."""
        facts = self.facts
        if facts is None or not self.fresh:
            return False
        return now_s - self.looked_s <= TRUST_S or bool(versions.pinned(facts.asked_for))

    def look_anew(self) -> None:
        """Inspect the model again: the known facts may be out of date, and so may the pause after a failed
        inspection."""
        self.fresh, self.again_s = False, 0.0
