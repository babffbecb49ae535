"""The engine protocol: token ids in, token events out.  Text is the proxy's business.

An engine runs one stage in one process.  ``submit`` and ``abort`` may be called from any thread and never block on
the device; events come back through the callback the engine was made with, a batch per step.  Every submitted
request ends in exactly one Finished or Failed, an aborted one in Finished("abort").

``Token.index`` counts from 0 per activation.  A request that continues an answer carries the tokens already
delivered in ``output_so_far``; its first Token has index ``first_index == len(output_so_far)``, and the tokens are the
ones an uninterrupted run would have produced: sampling depends on (seed, index) and penalties see the whole output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from relay.protocol.messages import LlmInit
from thaw.errors import ErrorInfo
from thaw.hops import HopPath
from thaw.trace import TraceEvent
from thaw_runtime.weights.segment import Segment


@dataclass(frozen=True, slots=True)
class Sampling:
    """``max_tokens`` counts the whole output, ``output_so_far`` included.  ``temperature`` 0 is greedy.

    ``logprobs`` is the number of alternatives reported beside each token's own (None: no logprobs at all).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    first_index: int = 0
    output_so_far: tuple[int, ...] = ()

    @property
    def over(self) -> str | None:
        """Why ``output_so_far`` is the whole answer, if it is: a worker may be lost before it can say that it ended."""
        output, sampling = self.output_so_far, self.sampling
        if output and len(output) >= sampling.min_tokens and output[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if len(output) >= sampling.max_tokens else None


@dataclass(frozen=True, slots=True)
class Logprobs:
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int  # of the whole answer, output_so_far included


@dataclass(frozen=True, slots=True)
class Token:
    """One token.  A request's first one carries what becomes attributes of a trace event: ``spent`` says what the
    engine's thread spent on it, ``hops`` what carried it from each stage of a pipeline to the next."""

    index: int
    token_id: int
    logprobs: Logprobs | None = None
    spent: Mapping[str, object] | None = field(default=None, compare=False)
    hops: tuple[HopPath, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Finished:
    """``hops`` are those of a pipeline, if one changed since the request's first token."""

    reason: str  # "stop" | "length" | "abort"
    usage: Usage
    hops: tuple[HopPath, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Failed:
    error: ErrorInfo


Event = Token | Finished | Failed
Emit = Callable[[Sequence[tuple[str, Event]]], None]
"""Takes (request_id, event) pairs of one step, in order.  Called on the engine's thread; must not block."""


GRANT_DEADLINE_S = 60.0
"""The invoker grants before it sends /init, so this bounds a broken invoker, not a slow fetch."""


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """What a start reports: where its time went, and what it found out about the model."""

    events: tuple[TraceEvent, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    max_model_len: int = 0


class Engine(Protocol):
    def start(self, stage_plan: LlmInit, segment: Segment) -> EngineStarted:
        """Build the model, follow the watermark, return when requests are accepted.

        Raises ModelUnsupported, ModelCorrupt, MemoryTooSmall, InitFailed, or what the segment's wait raises.
        """
        ...

    def submit(self, request: EngineRequest) -> None: ...

    def abort(self, request_id: str) -> None:
        """The request ends in Finished("abort") at the next step; an unknown id is ignored."""
        ...

    def requests(self) -> tuple[str, ...]:
        """Ids of the requests that have not ended."""
        ...

    def drain(self, deadline_s: float) -> bool:
        """Wait until no request is open.  False when ``deadline_s`` seconds did not suffice."""
        ...

    def memory(self) -> Mapping[str, int]:
        """Bytes: reserve, weights, intermediates, kv; and kv_tokens."""
        ...

    def stop(self) -> None:
        """End the engine; open requests fail."""
        ...

    def join(self) -> None:
        """Return when a started engine has ended, stopped or broken, and has told everybody."""
        ...


MakeEngine = Callable[[Emit], Engine]
