"""A stage's side of a step: vLLM's objects and tensors ↔ the messages between the stages (pipeline/wire.py).

This file uses fields of vLLM's scheduler output, runner and group, but imports no vLLM, so its tests need none.
translation.py makes vLLM's objects of the messages.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import fields
from typing import Any

import msgspec
import torch

from thaw.errors import ErrorInfo, PlatformError, ProtocolError, WorkerLost
from thaw_runtime.engine.protocol import EngineRequest, Sampling
from thaw_runtime.pipeline.wire import (
    Batch,
    Blocks,
    Bounds,
    HostTensor,
    KnownSequence,
    NewSequence,
    Sampled,
    SampledLogprobs,
    Step,
    check_batch,
)

Tensors = Mapping[str, torch.Tensor]

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class StageGroup:
    """Stands for vLLM's pipeline group, whose other ranks are in containers that torch.distributed cannot reach.

    The worker takes the tensors of the stage before from ``received`` and leaves its own in ``computed``.  The executor
    carries them.
    """

    def __init__(self, stage: int, n_stages: int) -> None:
        self.take_place(stage, n_stages)
        self.received: Tensors = {}
        self.computed: Tensors = {}

    def take_place(self, stage: int, n_stages: int) -> None:
        """From the next batch on, this is stage ``stage`` of ``n_stages``."""
        self.rank_in_group, self.world_size, self.ranks = stage, n_stages, list(range(n_stages))
        self.is_first_rank, self.is_last_rank = stage == 0, stage == n_stages - 1

    def irecv_tensor_dict(self, all_gather_group: Any = None) -> tuple[Tensors, list[Any], list[Any]]:
        return self.received, [], []

    def isend_tensor_dict(self, tensors: Mapping[str, torch.Tensor | None], all_gather_group: Any = None) -> list[Any]:
        """A model that adds its residuals in each layer (MiniCPM) has none to send, and sends zeros: every stage must
        get the tensors that it expects."""
        some = next(t for t in tensors.values() if t is not None)
        self.computed = {name: torch.zeros_like(some) if t is None else t for name, t in tensors.items()}
        return []

    def destroy(self) -> None:
        """Does nothing, because the group holds nothing."""


# ── tensors ───────────────────────────────────────────────────────────────────────────────────────────────────────


def to_host(tensors: Tensors, n_tokens: int) -> dict[str, HostTensor]:
    """The first ``n_tokens`` rows of each tensor, as bytes.  Copies nothing on a CPU."""
    return {name: _host(t[:n_tokens]) for name, t in tensors.items()}


def _host(tensor: torch.Tensor) -> HostTensor:
    if tensor.dtype not in _NAMES:
        raise PlatformError(f"hidden states of {tensor.dtype} cannot be sent")
    data = tensor.detach().to("cpu").contiguous()
    return HostTensor(_NAMES[tensor.dtype], tuple(data.shape), memoryview(data.view(torch.uint8).numpy()).cast("B"))


def from_host(tensors: Mapping[str, HostTensor]) -> dict[str, torch.Tensor]:
    """Copies on the CPU, because the received bytes are read-only."""
    made: dict[str, torch.Tensor] = {}
    for name, host in tensors.items():
        made[name] = torch.empty(host.shape, dtype=_DTYPES[host.dtype])
        memoryview(made[name].view(torch.uint8).numpy()).cast("B")[:] = host.data
    return made


def wanted_by(runner: Any) -> dict[str, tuple[str, int]]:
    """The tensors that a batch must bring for this stage: name → (dtype, width).  None for the first stage."""
    found = getattr(runner, "intermediate_tensors", None)
    return {name: (_NAMES[t.dtype], t.shape[1]) for name, t in found.items()} if found is not None else {}


# ── steps ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def step_of(number: int, output: Any, requests: Mapping[str, EngineRequest]) -> Step:
    """A SchedulerOutput as a message for the other stages."""
    if output.new_block_ids_to_zero:
        raise PlatformError("this model's KV cache must be zeroed, which a pipeline does not pass on")
    cached = output.scheduled_cached_reqs
    return Step(
        number,
        tuple(
            NewSequence(requests[n.req_id], _blocks(n.block_ids), n.num_computed_tokens)
            for n in output.scheduled_new_reqs
        ),
        tuple(_known(cached, i) for i in range(len(cached.req_ids))),
        dict(output.num_scheduled_tokens),
        tuple(output.finished_req_ids),
        tuple((c.src_block_id, c.dst_block_id) for c in output.kv_cache_block_copies or ()),
    )


def masked(step: Step, grammar_output: Any) -> Step:
    """The step with the masks of a GrammarOutput: which tokens each request with a grammar may have next."""
    if grammar_output is None:
        return step
    rows = (row.tobytes() for row in grammar_output.grammar_bitmask)
    masks = dict(zip(grammar_output.structured_output_request_ids, rows, strict=False))
    return msgspec.structs.replace(step, masks=masks)


def _known(cached: Any, i: int) -> KnownSequence:
    """The i-th request of a CachedRequestData."""
    name, blocks = cached.req_ids[i], cached.new_block_ids[i]
    return KnownSequence(
        name,
        name in cached.resumed_req_ids,
        tuple(cached.new_token_ids[i]),
        None if blocks is None else _blocks(blocks),
        cached.num_computed_tokens[i],
        cached.num_output_tokens[i],
    )


def _blocks(groups: Any) -> Blocks:
    return tuple(tuple(ids) for ids in groups)


def sampled_of(number: int, output: Any) -> Sampled:
    """The last stage's ModelRunnerOutput as a message for stage 0."""
    lists = output.logprobs
    logprobs = None
    if lists is not None:
        ranks = tuple(lists.sampled_token_ranks.tolist())
        logprobs = SampledLogprobs(_rows(lists.logprob_token_ids), _rows(lists.logprobs), ranks)
    return Sampled(number, tuple(output.req_ids), tuple(map(tuple, output.sampled_token_ids)), logprobs)


def _rows(array: Any) -> tuple[Any, ...]:
    return tuple(map(tuple, array.tolist()))


def bounds_of(runner: Any) -> Bounds:
    config = runner.vllm_config
    return Bounds(
        config.cache_config.num_gpu_blocks,
        config.cache_config.block_size,
        runner.max_num_tokens,
        runner.max_num_reqs,
        config.model_config.max_model_len,
        config.model_config.get_vocab_size(),
    )


def known_to(runner: Any) -> dict[str, int]:
    """The requests that a runner has, with the number of blocks that each holds in its scarcest group."""
    return {name: min(map(len, state.block_ids)) for name, state in runner.requests.items()}


def as_kind(kind: type[Any], spec: Any) -> Any:
    """A KV cache spec as one of the class ``kind``, with the fields that both have."""
    names = {f.name for f in fields(kind)} & {f.name for f in fields(spec)}
    return kind(**{name: getattr(spec, name) for name in names})


def check_for(batch: Batch, runner: Any) -> None:
    """Check a batch.  Raises ProtocolError for a batch that this stage cannot compute."""
    check_batch(batch, bounds_of(runner), known_to(runner), wanted_by(runner))


def rehearsal(n_tokens: int, block_size: int, n_groups: int) -> Iterator[Step]:
    """A prompt of ``n_tokens`` and a decode step of two requests, one of them greedy; the last step ends both.

    Both write into the same blocks, which no request has yet, so their tokens mean nothing.
    """
    blocks = (tuple(range(1, 2 + (n_tokens + 1) // block_size)),) * n_groups
    names = ("rehearsal-greedy", "rehearsal-sampled")
    requests = [
        EngineRequest(name, (0,) * n_tokens, Sampling(2, temperature, top_p=0.9), 0)
        for name, temperature in zip(names, (0.0, 0.7), strict=True)
    ]
    yield Step(0, tuple(NewSequence(r, blocks, 0) for r in requests), (), dict.fromkeys(names, n_tokens), ())
    known = tuple(KnownSequence(name, False, (0,), None, n_tokens, 1) for name in names)
    yield Step(0, (), known, dict.fromkeys(names, 1), ())
    yield Step(0, (), (), {}, names)


# ── the batches for which stage 0 waits ───────────────────────────────────────────────────────────────────────────


class Pending:
    """The batches whose tokens have not come back.  The engine thread opens them, the link's thread fulfils them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[frozenset[str], Future[Sampled]]] = {}

    def open(self, step: Step) -> Future[Sampled]:
        future: Future[Sampled] = Future()
        with self._lock:
            self._open[step.number] = (frozenset(step.scheduled), future)
        return future

    def fulfil(self, sampled: Sampled, vocab_size: int) -> None:
        """Raises ProtocolError for tokens of an unknown batch or of other requests; an open batch is left to fail()."""
        rows = len(sampled.request_ids)
        known = all(0 <= t < vocab_size for row in sampled.token_ids for t in row)
        with self._lock:
            names, future = self._open.get(sampled.number, (frozenset(), None))
            fits = names == set(sampled.request_ids) and len(names) == rows == len(sampled.token_ids)
            if future is None or not fits or not known:
                raise ProtocolError(f"the tokens of step {sampled.number} are not those it was to bring")
            del self._open[sampled.number]
        future.set_result(sampled)

    def fail(self, error: ErrorInfo) -> None:
        with self._lock:
            lost, self._open = self._open, {}
        for _, future in lost.values():
            future.set_exception(WorkerLost(error.message, hint=error.hint))


def batch_of(step: Step, computed: Tensors) -> Batch:
    return Batch(step, to_host(computed, step.n_tokens))
