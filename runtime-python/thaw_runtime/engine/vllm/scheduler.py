"""vLLM's scheduler in a pipeline: stage 0 divides its requests among several batches, the other stages have none."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from thaw_runtime.engine.vllm.executors import FollowerExecutor


class StageScheduler(Scheduler):
    """Divides the requests among the batches that are in the pipeline at once.

    vLLM puts every request that is ready into the next batch, so requests that came together stay together, and all
    stages but one are idle.  Here a batch gets no more than its share, and no more than one stage samples at a time.
    """

    running: list[Any]
    max_num_active_reqs: int
    largest_batch: int | None = None
    """Set for the one worker that a group became: it may have more requests than its memory allows in a batch."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        everyone, most = self.running, self.max_num_active_reqs
        n_open = min(len(everyone) + len(self.waiting), self.max_num_running_reqs)
        share = -(-n_open // self.vllm_config.parallel_config.pipeline_parallel_size)
        if self.largest_batch is not None:
            share = min(share, self.largest_batch)
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
            if self.largest_batch is not None:  # all are ready at the next step too: those that waited come first
                kept.sort(key=lambda r: r.request_id not in held)
            self.running = kept + [r for r in self.running if r.request_id not in before]


class FollowerCore(EngineCore):
    """The core of any stage but the first: vLLM's preparation of an executor, without the scheduler that it makes."""

    batch_queue = None

    def __init__(self, config: Any, executor: type[FollowerExecutor], log_stats: bool) -> None:
        self.vllm_config = config
        self.model_executor = executor(config)
        self.kv_cache_config = self._initialize_kv_caches(config)
