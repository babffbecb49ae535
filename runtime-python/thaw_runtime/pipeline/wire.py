"""The messages between the stages of a pipeline.  docs/pipeline.md draws which stage sends which message.

::

    stage 0 ──Step + tensors──▶ stage 1 ──Step + tensors──▶ … ──▶ stage s−1 ──Sampled──▶ stage 0
            ──Beat───────────▶         ──Beat───────────▶               ──Beat─────▶
                                       ──PathTaken──────▶               ──PathTaken▶
            ──Parted─────────▶         ──Parted─────────▶   once, when stage 0 has become a worker
                                       ──KvPart─────────────────────────────────────▶   (kv_wire.py)

A batch is one relay message: a tensor ``step`` of bytes (the Step in msgpack), followed by the tensors of the model
(``hidden_states`` and, if the family has one, ``residual``), described as in relay/protocol/tensors.py.  Every other
message is one msgpack value in a control message.  A received message is checked for types and bounds before it is
used; numbers that become addresses (block ids, row counts) are checked against the memory that this stage has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from relay.protocol import tensors
from relay.protocol.tensors import TensorHeader
from thaw.errors import ErrorInfo, ProtocolError
from thaw.tracing.hops import HopPath
from thaw_runtime.engine.protocol import EngineRequest

MAX_STEP_BYTES: Final = 16 * 1024 * 1024
"""A step of 2,048 prompt tokens takes about 10 KB; the prompts of 512 new requests of 8,192 tokens take about 12 MB."""
STEP: Final = "step"

Blocks = tuple[tuple[int, ...], ...]
"""Block ids of a request, with one tuple per KV cache group."""


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A request that is computed for the first time.  ``computed`` prompt tokens were found in the prefix cache."""

    request: EngineRequest
    blocks: Blocks
    computed: int


class KnownSequence(msgspec.Struct, frozen=True, array_like=True):
    """A request that was computed before.  ``blocks`` are its new blocks, or all of its blocks if it was ``resumed``
    after an eviction.
    """

    request_id: str
    resumed: bool
    tokens: tuple[int, ...]
    blocks: Blocks | None
    computed: int
    n_output: int


class KvWanted(msgspec.Struct, frozen=True, array_like=True):
    """Stage 0 asks every other stage for KV blocks of that stage's layers, as they are after this step.

    ``blocks`` has one tuple per KV cache group.  For blocks that are also in ``known``, stage 0 has the contents of the
    round before, so only the changes are sent.  In the ``last`` round, the last stage adds the state of its generators.
    docs/consolidation.md says what attempts and rounds are.
    """

    attempt: int
    round: int
    blocks: Blocks
    known: Blocks
    last: bool = False


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One batch from stage 0's scheduler.  ``scheduled`` says how many tokens of each request are computed."""

    number: int
    new: tuple[NewSequence, ...]
    known: tuple[KnownSequence, ...]
    scheduled: dict[str, int]
    finished: tuple[str, ...]
    copies: tuple[tuple[int, int], ...] = ()  # KV blocks to copy before the forward pass, (from, to)
    kv: KvWanted | None = None
    masks: Mapping[str, bytes] = {}  # for each request with a grammar: a bit for each token that may come next

    @property
    def n_tokens(self) -> int:
        return sum(self.scheduled.values())


class SampledLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """For each row of the batch, the sampled token comes first, followed by the most likely tokens."""

    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    ranks: tuple[int, ...]


class Sampled(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The tokens that the last stage sampled in a step; a request whose prompt was only partly computed has an empty
    tuple.
    """

    number: int
    request_ids: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: SampledLogprobs | None = None


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A sign that stage 0 is alive.  Every stage passes it on, and the last stage sends it back to stage 0."""

    number: int


class Lost(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Stage ``stage`` has ended.  Stages pass this message on like a Beat, and the ending stage also sends it directly
    to stage 0.
    """

    stage: int
    error: ErrorInfo


class PathTaken(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The path of stage ``stage``'s messages to its successor from now on.  Stages pass it to stage 0 like a Beat."""

    stage: int
    path: HopPath


class Parted(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Stage 0 has become a worker and has left: no batch follows.  Stages pass this message on like a Beat, behind all
    batches.

    ``tokens`` with their ``logprobs`` are the pipeline's answer to the golden request.  A stage that also becomes a
    worker checks itself with them.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


Control = Sampled | Beat | Lost | PathTaken | Parted

_encoder: Final = msgspec.msgpack.Encoder()
_steps: Final = msgspec.msgpack.Decoder(Step)
_controls: Final = msgspec.msgpack.Decoder(Control)


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor's bytes.  ``dtype`` is safetensors' name, ``shape`` is (tokens, hidden)."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class Batch:
    step: Step
    tensors: Mapping[str, HostTensor]


def encode_batch(batch: Batch) -> bytes:
    """The payload of a frame with FLAG_TENSORS."""
    step = _encoder.encode(batch.step)
    headers = [TensorHeader(STEP, "U8", (len(step),))]
    headers += [TensorHeader(name, t.dtype, t.shape) for name, t in batch.tensors.items()]
    return b"".join((tensors.pack(headers), step, *(t.data for t in batch.tensors.values())))


def decode_batch(payload: memoryview) -> Batch:
    """Decode and check a batch, whose tensors are views of ``payload``.  Raises ProtocolError."""
    found = {header.name: (header, data) for header, data in tensors.unpack(payload)}
    if STEP not in found:
        raise ProtocolError("a batch came without its step")
    header, data = found.pop(STEP)
    if header.dtype != "U8" or len(data) > MAX_STEP_BYTES:
        raise ProtocolError(f"a step of {len(data)} bytes of {header.dtype}; at most {MAX_STEP_BYTES}")
    try:
        step = _steps.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as e:
        raise ProtocolError(f"a damaged step: {e}") from e
    return Batch(step, {name: HostTensor(h.dtype, h.shape, d) for name, (h, d) in found.items()})


def encode_control(message: Control) -> bytes:
    return _encoder.encode(message)


def decode_control(payload: memoryview) -> Control:
    """Raises ProtocolError."""
    if len(payload) > MAX_STEP_BYTES:
        raise ProtocolError(f"a control message of {len(payload)} bytes; at most {MAX_STEP_BYTES}")
    try:
        found: Control = _controls.decode(payload)
    except (msgspec.DecodeError, msgspec.ValidationError) as e:
        raise ProtocolError(f"a damaged control message: {e}") from e
    return found


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a stage; a step that exceeds them would write into foreign memory."""

    n_blocks: int
    block_size: int
    max_tokens: int  # the most tokens of a batch
    max_requests: int
    max_model_len: int
    vocab_size: int


def check_batch(batch: Batch, bounds: Bounds, known: Mapping[str, int], wanted: Mapping[str, tuple[str, int]]) -> None:
    """Refuse a batch that this stage cannot compute.  Raises ProtocolError.

    ``known`` maps each request that this stage has to the number of blocks that it holds per group.  ``wanted`` maps
    the name of each tensor that the stage's model takes to its dtype and width.
    """
    step = batch.step
    names = {n.request.request_id for n in step.new} | {k.request_id for k in step.known}
    _expect(names == set(step.scheduled), "its requests are not those it schedules")
    _expect(len(names) == len(step.new) + len(step.known) <= bounds.max_requests, "too many requests, or one twice")
    _expect(all(n > 0 for n in step.scheduled.values()), "a request without a token")
    _expect(step.n_tokens <= bounds.max_tokens, f"{step.n_tokens} tokens; at most {bounds.max_tokens}")
    for new in step.new:
        _check_new(new, step, bounds, known)
    for old in step.known:
        _check_known(old, step, bounds, known)
    _check_blocks(step.copies, bounds)
    if step.kv is not None:
        _check_kv(step.kv, bounds)
    _expect(set(step.masks) <= names, "a mask of a request that it does not schedule")
    n_bytes = 4 * -(-bounds.vocab_size // 32)
    _expect(all(len(mask) == n_bytes for mask in step.masks.values()), f"a mask that has not {n_bytes} bytes")
    if step.n_tokens:
        got = {name: (t.dtype, t.shape) for name, t in batch.tensors.items()}
        due = {name: (dtype, (step.n_tokens, width)) for name, (dtype, width) in wanted.items()}
        _expect(got == due, f"it brings {got}, this stage takes {due}")


def _check_kv(kv: KvWanted, bounds: Bounds) -> None:
    _check_blocks(kv.blocks, bounds)
    same_groups = len(kv.known) == len(kv.blocks)
    _expect(same_groups and all(set(a) <= set(b) for a, b in zip(kv.known, kv.blocks, strict=True)), "other KV blocks")
    _expect(all(len(set(ids)) == len(ids) for ids in kv.blocks), "a KV block twice")


def _check_new(new: NewSequence, step: Step, bounds: Bounds, known: Mapping[str, int]) -> None:
    name, prompt = new.request.request_id, (*new.request.prompt_token_ids, *new.request.output_so_far)
    _expect(name not in known, f"request {name} is not new")
    _expect(0 < len(prompt) <= bounds.max_model_len, f"a prompt of {len(prompt)} tokens")
    _expect(all(0 <= t < bounds.vocab_size for t in prompt), "a token outside the vocabulary")
    _expect(new.computed >= 0 and new.computed + step.scheduled[name] <= len(prompt), "tokens beyond the prompt")
    _check_blocks(new.blocks, bounds)
    _check_room(name, new.computed + step.scheduled[name], min(map(len, new.blocks), default=0), bounds)


def _check_known(old: KnownSequence, step: Step, bounds: Bounds, known: Mapping[str, int]) -> None:
    _expect(old.request_id in known, f"request {old.request_id} is not known here")
    end = old.computed + step.scheduled[old.request_id]
    _expect(old.computed >= 0 and end <= bounds.max_model_len, f"{end} tokens of a request")
    _check_blocks(old.blocks or (), bounds)
    added = min(map(len, old.blocks), default=0) if old.blocks else 0
    _check_room(old.request_id, end, added + (0 if old.resumed else known[old.request_id]), bounds)


def _check_room(name: str, n_tokens: int, n_blocks: int, bounds: Bounds) -> None:
    _expect(n_tokens <= n_blocks * bounds.block_size, f"request {name} has {n_blocks} blocks for {n_tokens} tokens")
    _expect(n_blocks <= -(-bounds.max_model_len // bounds.block_size), f"request {name} has {n_blocks} blocks")


def _check_blocks(groups: tuple[tuple[int, ...], ...], bounds: Bounds) -> None:
    _expect(
        all(0 <= block < bounds.n_blocks for ids in groups for block in ids),
        f"a KV block that is none of the {bounds.n_blocks}",
    )


def _expect(ok: bool, problem: str) -> None:
    if not ok:
        raise ProtocolError(f"a step cannot be computed here: {problem}")
