"""vLLM's in-process executor: it connects the forward pass, sampling and the stages of a pipeline.

::

    UniProcExecutor (vLLM)
    └── SegmentExecutor           a whole model
        └── StageExecutor         one stage of several
            ├── RelayExecutor     stage 0, below vLLM's engine and scheduler
            └── FollowerExecutor  any other stage
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.sample.logits_processor import build_logitsprocs

from relay.thread_account import BlockedTime
from thaw.tracing.trace import Phase
from thaw_runtime.engine.protocol import EngineRequest, Sampling
from thaw_runtime.engine.vllm import embeddings
from thaw_runtime.engine.vllm.continuation import Continuations
from thaw_runtime.engine.vllm.current_start import current_start
from thaw_runtime.engine.vllm.kv_sender import KvSender
from thaw_runtime.engine.vllm.persistent_batches import PersistentBatches
from thaw_runtime.engine.vllm.stage import (
    Pending,
    Tensors,
    batch_of,
    check_for,
    from_host,
    masked,
    rehearsal,
    sampled_of,
    step_of,
    wanted_by,
)
from thaw_runtime.engine.vllm.state_layers import check_room, keeps_state
from thaw_runtime.engine.vllm.translation import grammar_output, model_runner_output, scheduler_output_of
from thaw_runtime.pipeline.stage_parts import StagePart
from thaw_runtime.pipeline.wire import Batch, KvWanted, Sampled, Step

REHEARSED_TOKENS = 64  # the length of a short prompt; kernels are generated for the number of rows they see


class SegmentExecutor(UniProcExecutor):
    """The in-process executor, with traced phases, and continued requests that sample as if never interrupted."""

    def _init_executor(self) -> None:
        self.continuations = Continuations()
        super()._init_executor()
        current_start().turn_to(Phase.KV_BEGIN).n_bytes = self.cache_config.kv_cache_memory_bytes

    def determine_available_memory(self) -> Any:
        memory = current_start().memory
        if memory is not None and keeps_state(self.vllm_config):
            check_room(self.vllm_config, self.driver_worker.worker.get_kv_cache_spec(), memory)
        return super().determine_available_memory()

    @classmethod
    def adopting(cls, stage: StageExecutor) -> SegmentExecutor:
        """An executor for the worker of ``stage``, which has become whole."""
        made = cls.__new__(cls)
        made.__dict__.update(stage.__dict__)
        made.continuations = Continuations()
        return made

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
    """Computes the stage's layers of a batch, from the previous stage's tensors to the tensors for the next stage."""

    supports_pp = True

    def _init_executor(self) -> None:
        super()._init_executor()
        self.link: Any = current_start().link
        self.group = parallel_state.get_pp_group()
        self._batches: PersistentBatches | None = None  # made at the first batch, when the runner's tables have a shape
        runner = self.runner
        if not self.group.is_first_rank:  # vLLM allocates these only while it profiles
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )

    def compute(self, output: SchedulerOutput, received: Tensors) -> Tensors:
        """Compute this stage's layers of a batch and return what the next stage needs.

        The result is empty after the last stage, and for a batch without tokens.
        """
        self._batches = self._batches or PersistentBatches.of(self.runner, build_logitsprocs, PIN_MEMORY)
        self._batches.take_up(self.runner, output)
        return self.run_layers(output, received)

    def run_layers(self, output: SchedulerOutput, received: Tensors) -> Tensors:
        """Run the layers in the window on a batch, and return what the next stage needs."""
        self.group.received, self.group.computed = received, {}
        self.collective_rpc("execute_model", args=(output,), single_value=True)
        return self.group.computed

    def compute_slice(self, output: SchedulerOutput, received: Tensors) -> Tensors:
        """Compute the layers in the window of a batch that only this stage knows: one of SlicedBatch."""
        return {name: tensor.clone() for name, tensor in self.run_layers(output, received).items()}

    def sample_slice(self) -> Any:
        """Return vLLM's output for the batch whose last layers were computed."""
        return self.collective_rpc("sample_tokens", args=(None,), single_value=True)

    def rehearse(self) -> None:
        """Run a batch through this stage alone; see Rehearsal."""
        runner, config = self.runner, self.vllm_config
        most = min(config.model_config.max_model_len - 2, runner.max_num_tokens // 2)
        n_groups = len(runner.kv_cache_config.kv_cache_groups)
        for step in rehearsal(min(REHEARSED_TOKENS, most), config.cache_config.block_size, n_groups):
            received = {
                name: torch.zeros(step.n_tokens, width, dtype=runner.dtype)
                for name, (_, width) in wanted_by(runner).items()
            }
            self.compute(scheduler_output_of(step), received)
            if step.n_tokens and self.group.is_last_rank:
                self.sample_tokens(None)


class RelayExecutor(StageExecutor):
    """Stage 0: vLLM's engine calls it, and it reaches the other stages over the link."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self._requests: dict[str, EngineRequest] = {}
        self._pending = Pending()
        self._number = 0
        self._computed: Any = None  # the batch that was executed last, until its masks are known
        self.stages_awaited = BlockedTime()
        self._vocab_size = self.model_config.get_vocab_size()
        self.link.on_sampled = lambda sampled: self._pending.fulfil(sampled, self._vocab_size)
        self.link.when_lost(self._pending.fail)

    @property
    def requests(self) -> Mapping[str, EngineRequest]:
        """The requests that this engine computes, by id."""
        return self._requests

    def begin(self, request: EngineRequest) -> None:
        sampling = replace(request.sampling, grammar=None)  # the other stages get masks, and need no rules
        self._requests[request.request_id] = replace(request, sampling=sampling)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        if not scheduler_output.total_num_scheduled_tokens and not scheduler_output.finished_req_ids:
            return _done(EMPTY_MODEL_RUNNER_OUTPUT)  # the engine fills its queue; the other stages need not know
        self._number += 1
        step = step_of(self._number, scheduler_output, self._requests)
        batch = batch_of(step, self.compute(scheduler_output, {}))
        if not step.n_tokens:
            self.link.send_batch(batch)
            return _done(EMPTY_MODEL_RUNNER_OUTPUT)
        self._computed = batch
        return _done(None)

    def ask_for_kv(self, wanted: KvWanted) -> None:
        """Ask the other stages for KV blocks as they are after the batches that were sent.  Raises WorkerLost."""
        self._number += 1
        self.link.send_batch(Batch(Step(self._number, (), (), {}, (), kv=wanted), {}))

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """The last stage samples, under the masks of the grammars, whose state is here with the scheduler.  Returns the
        future of its answer to the batch that was executed last."""
        computed = self._computed
        batch = replace(computed, step=masked(computed.step, grammar_output))
        sampling = self._pending.open(batch.step)
        self.link.send_batch(batch)
        return _Answer(sampling, self.stages_awaited.counted)


class FollowerExecutor(StageExecutor):
    """The executor of every stage but the first: it computes the batches that come from the previous stage."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self._kv_sender = KvSender(self.link, self.runner, current_start().part)

    def follow(self, batch: Batch) -> None:
        """Compute one batch.  Raises ProtocolError for one that cannot be computed here, WorkerLost."""
        step = batch.step
        check_for(batch, self.runner)
        for new in step.new:
            self.begin(new.request)
        computed: Tensors = {}
        if step.n_tokens or step.finished:
            computed = self.compute(scheduler_output_of(step), from_host(batch.tensors))
        for name in step.finished:
            self.forget(name)
        if not self.group.is_last_rank:
            self.link.send_batch(batch_of(step, computed))
        elif step.n_tokens:
            self.link.send_sampled(sampled_of(step.number, self.sample_tokens(grammar_output(step))))
        if step.kv is not None:
            self._kv_sender.send(step.kv)


def executor_for(part: StagePart) -> type[SegmentExecutor]:
    if part.whole:
        return SegmentExecutor
    return RelayExecutor if part.first else FollowerExecutor


def rehearse_whole(core: Any, add: Callable[[EngineRequest], None]) -> None:
    """Run a prompt and a decode step of two requests, one of them greedy, or one text for an embedding model.  No
    result is kept."""
    if core.vllm_config.model_config.runner_type == "pooling":
        embeddings.rehearse(core)
        return
    for name, temperature in (("greedy", 0.0), ("sampled", 0.7)):
        prompt = (0,) * min(REHEARSED_TOKENS, core.vllm_config.model_config.max_model_len - 2)
        add(EngineRequest(f"rehearsal-{name}", prompt, Sampling(2, temperature, top_p=0.9), 0))
    while core.scheduler.has_requests():
        core.step_fn()
    core.reset_prefix_cache()


class _Answer(Future[Any]):
    """The last stage's answer as vLLM's output, made on the thread that waits for it."""

    def __init__(self, sampled: Future[Sampled], awaiting: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._sampled, self._awaiting = sampled, awaiting

    def result(self, timeout: float | None = None) -> Any:
        with self._awaiting():
            sampled = self._sampled.result(timeout)
        return model_runner_output(sampled)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
