"""What vLLM makes by itself: the loader, the worker and the executor of one process, which may be one stage of several.

Uses ``register_model_loader`` for the weights that arrive in a segment, ``worker_cls`` for the KV allocation and for
the stage's place, Executor subclasses for what happens between the forward pass, sampling and the stages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader import utils as model_loader_utils
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.platforms import current_platform
from vllm.utils.cpu_resource_utils import get_visible_memory_node
from vllm.utils.torch_utils import PIN_MEMORY, set_default_torch_dtype
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from relay.thread_account import Asleep
from thaw.model import TensorInfo
from thaw.trace import Phase
from thaw_runtime.engine.protocol import EngineRequest, Sampling
from thaw_runtime.engine.vllm.continuation import Continuations
from thaw_runtime.engine.vllm.lazy_zeros import ZeroOnDemand
from thaw_runtime.engine.vllm.packing import Finisher, Kinds, Rehearsal
from thaw_runtime.engine.vllm.persistent_batches import PersistentBatches
from thaw_runtime.engine.vllm.replaced import replaced
from thaw_runtime.engine.vllm.stage import (
    Pending,
    StageGroup,
    Tensors,
    as_kind,
    batch_of,
    check_for,
    from_host,
    rehearsal,
    sampled_of,
    step_of,
    wanted_by,
)
from thaw_runtime.engine.vllm.weights import arriving_tensors
from thaw_runtime.engine.vllm.window import Rest, check_filled, drop_foreign, set_window, whole_skeleton
from thaw_runtime.engine.vllm.world_of_one import world_of_one
from thaw_runtime.pipeline.link import StageLink
from thaw_runtime.pipeline.stage_parts import StagePart
from thaw_runtime.pipeline.wire import Sampled, Step
from thaw_runtime.process.start_trace import PhaseNotes, StartTrace
from thaw_runtime.process.thread_accounts import OtherThreads
from thaw_runtime.weights.segment import Segment

LOAD_FORMAT = "thaw_segment"
REHEARSED_TOKENS = 64  # the length of a short prompt: kernels are made for the number of rows they see
_KINDS = Kinds(UnquantizedLinearMethod, UnquantizedEmbeddingMethod, ParallelLMHead, set_default_torch_dtype)
CPU_WORKER = "thaw_runtime.engine.vllm.loader.LazyKvCpuWorker"
GPU_WORKER = "thaw_runtime.engine.vllm.loader.StageGpuWorker"


@dataclass(slots=True)
class _Start:
    """What the classes vLLM instantiates itself need to know.  One engine a process, so one at a time."""

    segment: Segment
    trace: StartTrace
    part: StagePart
    link: StageLink | None
    tensors: tuple[TensorInfo, ...]
    rest: Rest | None = None  # set by the loader of a full worker in a pipeline
    load: Callable[[Callable[[], None]], None] | None = None  # set by a loader that left the weights for later
    phases: ExitStack = field(default_factory=ExitStack)  # the one that is going on, if any

    def turn_to(self, begin: Phase) -> PhaseNotes:
        """End the phase that is going on and begin another: nothing between two of them is left out."""
        self.phases.close()
        return self.phases.enter_context(self.trace.phase(begin))

    def arriving(
        self, waited: Asleep, finisher: Finisher | None, rehearsal: Rehearsal | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Raises WorkerLost when the pipeline breaks before all have come."""
        return arriving_tensors(self.segment, self.tensors, self.check, waited, finisher, rehearsal)

    def check(self) -> None:
        if self.link is not None:
            self.link.check()


_current: _Start | None = None


@contextmanager
def starting_from(segment: Segment, trace: StartTrace, part: StagePart, link: StageLink | None) -> Iterator[_Start]:
    """While the block runs, the loader reads ``part`` of ``segment`` and writes its phases to ``trace``.

    They are context (configuration, worker), model, and kv, which goes on until the engine stands: load_postponed().
    """
    global _current
    _current = _Start(segment, trace, part, link, part.tensors(segment.offer.tensors))
    try:
        with _current.phases:
            _current.turn_to(Phase.CONTEXT_BEGIN)
            yield _current
    finally:
        _current = None


def _start() -> _Start:
    if _current is None:
        raise RuntimeError("the segment loader runs inside starting_from() only")
    return _current


def load_postponed(rehearse: Callable[[], None]) -> None:
    """The engine stands.  Fill the model it was built around; ``rehearse`` runs a batch, see Rehearsal."""
    start = _start()
    start.phases.close()
    if start.load is not None:
        start.load(rehearse)


# ── weights ───────────────────────────────────────────────────────────────────────────────────────────────────────


@register_model_loader(LOAD_FORMAT)
class SegmentLoader(BaseModelLoader):
    """Copies (and fuses) each tensor into the model's parameters while the next ones arrive.

    On a CPU the engine is first built around the empty model, so that only a layer's packing is left to do after the
    last byte: ``load_model`` returns at once and the weights come with load_postponed.  Otherwise (a GPU, quantised
    weights, whose methods replace parameters) they come before anything else is built, as in vLLM.
    """

    def download_model(self, model_config: Any) -> None:
        """Nothing to do: the bytes come to us."""

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        start, full = _start(), _is_full(model_config)
        start.turn_to(Phase.MODEL_BEGIN)
        # vLLM notes every parameter of a new model for a second set of weights: a third of the time of building it
        noting = replaced(model_loader_utils, "record_metadata_for_reloading", lambda model: None)
        once = noting if model_config.quantization is None else nullcontext()
        with once, whole_skeleton(parallel_state) if full else nullcontext():
            model: torch.nn.Module = super().create_model(vllm_config, model_config, prefix)
        if full:
            set_window(model, start.part.window)
        else:
            drop_foreign(model, start.part, start.tensors, PPMissingLayer)
        return model

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        _take_weights(model, model_config, None, None)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        if not current_platform.is_cpu() or model_config.quantization is not None:
            return super().load_model(vllm_config, model_config, prefix)
        with set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
            model = self.create_model(vllm_config, model_config, prefix)
        _start().load = partial(_load_layer_by_layer, model, model_config)
        return model.eval()


def _load_layer_by_layer(model: torch.nn.Module, model_config: Any, rehearse: Callable[[], None]) -> None:
    start = _start()
    computes = partial(start.part.computes, own=start.tensors) if _is_full(model_config) else None
    finisher = Finisher(model, [t.name for t in start.tensors], _KINDS, OtherThreads(), computes)
    end = max((start.segment.locate(t.file, t.offset) + t.n_bytes for t in start.tensors), default=0)
    device = torch.device("cpu")
    with set_default_torch_dtype(model_config.dtype), device:
        _take_weights(model, model_config, finisher, Rehearsal(start.segment, end, finisher, rehearse))
        process_weights_after_loading(model, model_config, device)
    finisher.restore()


def _is_full(model_config: Any) -> bool:
    """Quantised weights are replaced by others of other shapes as they are processed: no skeleton waits for them."""
    return _start().part.full and model_config.quantization is None


def _take_weights(
    model: torch.nn.Module, model_config: Any, finisher: Finisher | None, rehearsal: Rehearsal | None
) -> None:
    start = _start()
    start.phases.close()
    waited = Asleep()
    with start.trace.phase(Phase.LOAD_BEGIN) as notes, warnings.catch_warnings():
        # the views are read-only on purpose; nothing writes through them
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        parameters = {name for name, _ in model.named_parameters()}
        loaded = model.load_weights(start.arriving(waited, finisher, rehearsal))
        notes.n_bytes = sum(t.n_bytes for t in start.tensors)
        notes.attrs |= {"wait_s": round(waited.seconds, 4), "waits_for": "fetch"}
        if finisher is not None and rehearsal is not None:
            notes.attrs["threads_wait_s"] = round(finisher.kernels.seconds, 4)
            notes.attrs["rehearsal_s"] = round(rehearsal.took_s, 4)
    start.trace.mark(Phase.ENGINE_BEGIN)
    if _is_full(model_config):
        later = {name for name in parameters if not start.part.computes(name.rpartition(".")[0], start.tensors)}
        rest, aside = start.part.rest(start.segment.offer.tensors), finisher.aside if finisher else ()
        start.rest = Rest(model, start.segment, rest, aside, _KINDS, start.check, partial(check_filled, later))
        parameters -= later
    if model_config.quantization is None:
        check_filled(parameters, loaded)


# ── worker ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _StageWorker:
    """A process is a torch.distributed world of its own; only the pipeline group says that there are others."""

    @world_of_one()
    def init_device(self: Any) -> None:
        part = _start().part
        if not part.whole:
            # before the worker does, which would wait for the others; it finds everything initialised
            parallel_state.init_distributed_environment(1, 0, self.distributed_init_method, self.local_rank,
                                                        current_platform.dist_backend)  # fmt: skip
            parallel_state.ensure_model_parallel_initialized(1, 1, 1, 1)
            parallel_state._PP = StageGroup(part.stage, part.n_stages)
        super().init_device()  # type: ignore[misc]
        # where a world of several would have met; a process that is ended at once leaves the file behind
        Path(self.distributed_init_method.removeprefix("file://")).unlink(missing_ok=True)

    def get_kv_cache_spec(self: Any) -> dict[str, Any]:
        """Sliding layers keep whole contexts in a pipeline: a stage cannot know whether another has full attention,
        and blocks are the same tokens in all."""
        specs: dict[str, Any] = super().get_kv_cache_spec()  # type: ignore[misc]
        if _start().part.whole:
            return specs
        return {n: as_kind(FullAttentionSpec, s) if isinstance(s, SlidingWindowSpec) else s for n, s in specs.items()}


class LazyKvCpuWorker(_StageWorker, CPUWorker):
    """vLLM's CPU worker.  It allocates its KV cache without touching it, and binds no memory to a lone node."""

    def __init__(self, *args: Any, **more: Any) -> None:
        # the kernel would look at all pages and wait for the other cores: 4 ms to 200 ms
        unbound = replaced(torch.ops._C, "init_cpu_memory_env", lambda nodes: None)
        with unbound if len(get_visible_memory_node()) == 1 else nullcontext():
            super().__init__(*args, **more)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        return ZeroOnDemand() if tag == "kv_cache" else nullcontext()


class StageGpuWorker(_StageWorker, Worker):
    """vLLM's GPU worker."""


# ── executors ─────────────────────────────────────────────────────────────────────────────────────────────────────


class SegmentExecutor(UniProcExecutor):
    """The in-process executor, with traced phases, and continued requests that sample as if never interrupted."""

    def _init_executor(self) -> None:
        self.continuations = Continuations()
        super()._init_executor()
        _start().turn_to(Phase.KV_BEGIN).n_bytes = self.cache_config.kv_cache_memory_bytes

    @property
    def runner(self) -> Any:
        return self.driver_worker.worker.model_runner

    def begin(self, request: EngineRequest) -> None:
        self.continuations.begin(request.request_id, request.output_so_far)

    def forget(self, request_id: str) -> None:
        self.continuations.forget(request_id)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        self.continuations.before_sampling(self.runner)
        return super().sample_tokens(grammar_output, non_block)


class StageExecutor(SegmentExecutor):
    """One stage of several: computes its layers of a batch, and takes and hands on what is between them."""

    supports_pp = True

    def _init_executor(self) -> None:
        super()._init_executor()
        self.link: Any = _start().link
        self.group = parallel_state.get_pp_group()
        self._batches: PersistentBatches | None = None  # made when the runner knows the shape of its tables
        runner = self.runner
        if not self.group.is_first_rank:  # vLLM allocates it while profiling only
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )

    def compute(self, output: SchedulerOutput, received: Tensors) -> Tensors:
        """This stage's part of a batch; what the next stage needs, empty after the last stage and without tokens."""
        self.group.received, self.group.computed = received, {}
        self._batches = self._batches or PersistentBatches.of(self.runner, build_logitsprocs, PIN_MEMORY)
        self._batches.take_up(self.runner, output)
        self.collective_rpc("execute_model", args=(output,), single_value=True)
        return self.group.computed

    def rehearse(self) -> None:
        """A batch through this stage alone; see Rehearsal."""
        runner, config = self.runner, self.vllm_config
        room = min(config.model_config.max_model_len - 2, runner.max_num_tokens // 2)
        n_groups = len(runner.kv_cache_config.kv_cache_groups)
        for step in rehearsal(min(REHEARSED_TOKENS, room), config.cache_config.block_size, n_groups):
            received = {name: torch.zeros(step.n_tokens, width, dtype=runner.dtype)
                        for name, (_, width) in wanted_by(runner).items()}  # fmt: skip
            self.compute(_scheduler_output(step), received)
            if step.n_tokens and self.group.is_last_rank:
                self.sample_tokens(None)


class RelayExecutor(StageExecutor):
    """Stage 0: vLLM's engine sits above it and the other stages are behind the link."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self._requests: dict[str, EngineRequest] = {}
        self._pending = Pending()
        self._number = 0
        self._sampling, self.stages_awaited = Future[Any](), Asleep()
        self._vocab_size = self.model_config.get_vocab_size()
        self.link.on_sampled = lambda sampled: self._pending.fulfil(sampled, self._vocab_size)
        self.link.when_lost(self._pending.fail)

    def begin(self, request: EngineRequest) -> None:
        self._requests[request.request_id] = request

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        if not scheduler_output.total_num_scheduled_tokens and not scheduler_output.finished_req_ids:
            return _done(EMPTY_MODEL_RUNNER_OUTPUT)  # the engine fills its queue: nobody else need know
        self._number += 1
        step = step_of(self._number, scheduler_output, self._requests)
        batch = batch_of(step, self.compute(scheduler_output, {}))
        if not step.n_tokens:
            self.link.send_batch(batch)
            return _done(EMPTY_MODEL_RUNNER_OUTPUT)
        self._sampling = self._pending.open(step)
        self.link.send_batch(batch)
        return _done(None)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """The last stage does it: a future of what it will say of the batch just executed."""
        return _Answer(self._sampling, self.stages_awaited.counted)


class FollowerExecutor(StageExecutor):
    """Any other stage: does what comes down the chain."""

    def follow(self) -> None:
        """One batch.  Raises ProtocolError for one that cannot be computed here, WorkerLost."""
        batch = self.link.next_batch()
        step = batch.step
        check_for(batch, self.runner)
        for new in step.new:
            self.begin(new.request)
        computed = self.compute(_scheduler_output(step), from_host(batch.tensors))
        for name in step.finished:
            self.forget(name)
        if not self.group.is_last_rank:
            self.link.send_batch(batch_of(step, computed))
        elif step.n_tokens:
            self.link.send_sampled(sampled_of(step.number, self.sample_tokens(None)))


class _Answer(Future[Any]):
    """The last stage's answer in vLLM's words, made where it is waited for."""

    def __init__(self, sampled: Future[Sampled], awaiting: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._sampled, self._awaiting = sampled, awaiting

    def result(self, timeout: float | None = None) -> Any:
        with self._awaiting():
            sampled = self._sampled.result(timeout)
        logprobs = None
        if sampled.logprobs is not None:
            lists = sampled.logprobs
            logprobs = LogprobsLists(np.array(lists.token_ids), np.array(lists.logprobs, np.float32),
                                     np.array(lists.ranks))  # fmt: skip
        names = list(sampled.request_ids)
        return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, list(map(list, sampled.token_ids)),
                                 logprobs)  # fmt: skip


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _scheduler_output(step: Step) -> SchedulerOutput:
    """What a scheduler of this stage's own would have said."""
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [
        NewRequestData(
            n.request.request_id, [*n.request.prompt_token_ids, *n.request.output_so_far], [],
            sampling_params(n.request), None, tuple(map(list, n.blocks)), n.computed, None,
        )
        for n in step.new
    ]  # fmt: skip
    output.scheduled_cached_reqs = CachedRequestData(
        [k.request_id for k in step.known], {k.request_id for k in step.known if k.resumed},
        [list(k.tokens) for k in step.known], {},
        [None if k.blocks is None else tuple(map(list, k.blocks)) for k in step.known],
        [k.computed for k in step.known], [k.n_output for k in step.known],
    )  # fmt: skip
    output.num_scheduled_tokens, output.total_num_scheduled_tokens = dict(step.scheduled), step.n_tokens
    output.finished_req_ids = set(step.finished)
    output.kv_cache_block_copies = [KVCacheBlockCopy(a, b) for a, b in step.copies] or None
    return output


def sampling_params(request: EngineRequest) -> SamplingParams:
    s: Sampling = request.sampling
    greedy = s.temperature == 0
    done = len(request.output_so_far)
    return SamplingParams(
        temperature=s.temperature, top_p=1.0 if greedy else s.top_p, top_k=0 if greedy else s.top_k,
        min_p=0.0 if greedy else s.min_p, seed=None if greedy else request.seed % 2**63,  # vLLM takes -1 for none
        presence_penalty=s.presence_penalty, frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty, stop_token_ids=list(s.stop_token_ids),
        max_tokens=s.max_tokens - done, min_tokens=max(0, s.min_tokens - done), logprobs=s.logprobs,
        logit_bias=dict(s.logit_bias) or None,
        detokenize=False, ignore_eos=True,  # the end-of-sequence tokens are among the stop tokens
    )  # fmt: skip
