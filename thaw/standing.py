"""The state of a deployed model as a gateway reports it: instances that serve or start, or why there are none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from thaw.config import LlmConfig
from thaw.errors import ErrorInfo

RESOURCE_MARK: Final = "thaw.dev/modelfunction"
"""The annotation of an action that a resource of a cluster made (thaw/kubernetes/resource.py)."""

NO_CAPACITY: Final = "NoCapacity"
"""The code of a trouble: no host takes another instance.  A start that failed has its error's own code."""


@dataclass(frozen=True, slots=True)
class ColdStart:
    """The last start of an action that a request waited for, and answered: when it came, and its milliseconds to the
    first token, the wait included."""

    at_wall_ms: int
    ttft_ms: int
    start_mode: str = "cold"


@dataclass(frozen=True, slots=True)
class Standing:
    """``config``: None for an action that a resource made and that has become something else than a model.  ``ready``
    and ``starting`` count instances of the action's version, or those of the pool that serves it; a group of stages is
    one.  ``trouble``: why the last start failed, or why a wanted one does not begin."""

    name: str
    version: str
    config: LlmConfig | None
    annotations: Mapping[str, object] = field(default_factory=dict)
    ready: int = 0
    starting: int = 0
    trouble: ErrorInfo | None = None
    cold_start: ColdStart | None = None


@dataclass(frozen=True, slots=True)
class Standings:
    """Those of a namespace's models.  ``mark`` names this answer: given back, the next one waits for another."""

    mark: str
    actions: tuple[Standing, ...] = ()
