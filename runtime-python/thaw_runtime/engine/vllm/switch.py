"""The moment in which stage 0 becomes a whole worker: no batch is in flight, and every block has been copied.

Nothing is built here that a running request needs: the model, its attention layers and the KV cache are those of a
whole worker from the start (window.py).  The request's tokens are known to the scheduler of this stage; its sampling
state comes from the last stage.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.engine.core import EngineCore
from vllm.v1.sample.logits_processor import build_logitsprocs

from thaw.errors import ProtocolError
from thaw_runtime.engine.vllm.executors import RelayExecutor, SegmentExecutor
from thaw_runtime.engine.vllm.persistent_batches import empty_batch
from thaw_runtime.engine.vllm.window import PARTITION, set_window


def become_whole(core: EngineCore, n_layers: int, generators: Mapping[str, bytes], unusable: set[int]) -> None:
    """Let the engine of stage 0 compute all layers and sample.  Called on the engine thread.

    ``generators`` holds the state of each request's generator on the last stage.  ``unusable`` are the blocks of the
    prefix cache that only the other stages have computed.
    """
    stage: Any = core.model_executor
    assert isinstance(stage, RelayExecutor)  # noqa: S101  a group is consolidated once
    assert not core.batch_queue  # noqa: S101  the caller has drained the queue
    os.environ.pop(PARTITION, None)
    core.scheduler.largest_batch = -(-core.vllm_config.scheduler_config.max_num_seqs // stage.group.world_size)
    core.vllm_config.parallel_config.pipeline_parallel_size = 1
    stage.group.take_place(0, 1)
    set_window(stage.runner.model, (0, n_layers))
    core.scheduler.kv_cache_manager.evict_blocks(unusable)
    _take_over_requests(core.scheduler, stage.runner, generators)
    whole = SegmentExecutor.adopting(stage)
    for name, request in stage.requests.items():
        whole.continuations.begin(name, request.output_so_far, rewound=name in generators)
    core.model_executor, core.scheduler.use_pp = whole, False
    core.batch_queue, core.step_fn = None, core.step


def check_generators(runner: Any, generators: Mapping[str, bytes]) -> None:
    """Raises ProtocolError unless there is a state of each request's generator."""
    for name, state in runner.requests.items():
        if state.generator is not None and len(generators.get(name, b"")) != state.generator.get_state().numel():
            raise ProtocolError(f"the last stage sent no state of the generator of request {name}")


def _take_over_requests(scheduler: Any, runner: Any, generators: Mapping[str, bytes]) -> None:
    """Give the runner of stage 0 what only the scheduler and the last stage knew: the last tokens and the generators.

    The requests enter a new batch at the next step, with all of this.
    """
    for name, state in runner.requests.items():
        request = scheduler.requests.get(name)
        if request is not None:
            state.output_token_ids[:] = request.output_token_ids
            state.num_computed_tokens = request.num_computed_tokens
        if name in generators and state.generator is not None:
            state.generator.set_state(torch.frombuffer(bytearray(generators[name]), dtype=torch.uint8))
    runner.input_batch = empty_batch(runner, build_logitsprocs, PIN_MEMORY)
