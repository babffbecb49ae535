"""How a deployed model stands: what of it serves, what starts, and why nothing does, as a gateway tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thaw.config import LlmConfig
from thaw.errors import ErrorInfo


@dataclass(frozen=True, slots=True)
class ColdStart:
    """The last start of an action that a request waited for, and answered: when it came, and its milliseconds to the
    first token, the wait included."""

    at_wall_ms: int
    ttft_ms: int
    start_mode: str = "cold"


@dataclass(frozen=True, slots=True)
class Standing:
    """``ready`` and ``starting`` count instances of the action's version; a group of stages is one.  ``trouble``: why
    the last start failed, or why a wanted one does not begin; None as far as this gateway knows."""

    name: str
    version: str
    config: LlmConfig
    annotations: Mapping[str, object] = field(default_factory=dict)
    ready: int = 0
    starting: int = 0
    trouble: ErrorInfo | None = None
    cold_start: ColdStart | None = None


@dataclass(frozen=True, slots=True)
class Standings:
    """The models of one namespace.  ``token`` names this answer: given back, the next one waits for another."""

    token: str
    actions: tuple[Standing, ...] = ()
