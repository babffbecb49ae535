"""The engine protocol on vLLM: EngineCore in a thread of this process, without API server, tokenizer or profiling.

One of the two files that import vLLM.  Everything a start can leave out is left out: no second process, no profiling
run (the KV size is computed), no dummy weights, no compilation, no tokenizer.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from relay.messages import LlmInit
from thaw.errors import ErrorInfo, InitFailed, MemoryTooSmall, ModelUnsupported, ThawError, WorkerLost
from thaw.trace import Phase
from thaw_runtime.engine import (
    Emit,
    EngineRequest,
    EngineStarted,
    Event,
    Failed,
    Finished,
    Logprobs,
    Sampling,
    Segment,
    Token,
    Usage,
)
from thaw_runtime.kv_memory import CPU, GPU, MemoryPlan, geometry, layer_count, plan_memory
from thaw_runtime.sidecars import materialised, model_config
from thaw_runtime.start_trace import StartTrace
from thaw_runtime.vllm_loader import (
    CPU_WORKER,
    LOAD_FORMAT,
    Continuation,
    SegmentExecutor,
    give_back_freed,
    load_postponed,
    starting_from,
)

MAX_BATCHED_TOKENS = 2048  # vLLM's own default for a server on a CPU
REHEARSED_TOKENS = 64  # the length of a short prompt: kernels are made for the number of rows they see
ALLOWED_ARGS = frozenset({"block_size", "max_num_batched_tokens", "max_num_seqs", "enable_prefix_caching",
                          "enable_chunked_prefill", "seed", "quantization", "kv_cache_dtype",
                          "hf_overrides"})  # fmt: skip


class VllmEngine:
    """See :class:`thaw_runtime.engine.Engine`.

    Requests and aborts go to an inbox; the engine thread takes them between steps and sleeps on the condition while
    there is nothing to do.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._changed = threading.Condition()
        self._inbox: list[EngineRequest | str] = []  # a str aborts that request
        self._open: dict[str, _OpenRequest] = {}
        self._stopping = False
        self._dead: ErrorInfo | None = None
        self._core: Any = None
        self._memory: MemoryPlan | None = None

    # ── the protocol ──

    def start(self, stage_plan: LlmInit, segment: Segment) -> EngineStarted:
        outcome: list[EngineStarted | BaseException] = []
        ready = threading.Event()
        # loading and stepping share one thread: OpenMP keeps a pool of workers per thread that calls it
        args = (stage_plan, segment, outcome, ready)
        self._thread = threading.Thread(target=self._run, args=args, name="engine", daemon=True)
        self._thread.start()
        ready.wait()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    def submit(self, request: EngineRequest) -> None:
        with self._changed:
            dead = self._dead
            if dead is None:
                self._open[request.request_id] = _OpenRequest(request)
                self._inbox.append(request)
                self._changed.notify_all()
        if dead is not None:
            self._emit([(request.request_id, Failed(dead))])

    def abort(self, request_id: str) -> None:
        with self._changed:
            if request_id in self._open:
                self._inbox.append(request_id)
                self._changed.notify_all()

    def requests(self) -> tuple[str, ...]:
        with self._changed:
            return tuple(self._open)

    def drain(self, deadline_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout=deadline_s)

    def memory(self) -> Mapping[str, int]:
        return asdict(self._memory) if self._memory else {}

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self) -> None:
        self._thread.join()

    # ── the engine thread ──

    def _run(self, init: LlmInit, segment: Segment, outcome: list[Any], ready: threading.Event) -> None:
        try:
            outcome.append(self._start(init, segment))
        except ThawError as e:
            outcome.append(e)
        except Exception as e:  # noqa: BLE001  the edge to vLLM: whatever it raises becomes an error of ours
            traceback.print_exc()
            outcome.append(_translate(e))
        ready.set()
        if isinstance(outcome[0], EngineStarted):
            give_back_freed()
            self._loop()

    def _loop(self) -> None:
        error = ErrorInfo(WorkerLost.__name__, "the engine was stopped")
        try:
            while self._take_inbox():
                self._step()
        except Exception as e:  # noqa: BLE001  a broken step loop must fail its requests, not hang them
            traceback.print_exc()
            error = ErrorInfo(WorkerLost.__name__, f"the engine failed: {type(e).__name__}: {e}")
        with self._changed:
            self._dead = error
            lost = tuple(self._open)
            self._open.clear()
            self._changed.notify_all()
        self._emit([(request_id, Failed(error)) for request_id in lost])

    def _take_inbox(self) -> bool:
        """Sleep until there is work, hand new requests and aborts to vLLM.  False: stop."""
        with self._changed:
            while not (self._inbox or self._stopping or self._core.scheduler.has_requests()):
                self._changed.wait()
            inbox, self._inbox = self._inbox, []
            if self._stopping:
                return False
        for item in inbox:
            if isinstance(item, str):
                self._abort(item)
            else:
                self._add(item)
        return True

    def _add(self, request: EngineRequest) -> None:
        """A request vLLM refuses fails alone."""
        try:
            self._core.add_request(
                Request(
                    request_id=request.request_id,
                    prompt_token_ids=[*request.prompt_token_ids, *request.output_so_far],
                    sampling_params=_sampling_params(request),
                    pooling_params=None,
                    block_hasher=self._core.request_block_hasher,
                )
            )
            if request.output_so_far:
                self._core.model_executor.continuations[request.request_id] = Continuation(list(request.output_so_far))
        except (ValueError, TypeError) as e:
            self._end([(request.request_id, Failed(ErrorInfo("BadRequest", str(e))))])

    def _abort(self, request_id: str) -> None:
        opened = self._open.get(request_id)
        if opened is not None:
            self._core.abort_requests([request_id])
            self._end([(request_id, Finished("abort", opened.usage()))])

    def _step(self) -> None:
        outputs, _ = self._core.step_fn()
        events: list[tuple[str, Event]] = []
        for batch in (outputs or {}).values():
            for output in batch.outputs:
                opened = self._open.get(output.request_id)
                if opened is not None:  # an aborted request may still have had a token in flight
                    events.extend((output.request_id, e) for e in opened.events(output))
        if events:
            self._end(events)

    def _end(self, events: Sequence[tuple[str, Event]]) -> None:
        """Forget the requests that ended, then tell."""
        with self._changed:
            for request_id, event in events:
                if not isinstance(event, Token):
                    self._open.pop(request_id, None)
                    self._core.model_executor.continuations.pop(request_id, None)
            if not self._open:
                self._changed.notify_all()
        self._emit(events)

    # ── starting ──

    def _start(self, init: LlmInit, segment: Segment) -> EngineStarted:
        trace = StartTrace(group_id=init.group_id, stage=init.stage, host=init.host)
        torch.set_num_threads(max(1, init.n_threads))
        with starting_from(segment, trace):
            with ExitStack() as stack:
                with trace.phase(Phase.CONTEXT_BEGIN):
                    directory = stack.enter_context(materialised(segment))  # nothing reads it once the engine stands
                    config = self._engine_config(init, segment, str(directory))
                    self._memory = _memory_plan(init, segment, config)
                    config.cache_config.kv_cache_memory_bytes = self._memory.kv
                self._core = EngineCore(config, SegmentExecutor, log_stats=False)
            trace.mark(Phase.KV_END, n_bytes=self._memory.kv)
            load_postponed(self._rehearse)
        trace.mark(Phase.ENGINE_END)
        return EngineStarted(trace.events, self.memory(), config.model_config.max_model_len)

    def _rehearse(self) -> None:
        """A prompt and a decode step of two requests, one greedy; nothing of them is kept."""
        for name, temperature in (("greedy", 0.0), ("sampled", 0.7)):
            prompt = (0,) * min(REHEARSED_TOKENS, self._core.vllm_config.model_config.max_model_len - 2)
            self._add(EngineRequest(f"rehearsal-{name}", prompt, Sampling(2, temperature, top_p=0.9), 0))
        while self._core.scheduler.has_requests():
            self._core.step_fn()
        self._core.reset_prefix_cache()

    def _engine_config(self, init: LlmInit, segment: Segment, directory: str) -> Any:
        _register_architecture(model_config(segment))
        engine = init.config.engine
        unknown = sorted(set(engine.args) - ALLOWED_ARGS)
        if unknown:
            raise InitFailed(f"engine.args.{unknown[0]} cannot be set here",
                             hint=f"allowed: {', '.join(sorted(ALLOWED_ARGS))}")  # fmt: skip
        seqs = init.config.scaling.max_batch
        args: dict[str, Any] = {
            "max_num_seqs": seqs,
            "max_num_batched_tokens": max(seqs, min(MAX_BATCHED_TOKENS, seqs * engine.max_model_len)),
            **engine.args,
        }
        cpu = {"worker_cls": CPU_WORKER} if current_platform.is_cpu() else {}
        return EngineArgs(
            model=directory, load_format=LOAD_FORMAT, skip_tokenizer_init=True, dtype=engine.dtype,
            max_model_len=engine.max_model_len, enforce_eager=True, trust_remote_code=False,
            distributed_executor_backend="uni", kv_cache_memory_bytes=1, disable_log_stats=True, **cpu, **args,
        ).create_engine_config()  # fmt: skip


class _OpenRequest:
    """Numbers a request's tokens."""

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self._next = request.first_index
        self.submitted = time.monotonic()

    def usage(self) -> Usage:
        return Usage(len(self._request.prompt_token_ids), self._next)

    def events(self, output: Any) -> list[Event]:
        events: list[Event] = []
        for i, token_id in enumerate(output.new_token_ids):
            events.append(Token(self._next, token_id, _logprobs(output.new_logprobs, i)))
            self._next += 1
        if output.finish_reason is not None:
            reason = str(output.finish_reason)
            if reason in ("stop", "length"):
                events.append(Finished(reason, self.usage()))
            else:
                events.append(Failed(ErrorInfo(WorkerLost.__name__, f"the engine ended the request: {reason}")))
        return events


def _logprobs(lists: Any, i: int) -> Logprobs | None:
    """vLLM puts the sampled token first, the top ones behind it."""
    if lists is None:
        return None
    ids, values = lists.logprob_token_ids[i].tolist(), lists.logprobs[i].tolist()
    return Logprobs(values[0], tuple(zip(ids[1:], values[1:], strict=True)))


def _sampling_params(request: EngineRequest) -> Any:
    s: Sampling = request.sampling
    greedy = s.temperature == 0
    done = len(request.output_so_far)
    return SamplingParams(
        temperature=s.temperature, top_p=1.0 if greedy else s.top_p, top_k=0 if greedy else s.top_k,
        min_p=0.0 if greedy else s.min_p, seed=None if greedy else request.seed,
        presence_penalty=s.presence_penalty, frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty, stop_token_ids=list(s.stop_token_ids),
        max_tokens=s.max_tokens - done, min_tokens=max(0, s.min_tokens - done), logprobs=s.logprobs,
        logit_bias=dict(s.logit_bias) or None,
        detokenize=False, ignore_eos=True,  # the end-of-sequence tokens are among the stop tokens
    )  # fmt: skip


def preload(architectures: Sequence[str]) -> None:
    """For a zygote: model classes and the kernels' Python fallbacks.  No tensor is computed, no thread started."""
    torch.set_num_threads(1)
    for name in architectures:
        _register_architecture({"architectures": [name]})
    current_platform.register_triton_kernel_overrides()
    # it looks through every module each time it is called; everything that holds a kernel is imported by now
    current_platform.register_triton_kernel_overrides = lambda: None


def _register_architecture(config: Mapping[str, Any]) -> None:
    """Import the model's class here: vLLM would start a second Python to look at it.  Raises ModelUnsupported."""
    names = config.get("architectures") or ["(none)"]
    name = next((n for n in names if n in ModelRegistry.get_supported_archs()), None)
    if name is None:
        raise ModelUnsupported(f"the engine has no architecture {names[0]}",
                               hint="see vLLM's list of supported models")  # fmt: skip
    if type(ModelRegistry.models[name]).__name__ == "_LazyRegisteredModel":
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def _memory_plan(init: LlmInit, segment: Segment, config: Any) -> MemoryPlan:
    plain = model_config(segment)
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    first, end = init.layers
    layers = end - first if end > first else layer_count(plain)
    return plan_memory(
        reserve=init.reserve_bytes,
        weights=_weight_bytes(segment, config.model_config.dtype),
        shape=geometry(plain, layers, last_stage=init.stage == init.n_stages - 1),
        dtype=dtype,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_model_len=config.model_config.max_model_len,
        block_size=config.cache_config.block_size,
        device=CPU if current_platform.is_cpu() else GPU,
    )


def _weight_bytes(segment: Segment, dtype: torch.dtype) -> int:
    """As the model holds them: floating tensors in the engine's dtype, others (quantised) as they are."""
    wide = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
    return sum(t.n_bytes // wide[t.dtype] * dtype.itemsize if t.dtype in wide else t.n_bytes
               for t in segment.offer.tensors)  # fmt: skip


def _translate(error: Exception) -> ThawError:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or "memory" in text.lower():
        return MemoryTooSmall(text)
    if "not supported" in text or "architecture" in text:
        return ModelUnsupported(text)
    return InitFailed(text)
