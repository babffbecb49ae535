"""OpenWhisk's record of one invocation in the form in which it is stored; gateway/api renders it for clients."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from thaw.ids import ActionName, ActivationId, Namespace


class ActivationStatus(enum.IntEnum):
    """OpenWhisk's four endings, by statusCode."""

    SUCCESS = 0
    APPLICATION_ERROR = 1
    DEVELOPER_ERROR = 2
    INTERNAL_ERROR = 3

    @property
    def text(self) -> str:
        return ("success", "application error", "action developer error", "whisk internal error")[self.value]


@dataclass(frozen=True, slots=True)
class Activation:
    """One invocation that has ended.  ``init_ms`` is set for cold and prewarmed runs only (OpenWhisk's initTime)."""

    activation_id: ActivationId
    namespace: Namespace
    action: ActionName
    action_version: str
    subject: str
    kind: str
    start_ms: int
    end_ms: int
    status: ActivationStatus
    result: object
    logs: tuple[str, ...] = ()
    wait_ms: int = 0
    init_ms: int | None = None
    start_mode: str = "warm"
    group_id: str = ""
    host: str = ""
    instance_id: str = ""
    timed_out: bool = False
    limits: Mapping[str, int] = field(default_factory=dict)
    usage: Mapping[str, int] = field(default_factory=dict)  # tokens of an LLM request
    seed: int | None = None
    cause: str = ""  # the activation of the sequence or of the trigger that invoked it
    caused_by: str = ""  # "sequence" for a component of one
    binding: str = ""  # the binding through which the action was called: "namespace/name"
    model_version: str = ""
    """The version of the model that answered (ModelFacts.version); empty for an ordinary function."""
