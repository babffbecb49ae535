"""A container's messages: ``/init``, ``/run``, and ``/consolidate`` of a pipeline's full stages.

Part of relay/protocol/messages.py, which tags and reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from thaw.config import LlmConfig
from thaw.errors import ErrorInfo
from thaw.ids import ActionName, GroupId, HostId
from thaw.plan import StageRole
from thaw.tracing.trace import TraceEvent


@dataclass(frozen=True, slots=True)
class GroupCredential:
    """The credential gives a stage access to its group's part of the relay server only.  It ends with the group."""

    username: str
    secret: str


@dataclass(frozen=True, slots=True)
class GroupLink:
    """How the stages of a group reach one another.

    ``kind`` names a transport (relay/transports/registry.py).  ``address`` is where its ends meet: for ``object`` the
    URI of a store (``s3://…``, ``file://…``), for every other kind the URL of the relay server, without a credential.
    ``host_address`` is where a stage listens, if others may reach it.
    """

    kind: str
    address: str
    credential: GroupCredential
    host_address: str = ""


@dataclass(frozen=True, slots=True)
class StageShape:
    """Every stage knows this of every other, so that all compute the same number of KV blocks without asking.

    ``weight_bytes`` counts all weights that the stage will hold.  A full stage has the KV cache of every layer.
    """

    layers: tuple[int, int]
    reserve_bytes: int
    weight_bytes: int
    role: StageRole = StageRole.LOW


@dataclass(frozen=True, slots=True)
class LlmInit:
    """The value of ``/init`` for kind llm:vllm: one stage of a plan.

    ``link`` and ``stages`` are None and () for a plan of one stage.
    """

    action: ActionName
    group_id: GroupId
    stage: int
    n_stages: int
    layers: tuple[int, int]
    config: LlmConfig
    reserve_bytes: int
    share: float
    n_threads: int
    host: HostId
    role: StageRole = StageRole.FULL
    link: GroupLink | None = None
    stages: tuple[StageShape, ...] = ()
    model_version: str = ""  # the plan's; an answer that another version began is refused


@dataclass(frozen=True, slots=True)
class InitReply:
    ok: bool
    events: tuple[TraceEvent, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class PreflightReply:
    """The answer to ``POST /preflight`` for a model that would start.  ``engine`` is a name and a version, and
    ``max_model_len`` the tokens of a request that it would take."""

    engine: str
    max_model_len: int
    notes: tuple[str, ...] = ()  # sentences that say what differs from the request
    embeds: bool = False  # an embedding model, which generates no text
    most_stages: int = 0  # of a pipeline; 0: no limit was found


@dataclass(frozen=True, slots=True)
class ConsolidateReply:
    """The answer to ``POST /consolidate``, and to ``GET /consolidate`` later: the stage has become a worker.

    ``tail_bytes`` of the copied ``n_bytes`` of KV blocks were in the last round, while no step was scheduled.
    """

    rounds: int
    n_bytes: int
    tail_bytes: int
    wait_s: float  # until the model was whole
    stall_s: float  # from the last step of the pipeline to the first of the whole worker
    events: tuple[TraceEvent, ...] = ()
    build_s: float = 0.0  # time in which a later stage built an engine of its own


@dataclass(frozen=True, slots=True)
class LlmResume:
    """Continue an answer: these tokens were already delivered; the next token's number follows the last of them.

    ``model_version``: the version of the model that computed them, and ``adapter`` the adapter; empty: it is not known.
    """

    output_token_ids: tuple[int, ...]
    model_version: str = ""
    adapter: str = ""


MAX_RUN_MESSAGE_BYTES: Final = 8 * 1024 * 1024
"""The largest message in the answer to a run."""


EMBEDDINGS: Final = "embeddings"
TEXT_ENDPOINTS: Final = ("tokenize", "detokenize")
"""The endpoints whose runs need the tokenizer of the base model, but neither its engine nor an adapter."""


@dataclass(frozen=True, slots=True)
class LlmRun:
    """``prefill_only``: compute the prompt and the tokens of ``resume`` into the prefix cache, and emit no token.  The
    answer is one RunFinished with the reason "prefilled".  A run that moves to another worker is announced there this
    way, so that little is missing when it arrives.  ``adapter``: the URI of the function's own, which the container
    compares with the invoker's header; an invoker from before adapters existed sends none."""

    endpoint: str  # "chat" | "completions" | "embeddings" | "tokenize" | "detokenize"
    body: Mapping[str, Any]  # validated OpenAI JSON
    seed: int
    resume: LlmResume | None = None
    prefill_only: bool = False
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of the call of a tool.  The first part of call ``index`` has its name, the others parts of its arguments,
    which together are the text of a JSON object."""

    index: int
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class RunToken:
    """``index`` counts from 0 per activation: a consumer drops one it has seen and fails on a gap.

    ``text`` may be empty: bytes of an unfinished character, or held back because a stop string may be starting.
    """

    index: int
    token_id: int
    text: str
    logprob: TokenLogprob | None = None
    calls: tuple[CallDelta, ...] = ()
    adapter: str = ""  # with the first token of a run: the adapter that computes it, with its version


@dataclass(frozen=True, slots=True)
class RunVectors:
    """Vectors of an embedding model, each with the number of its text: float32, little-endian, in base64.  They come in
    any order."""

    vectors: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class RunHead:
    """The head of the answer of an HTTP server in an image, without the headers of its connection.  A header that it
    repeats has several texts.  ``n_bytes``: the announced length of the body, which follows in RunParts."""

    status: int
    headers: Mapping[str, str | list[str]]
    n_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RunPart:
    """The next bytes of its body, in base64."""

    data: str


@dataclass(frozen=True, slots=True)
class RankedToken:
    """A token that could stand at one place of a prompt.  ``rank`` counts from 1, the most likely one."""

    token_id: int
    token: str
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class RunPrompt:
    """The information about its prompt that a request asked for.  If wanted, ``texts`` has one text for each token, and
    ``logprobs`` one entry for each token, the first of which is None.  ``ranked`` lists, for each token from the second
    on, the tokens that could stand there; the prompt's own token comes first."""

    token_ids: tuple[int, ...]
    text: str = ""
    texts: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
    ranked: tuple[tuple[RankedToken, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class RunFinished:
    reason: str  # "stop" | "length" | "tool_calls" | "prefilled"
    prompt_tokens: int
    completion_tokens: int
    text: str = ""  # the text that was held back
    events: tuple[TraceEvent, ...] = ()
    calls: tuple[CallDelta, ...] = ()  # in the text that was held back
    prompt: RunPrompt | None = None


@dataclass(frozen=True, slots=True)
class RunFailed:
    error: ErrorInfo
