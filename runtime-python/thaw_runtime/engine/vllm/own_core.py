"""vLLM's engine core of a later stage that outlives its pipeline: built around the model and the KV cache in memory.

A follower has vLLM's executor, worker and runner, but no scheduler (scheduler.py).  The parts that its core lacks are
cheap to make: the block pool, the scheduler, and the bookkeeping of requests.  Nothing is loaded, copied or allocated
for it.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import vllm
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.engine import core
from vllm.v1.engine.core import EngineCore
from vllm.v1.sample.logits_processor import build_logitsprocs

from thaw.errors import ErrorInfo, ProtocolError, from_info
from thaw_runtime.engine.vllm.executors import FollowerExecutor, SegmentExecutor
from thaw_runtime.engine.vllm.kv_blocks import KvBlocks
from thaw_runtime.engine.vllm.persistent_batches import empty_batch
from thaw_runtime.engine.vllm.replaced import replaced
from thaw_runtime.engine.vllm.scheduler import FollowerCore
from thaw_runtime.engine.vllm.verification import GoldenRequest, Verification
from thaw_runtime.engine.vllm.window import PARTITION, set_window
from thaw_runtime.pipeline.consolidation import Checking
from thaw_runtime.pipeline.wire import Parted


class OwnCore(EngineCore):
    """The core of a stage whose pipeline is over.  ``n_layers`` counts all layers of the model, whose weights are
    loaded."""

    def __init__(self, follower: FollowerCore, n_layers: int) -> None:
        stage: Any = follower.model_executor
        assert isinstance(stage, FollowerExecutor)  # noqa: S101  another stage has a core
        self.stage = stage
        config = follower.vllm_config
        self._cache = follower.kv_cache_config
        os.environ.pop(PARTITION, None)
        scheduler = config.scheduler_config
        scheduler.max_num_seqs = -(-scheduler.max_num_seqs // stage.group.world_size)
        config.parallel_config.pipeline_parallel_size = 1
        stage.group.take_place(0, 1)
        set_window(stage.runner.model, (0, n_layers))
        _forget_requests(stage.runner)
        # vLLM collects garbage three times, which takes a second in a process that has imported torch
        with replaced(core, "freeze_gc_heap", gc.freeze):
            super().__init__(config, lambda _: SegmentExecutor.adopting(stage), log_stats=False)

    def _initialize_kv_caches(self, vllm_config: Any) -> Any:
        """The cache is there.  Its blocks hold what the pipeline wrote, and are free."""
        return self._cache


def _forget_requests(runner: Any) -> None:
    """Stage 0 has all requests of the pipeline."""
    runner.requests.clear()
    runner.input_batch = empty_batch(runner, build_logitsprocs, PIN_MEMORY)
    runner.intermediate_tensors = None  # a first stage receives none


def verify(made: OwnCore, parted: Parted, n_layers: int) -> None:
    """Compare the answer of the pipeline to the golden request with what the whole model computes.

    Raises ModelCorrupt for a difference, Unavailable when there is no room for the check, and ProtocolError for an
    invalid answer.
    """
    runner, model = made.stage.runner, made.vllm_config.model_config
    golden = GoldenRequest(0, model.get_vocab_size(), min(model.max_model_len - 1, runner.max_num_tokens))
    n, vocab_size = golden.request.sampling.max_tokens, model.get_vocab_size()
    if not len(parted.tokens) == len(parted.logprobs) == n or not all(0 <= t < vocab_size for t in parted.tokens):
        raise ProtocolError(f"stage 0 sent {len(parted.tokens)} tokens of the golden request, expected {n}")
    golden.tokens, golden.logprobs, golden.is_complete = list(parted.tokens), list(parted.logprobs), True
    kv = KvBlocks(runner, vllm.__version__)
    problem = _at_once(Verification(made.stage, made.scheduler, kv, n_layers).check_weights(golden))
    if problem is not None:
        raise from_info(problem)


def _at_once(check: Checking) -> ErrorInfo | None:
    """Run all slices of a check without steps between them, because there are no requests yet."""
    while True:
        try:
            next(check)
        except StopIteration as ended:
            problem: ErrorInfo | None = ended.value
            return problem
