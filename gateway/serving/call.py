"""One activation while it runs: its request, and its state so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.serving.hangup import Hangup
from gateway.serving.vectors import Vectors
from relay.protocol.messages import TEXT_ENDPOINTS
from relay.state.api_keys import Subject
from thaw.action import Action
from thaw.clock import wall_ms
from thaw.ids import ActivationId
from thaw.instance import InstanceRecord
from thaw.tracing import trace
from thaw.tracing.trace import Phase, TraceEvent

QUEUE_LIMIT_S = 60.0
"""An ordinary function may wait this long for its container; its time limit counts from its dispatch, as OpenWhisk's
does."""


@dataclass(slots=True, eq=False)
class Call:
    """``payload`` is the function's argument, or the validated OpenAI body.  ``claim`` must return True before anything
    runs (a 202 that is not idempotent runs once)."""

    activation_id: ActivationId
    action: Action
    subject: Subject
    payload: Any
    hangup: Hangup
    endpoint: str = ""
    seed: int | None = None
    claim: Callable[[], bool] | None = None
    cause: str = ""  # the activation of the sequence or trigger that invoked it
    caused_by: str = ""  # "sequence"
    binding: str = ""  # through which it was named
    lines: list[str] = field(default_factory=list)  # lines that the platform writes into its logs
    received_s: float = field(default_factory=time.monotonic)
    received_ms: int = field(default_factory=wall_ms)
    announced_s: float | None = None  # when demand was put; None: not in the registry
    queued: bool = False
    events: list[TraceEvent] = field(default_factory=list)
    instance: InstanceRecord | None = None
    cold: bool = False  # it waited for this instance's start
    dispatched_ms: int | None = None
    emitted: list[int] = field(default_factory=list)
    answer_bytes: int = 0  # the memory of the answer's tokens
    prompts_bytes: list[int] = field(default_factory=list)  # the memory of the prompts' logprobs; one for all parts
    answers_apart: bool = False  # the client's answer is beside the outcome; the record may have only its length
    vectors: Vectors | None = None  # an embedding model's answer, if it is apart
    losses: int = 0
    n_put_off: int = 0  # by instances that had accepted it, and were too busy for it
    model_version: str = ""  # the version that made the answer's tokens
    adapter: str = ""  # the same, with its version; empty until the first token

    def note_instance(self, record: InstanceRecord) -> None:
        """The call goes to this instance now, with the tokens that others have emitted."""
        self.instance = record
        if not (self.emitted and self.model_version):
            self.model_version = record.model_version

    def trace(self, phase: Phase, attrs: Mapping[str, object] | None = None) -> None:
        group_id = self.instance.group_id if self.instance is not None and self.cold else ""
        self.events.append(trace.event(phase, activation_id=self.activation_id, group_id=group_id, attrs=attrs))

    @property
    def wanted_adapter(self) -> str:
        """The URI of the adapter that an instance needs for it; empty without one."""
        return "" if self.endpoint in TEXT_ENDPOINTS else self.action.adapter

    @property
    def timeout_s(self) -> float:
        return self.action.limits.timeout / 1000

    @property
    def wait_deadline_s(self) -> float:
        """An LLM's limit includes its cold start."""
        return self.received_s + self.timeout_s + (0 if self.action.is_llm else QUEUE_LIMIT_S)

    def run_deadline_s(self) -> float:
        return self.wait_deadline_s if self.action.is_llm else time.monotonic() + self.timeout_s
