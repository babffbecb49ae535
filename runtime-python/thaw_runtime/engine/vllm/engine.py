"""The engine protocol on vLLM: EngineCore in a thread of this process, without API server, tokenizer or profiling.

A start has no second process, no profiling run (the KV size is computed), no dummy weights, no compilation and no
tokenizer.  In a pipeline (docs/pipeline.md), stage 0 has the engine and the scheduler; any other stage follows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils import cpu_resource_utils, mem_utils, numa_utils, platform_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request
from vllm.v1.sample import logits_processor

from relay.protocol.messages import LlmInit
from thaw.errors import ErrorInfo, InitFailed, ModelUnsupported, PlatformError, ThawError, WorkerLost
from thaw.logs import print_traceback
from thaw.trace import Phase
from thaw_runtime.engine.kv_memory import CPU, GPU, MemoryPlan, Worst, plan_stage
from thaw_runtime.engine.protocol import Emit, EngineRequest, EngineStarted, Event, Failed, Finished, Sampling, Token
from thaw_runtime.engine.stage_memory import rooms_of
from thaw_runtime.engine.vllm.errors import translated
from thaw_runtime.engine.vllm.loader import (
    CPU_WORKER,
    GPU_WORKER,
    LOAD_FORMAT,
    REHEARSED_TOKENS,
    FollowerExecutor,
    RelayExecutor,
    SegmentExecutor,
    StageExecutor,
    load_postponed,
    sampling_params,
    starting_from,
)
from thaw_runtime.engine.vllm.open_request import OpenRequest
from thaw_runtime.engine.vllm.packing import give_back_freed
from thaw_runtime.engine.vllm.window import Rest
from thaw_runtime.engine.vllm.work import Work
from thaw_runtime.pipeline.link import StageLink, open_transport
from thaw_runtime.pipeline.stage_parts import StagePart
from thaw_runtime.process.start_trace import StartTrace
from thaw_runtime.weights.segment import Segment
from thaw_runtime.weights.sidecars import materialised, model_config

MAX_BATCHED_TOKENS = 2048  # vLLM's own default for a server on a CPU
PIPELINED_BATCHED_TOKENS = 512
"""Of a batch that travels: a prompt of 2,048 tokens is four batches, of which the stages compute four at once."""
_LOOKS_AT_THE_MACHINE = (cpu_resource_utils, mem_utils, numa_utils, platform_utils)
_STOPPED = ErrorInfo(WorkerLost.__name__, "the engine was stopped")
ALLOWED_ARGS = frozenset({"block_size", "max_num_batched_tokens", "max_num_seqs", "enable_prefix_caching",
                          "enable_chunked_prefill", "seed", "quantization", "kv_cache_dtype",
                          "hf_overrides"})  # fmt: skip


class VllmEngine:
    """See :class:`thaw_runtime.engine.protocol.Engine`.

    Requests and aborts go to an inbox; the engine thread takes them between steps and sleeps on the condition while
    there is nothing to do.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._changed = threading.Condition()
        self._inbox: list[EngineRequest | str] = []  # a str aborts that request
        self._open: dict[str, OpenRequest] = {}
        self._stopping = False
        self._dead: ErrorInfo | None = None
        self._broken: ErrorInfo | None = None  # the pipeline
        self._core: Any = None
        self._link: StageLink | None = None
        self._memory: MemoryPlan | None = None
        self._rest: Rest | None = None

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
                self._open[request.request_id] = OpenRequest(request, self._link.hops if self._link else None)
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

    def wait_whole(self, deadline_s: float) -> bool:
        """A full worker in a pipeline: until it has all of the model.  False when that takes longer, or never comes."""
        return self._rest is not None and self._rest.wait(deadline_s)

    def stop(self) -> None:
        if self._link is not None:
            self._link.end(_STOPPED)
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
            print_traceback()
            outcome.append(translated(e))
        started = isinstance(outcome[0], EngineStarted)
        if not started and self._link is not None:
            self._link.end(outcome[0].info())
        ready.set()
        if started:
            give_back_freed()
            if self._rest is not None:
                self._rest.begin()
            self._work(self._follow if init.stage else self._lead)

    def _work(self, work: Callable[[], None]) -> None:
        """Until it is stopped or breaks.  What is open then fails, and the other stages are told."""
        error = _STOPPED
        try:
            work()
        except ThawError as e:
            error = ErrorInfo(WorkerLost.__name__, e.message, e.hint)
        except Exception as e:  # noqa: BLE001  a broken step loop must fail its requests, not hang them
            print_traceback()
            error = ErrorInfo(WorkerLost.__name__, f"the engine failed: {type(e).__name__}: {e}")
        with self._changed:
            self._dead = error = _STOPPED if self._stopping else error
            lost = tuple(self._open)
            self._open.clear()
            self._changed.notify_all()
        if lost:
            self._emit([(request_id, Failed(error)) for request_id in lost])
        if self._link is not None:
            self._link.end(error)

    def _lead(self) -> None:
        while self._take_inbox():
            self._step()

    def _follow(self) -> None:
        while True:
            self._core.model_executor.follow()

    def _break(self, error: ErrorInfo) -> None:
        """The link's thread: wake the engine's, which may be waiting for requests."""
        with self._changed:
            self._broken = error
            self._changed.notify_all()

    def _take_inbox(self) -> bool:
        """Sleep until there is work, hand new requests and aborts to vLLM.  False: stop."""
        with self._changed:
            while not (self._inbox or self._stopping or self._broken or self._busy()):
                self._changed.wait()
            inbox, self._inbox = self._inbox, []
            if self._stopping:
                return False
            if self._broken:
                raise WorkerLost(self._broken.message, hint=self._broken.hint)
        for item in inbox:
            if isinstance(item, str):
                self._abort(item)
            else:
                self._add(item)
        return True

    def _busy(self) -> bool:
        """Requests to compute, or batches still in the pipeline."""
        return bool(self._core.scheduler.has_requests() or self._core.batch_queue)

    def _add(self, request: EngineRequest) -> None:
        """A request vLLM refuses fails alone."""
        try:
            self._core.add_request(
                Request(
                    request_id=request.request_id,
                    prompt_token_ids=[*request.prompt_token_ids, *request.output_so_far],
                    sampling_params=sampling_params(request),
                    pooling_params=None,
                    block_hasher=self._core.request_block_hasher,
                )
            )
            self._core.model_executor.begin(request)
            if opened := self._open.get(request.request_id):  # a rehearsed one is nobody's
                opened.begin(self._spending)
        except (ValueError, TypeError, VLLMClientError) as e:
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
                    self._core.model_executor.forget(request_id)
            if not self._open:
                self._changed.notify_all()
        self._emit(events)

    # ── starting ──

    def _start(self, init: LlmInit, segment: Segment) -> EngineStarted:
        trace = StartTrace(group_id=init.group_id, stage=init.stage, host=init.host)
        forget_surroundings()
        torch.set_num_threads(max(1, init.n_threads))
        part = StagePart.of(init)
        if not part.whole:
            self._link = StageLink(open_transport(init), init.stage, init.n_stages)
            self._link.when_lost(self._break)
        if not part.first:
            self._dead = ErrorInfo(PlatformError.__name__, f"stage {init.stage} of a pipeline takes no requests")
        with starting_from(segment, trace, part, self._link) as begun:
            with ExitStack() as stack:
                directory = stack.enter_context(materialised(segment))  # nothing reads it once the engine stands
                config = _engine_config(init, segment, part, str(directory))
                self._memory = _memory_plan(init, segment, config)
                config.cache_config.kv_cache_memory_bytes = self._memory.kv
                if not part.whole:  # exactly as many as the other stages
                    config.cache_config.num_gpu_blocks_override = self._memory.kv_blocks
                self._core = _core(part)(config, _executor(part), log_stats=False)
            load_postponed(self._rehearse if part.whole else self._core.model_executor.rehearse)
            self._rest, self._spending = begun.rest, Work(getattr(self._core.model_executor, "stages_awaited", None))
        trace.mark(Phase.ENGINE_END)
        if self._link is not None:
            self._link.check()
        return EngineStarted(trace.events, self.memory(), config.model_config.max_model_len)

    def _rehearse(self) -> None:
        """A prompt and a decode step of two requests, one greedy; nothing of them is kept."""
        for name, temperature in (("greedy", 0.0), ("sampled", 0.7)):
            prompt = (0,) * min(REHEARSED_TOKENS, self._core.vllm_config.model_config.max_model_len - 2)
            self._add(EngineRequest(f"rehearsal-{name}", prompt, Sampling(2, temperature, top_p=0.9), 0))
        while self._core.scheduler.has_requests():
            self._core.step_fn()
        self._core.reset_prefix_cache()


# ── one of several stages ─────────────────────────────────────────────────────────────────────────────────────────


class FollowerCore(EngineCore):
    """What EngineCore does to an executor before it makes its scheduler, which a follower has none of."""

    batch_queue = None

    def __init__(self, config: Any, executor: type[SegmentExecutor], log_stats: bool) -> None:
        self.vllm_config = config
        self.model_executor = executor(config)
        self._initialize_kv_caches(config)


class StageScheduler(Scheduler):
    """Divides the requests among the batches that are in the pipeline at once.

    vLLM puts every request that is ready into the next batch, so those that came together stay together and all
    stages but one are idle.  A batch gets no more than its share here, nor more than one stage samples at a time.
    """

    running: list[Any]
    max_num_active_reqs: int

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        everyone, most = self.running, self.max_num_active_reqs
        n_open = min(len(everyone) + len(self.waiting), self.max_num_running_reqs)
        share = -(-n_open // self.vllm_config.parallel_config.pipeline_parallel_size)
        ready = [r.request_id for r in everyone if r.num_tokens > r.num_computed_tokens]
        held = set(ready[share:])
        self.running = [r for r in everyone if r.request_id not in held]
        self.max_num_active_reqs = min(most - len(held), len(self.running) + max(0, share - len(ready)))
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_active_reqs = most
            before, left = {r.request_id for r in everyone}, {r.request_id for r in self.running}
            kept = [r for r in everyone if r.request_id in held | left]
            self.running = kept + [r for r in self.running if r.request_id not in before]


def _core(part: StagePart) -> type[EngineCore]:
    return EngineCore if part.first else FollowerCore


def _executor(part: StagePart) -> type[SegmentExecutor]:
    if part.whole:
        return SegmentExecutor
    return RelayExecutor if part.first else FollowerExecutor


# ── configuration ─────────────────────────────────────────────────────────────────────────────────────────────────


def _engine_config(init: LlmInit, segment: Segment, part: StagePart, directory: str) -> Any:
    _register_architecture(model_config(segment))
    engine = init.config.engine
    unknown = sorted(set(engine.args) - ALLOWED_ARGS)
    if unknown:
        raise InitFailed(f"engine.args.{unknown[0]} cannot be set here",
                         hint=f"allowed: {', '.join(sorted(ALLOWED_ARGS))}")  # fmt: skip
    seqs = init.config.scaling.max_batch
    most = MAX_BATCHED_TOKENS if part.whole else PIPELINED_BATCHED_TOKENS
    args: dict[str, Any] = {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": max(seqs, min(most, seqs * engine.max_model_len)),
        **engine.args,
    }
    if not part.whole:
        args |= _stage_args(part, args["max_num_seqs"])
    return _configured(directory, dtype=engine.dtype, max_model_len=engine.max_model_len, **args)


def _configured(directory: str, **args: Any) -> Any:
    return EngineArgs(
        model=directory, load_format=LOAD_FORMAT, skip_tokenizer_init=True, enforce_eager=True, trust_remote_code=False,
        kv_cache_memory_bytes=1, disable_log_stats=True,
        worker_cls=CPU_WORKER if current_platform.is_cpu() else GPU_WORKER,
        **{"distributed_executor_backend": "uni"} | args,
    ).create_engine_config()  # fmt: skip


def _stage_args(part: StagePart, batch: int) -> dict[str, Any]:
    """A group takes as many requests as its stages have batches in flight, each of ``batch``."""
    os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, part.layer_counts))
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the second runner sends tokens between stages by NCCL
    return {
        "pipeline_parallel_size": part.n_stages, "distributed_executor_backend": StageExecutor,
        "scheduler_cls": StageScheduler, "async_scheduling": False, "max_num_seqs": part.n_stages * batch,
    }  # fmt: skip


def preload(architectures: Sequence[str], no_model: str) -> None:
    """For a zygote: what is the same for every model.  No tensor is computed, no thread started.

    ``no_model`` is a directory with the config.json of a model that nobody has.
    """
    torch.set_num_threads(1)
    for name in architectures:
        _register_architecture({"architectures": [name]})
    current_platform.register_triton_kernel_overrides()
    # it looks through every module each time it is called; everything that holds a kernel is imported by now
    current_platform.register_triton_kernel_overrides = lambda: None
    if current_platform.is_cpu():
        # it runs a program in every start; which of the cores this process may use is looked up behind it, each time
        cores = cpu_resource_utils._get_cpu_list()
        cpu_resource_utils._get_cpu_list = lambda: cores
        _configured(no_model, max_model_len=64)  # the first in a process looks up and builds what the others find
    # both look through all installed distributions for what extends the engine
    load_general_plugins()
    processors = logits_processor._load_logitsprocs_plugins()
    logits_processor._load_logitsprocs_plugins = lambda: list(processors)


def forget_surroundings() -> None:
    """Let vLLM look again at the machine and the limits that it runs under.

    A stem cell imports and configures under the small limits of a waiting container.  Its claim raises them, and vLLM
    would keep what it saw first: the control group's memory limit is in a cache of its own.
    """
    for module in _LOOKS_AT_THE_MACHINE:
        for found in list(vars(module).values()):
            if callable(clear := getattr(found, "cache_clear", None)):
                clear()


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
    worst = Worst(
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        max_num_seqs=-(-config.scheduler_config.max_num_seqs // init.n_stages),
        max_model_len=config.model_config.max_model_len,
        block_size=config.cache_config.block_size,
        device=CPU if current_platform.is_cpu() else GPU,
    )
    quantised = config.model_config.quantization is not None
    return plan_stage(init.stage, rooms_of(init, segment, worst.dtype, quantised=quantised), worst)
