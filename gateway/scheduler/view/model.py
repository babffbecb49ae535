"""The scheduler's knowledge of one model and of its inspections."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.scheduler.placement.stages import Stages
from thaw.ids import ActionName, CommandId, HostId
from thaw.model import ModelFacts


@dataclass(slots=True)
class ModelView:
    stages: Stages | None = None
    fresh: bool = False
    asked: tuple[HostId, CommandId] | None = None
    asked_s: float = 0.0
    attempts: int = 0  # inspections since the last one that went well
    failing_since_s: float | None = None  # when the first of them failed
    again_s: float = 0.0  # the end of the pause after the last of them
    actions: set[ActionName] = field(default_factory=set)

    @property
    def facts(self) -> ModelFacts | None:
        return None if self.stages is None else self.stages.facts

    def take(self, facts: ModelFacts) -> None:
        """Take over the model's facts as they are now."""
        self.stages = Stages(facts) if facts != self.facts else self.stages
        self.fresh = True

    def look_anew(self) -> None:
        """Inspect the model again: what is known of it may be out of date, and so may the pause after a failed
        inspection."""
        self.fresh, self.again_s = False, 0.0
