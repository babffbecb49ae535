"""The engine protocol: token ids in, token events (of an embedding model: vectors) out.  The proxy handles text.

An engine runs one stage in one process.  ``submit`` and ``abort`` may be called from any thread and never block on
the device.  Events come back through the callback with which the engine was made, one batch a step.  Every submitted
request ends in exactly one Finished or Failed, an aborted one in Finished("abort").

``Token.index`` counts from 0 for each activation.  A request that continues an answer carries the tokens already
delivered in ``output_so_far``.  Its first Token has index ``first_index == len(output_so_far)``, and its tokens are the
ones that an uninterrupted run would have produced: sampling depends on (seed, index), and penalties apply to the whole
output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from relay.protocol.messages import LlmInit
from thaw.errors import ErrorInfo
from thaw.tracing.hops import HopPath
from thaw.tracing.trace import TraceEvent
from thaw_runtime.engine.text_reading import TextReading
from thaw_runtime.weights.readable_segment import Segment


class GrammarKind(StrEnum):
    JSON = "json"
    """A JSON Schema."""
    REGEX = "regex"
    CHOICE = "choice"
    """A JSON list of strings; the answer is one of them."""
    GRAMMAR = "grammar"
    """Rules in EBNF (``root ::= …``) or in Lark's language."""
    STRUCTURAL_TAG = "structural_tag"
    """xgrammar's JSON of tags; the answer is free between the tags."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The rules that a whole answer must follow.  ``param`` names the request's parameter, and ``schema_params`` name
    the parameters of the schemas in a structural tag, in their order."""

    kind: GrammarKind
    text: str
    param: str
    schema_params: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """``max_tokens`` counts the whole output, ``output_so_far`` included.  ``temperature`` 0 is greedy.

    ``logprobs`` is the number of alternatives that are reported with each token's own logprob (None: no logprobs at
    all).
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
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None  # the same as logprobs, for the prompt's tokens
    prompt_param: str = "echo"  # the request's parameter that asks for them


@dataclass(frozen=True, slots=True)
class EngineRequest:
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    first_index: int = 0
    output_so_far: tuple[int, ...] = ()
    adapter: str = ""  # the name under which it was loaded; empty: the base model answers
    cache_salt: str = ""  # it finds only prompts with the same one in the prefix cache

    @property
    def over(self) -> str | None:
        """The reason why ``output_so_far`` is already the whole answer, or None.  The worker that produced it may be
        lost before it reports that the answer has ended.
        """
        output, sampling = self.output_so_far, self.sampling
        if output and len(output) >= sampling.min_tokens and output[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if len(output) >= sampling.max_tokens else None


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """Texts for an embedding model, which computes one vector for each.  ``dimensions`` asks for shorter vectors, if
    the model has them; 0 means the model's own size."""

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    dimensions: int = 0
    cache_salt: str = ""  # as an EngineRequest's


@dataclass(frozen=True, slots=True)
class Logprobs:
    """``top`` begins with the most likely token.  ``rank`` is the token's own rank, counted from 1; 0 means that it was
    not requested."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int  # the tokens of the whole answer, output_so_far included


@dataclass(frozen=True, slots=True)
class Token:
    """One token.  A request's first token carries attributes of a trace event: ``spent`` is the time that the engine
    thread spent on it, and ``hops`` are the paths that carried it from each stage of a pipeline to the next.
    """

    index: int
    token_id: int
    logprobs: Logprobs | None = None
    spent: Mapping[str, object] | None = field(default=None, compare=False)
    hops: tuple[HopPath, ...] = field(default=(), compare=False)
    prompt: tuple[Logprobs, ...] = ()
    """Logprobs of the prompt's tokens, from the second on."""


@dataclass(frozen=True, slots=True)
class Finished:
    """``hops`` are the paths between the stages of a pipeline, if one changed since the request's first token."""

    reason: str  # "stop" | "length" | "abort"
    usage: Usage
    hops: tuple[HopPath, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Failed:
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vector of text ``index`` of an EmbedRequest: float32, little-endian, in base64."""

    index: int
    vector: str


Event = Token | Embedded | Finished | Failed
Emit = Callable[[Sequence[tuple[str, Event]]], None]
"""Takes (request_id, event) pairs of one step, in order.  Called on the engine thread; must not block."""


GRANT_DEADLINE_S = 60.0
"""How long to wait for the segment's descriptors.  The invoker grants them before it sends /init, so this limits the
wait for a broken invoker, not for a slow fetch.
"""


@dataclass(frozen=True, slots=True)
class Embeds:
    """The vectors of an embedding model.  ``dimensions`` are the sizes of its shorter vectors; if it is empty and
    ``matryoshka`` is true, every size up to the model's own is possible."""

    size: int
    matryoshka: bool = False
    dimensions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """The report of a start: how it spent its time, and which limits the model has.  ``embeds``: the model embeds texts
    and generates none."""

    events: tuple[TraceEvent, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    max_model_len: int = 0
    embeds: Embeds | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """The engine can run the model on this device.  ``engine`` is its name and version, and each of ``notes`` is a
    sentence about a setting that will differ from the function's request.  ``most_stages`` limits a pipeline; 0: by its
    number of layers alone, or nobody has tried.  ``reading`` is its own of the text side, if it has one."""

    engine: str = ""
    max_model_len: int = 0
    notes: tuple[str, ...] = ()
    embeds: bool = False
    most_stages: int = 0
    reading: TextReading | None = None


@dataclass(frozen=True, slots=True)
class Consolidated:
    """The report of a consolidation, in which stage 0 of a group became a worker, or a later stage another one."""

    rounds: int  # the number of rounds in which KV blocks were copied
    n_bytes: int  # size of the copied blocks in all rounds
    tail_bytes: int  # size of the blocks in the last round, while no step was scheduled
    wait_s: float  # time until the model was whole
    stall_s: float  # time from the pipeline's last step to the whole worker's first
    events: tuple[TraceEvent, ...] = ()
    build_s: float = 0.0  # time in which a later stage built and checked its own engine


ConsolidationEnded = Consolidated | ErrorInfo
"""An ErrorInfo means that the group is still a pipeline, which answers as before."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter to load as ``name``, into the place of the one that it ``replaces``, if any.  The receiver closes
    ``weights_fd``, the memory of its safetensors file."""

    name: str
    replaces: str
    config: bytes  # adapter_config.json
    weights_fd: int


class Engine(Protocol):
    def check(self, stage_plan: LlmInit, segment: Segment) -> Checked:
        """Say whether a start would succeed here, from the sidecars alone: ``segment`` holds no weights, and the only
        entry of ``stage_plan.stages`` says how many bytes they have.  A ``reserve_bytes`` of 0 leaves the memory out.

        Called instead of :meth:`start`, in a process that ends afterwards.  Raises ModelUnsupported, ModelCorrupt,
        MemoryTooSmall, InitFailed.
        """
        ...

    def start(self, stage_plan: LlmInit, segment: Segment) -> EngineStarted:
        """Build the model, follow the watermark, and return when the engine accepts requests.

        Raises ModelUnsupported, ModelCorrupt, MemoryTooSmall, InitFailed, or the errors of the wait for the segment.
        """
        ...

    def submit(self, request: EngineRequest | EmbedRequest) -> None:
        """Take a request.  It fails if the model does not answer requests of its kind."""
        ...

    def abort(self, request_id: str) -> None:
        """The request ends in Finished("abort") at the next step; an unknown id is ignored."""
        ...

    def requests(self) -> tuple[str, ...]:
        """Ids of the requests that have not ended."""
        ...

    def consolidate(self, ended: Callable[[ConsolidationEnded], None]) -> None:
        """Become a whole worker while the pipeline answers.  Returns at once; ``ended`` is called once, on any thread.

        Called for a stage of a pipeline that has started, and for one attempt at a time.  Once it has become a worker,
        the end of the other stages changes nothing for it.  An engine that cannot do it reports ModelUnsupported.  A
        later stage waits until stage 0 has become one; the requests are stage 0's.
        """
        ...

    def load_adapter(self, files: AdapterFiles, ended: Callable[[ErrorInfo | None], None]) -> None:
        """Load an adapter between two steps.  Returns at once; ``ended`` is called once, on any thread, with None when
        requests may name it.  An adapter that does not fit the model ends in ModelUnsupported, and the adapter that it
        replaces is unloaded nevertheless.  If requests use the replaced adapter, or all places are taken, the load ends
        in InstanceBusy and changes nothing."""
        ...

    def drain(self, deadline_s: float) -> bool:
        """Wait until no request is open.  False after ``deadline_s`` seconds."""
        ...

    def memory(self) -> Mapping[str, int]:
        """The bytes of reserve, weights, intermediates and kv, and the number of kv_tokens."""
        ...

    def stop(self) -> None:
        """End the engine; open requests fail."""
        ...

    def join(self) -> None:
        """Wait until a started engine has stopped or broken, and all open requests and other stages have been told."""
        ...


MakeEngine = Callable[[Emit], Engine]
