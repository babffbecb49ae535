"""Keeps the requests of each batch that is in the pipeline in rows of their own.

vLLM's runner keeps the requests of the last batch in a *persistent batch*: token ids, block table and sampling state,
a row for each request.  Few rows change when the next batch has the same requests.  In a pipeline it never has them:
the steps of s − 1 other batches come between two steps of a request, and vLLM would remove and write every row again
at every step, the whole prompt included.  Here each batch that can be in flight finds its own rows again.

This file uses fields of vLLM's runner, but imports no vLLM, so its tests need none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class PersistentBatches:
    def __init__(self, batches: Sequence[Any]) -> None:
        """``batches`` are empty and of the runner's class; there are as many as can be in flight."""
        self._batches = list(batches)

    @classmethod
    def of(cls, runner: Any, logitsprocs: Callable[..., Any], pin_memory: bool) -> PersistentBatches:
        """The runner's own batch, and more that the runner makes like it, each with its own ``logitsprocs``."""
        n_more = runner.vllm_config.parallel_config.pipeline_parallel_size - 1
        return cls([runner.input_batch, *(empty_batch(runner, logitsprocs, pin_memory) for _ in range(n_more))])

    def take_up(self, runner: Any, output: Any) -> None:
        """Give the runner the batch that has most requests of ``output``, and remove these from the other batches."""
        scheduled = output.num_scheduled_tokens.keys()
        best = max(self._batches, key=lambda b: (len(scheduled & b.req_id_to_index.keys()), -len(b.req_id_to_index)))
        for other in self._batches:
            if other is not best:
                for name in (scheduled | output.finished_req_ids) & other.req_id_to_index.keys():
                    other.remove_request(name)
        runner.input_batch = best


def empty_batch(runner: Any, logitsprocs: Callable[..., Any], pin_memory: bool) -> Any:
    """A batch like the runner's own, without requests.  The runner keeps the batch that it has."""
    kept = runner.input_batch
    runner._init_block_sizes = []  # the runner makes a batch when these differ from the cache's block sizes
    runner.may_reinitialize_input_batch(runner.kv_cache_config)
    made, runner.input_batch = runner.input_batch, kept
    made.logitsprocs = logitsprocs(runner.vllm_config, runner.device, pin_memory, runner.is_pooling_model)
    if hasattr(runner, "_postprocess_tensors"):  # on a CPU, a table has no second copy on a device
        runner.input_batch = made
        runner._postprocess_tensors()
        runner.input_batch = kept
    return made
