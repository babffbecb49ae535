"""The requests of each batch that is in the pipeline, kept in rows of its own.

vLLM's runner keeps the requests of the last batch in a *persistent batch*: token ids, block table and sampling state in
rows, of which little changes when the next batch has the same requests.  In a pipeline it never has: between two steps
of a request come those of s − 1 other batches, and every row would be removed and written again at every step, prompt
and all.  Here each batch that can be in flight finds the rows it left behind.

Knows the fields of the engine's runner, but imports no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class PersistentBatches:
    def __init__(self, batches: Sequence[Any]) -> None:
        """``batches``: empty ones of the runner's kind, as many as can be in flight."""
        self._batches = list(batches)

    @classmethod
    def of(cls, runner: Any, logitsprocs: Callable[..., Any], pin_memory: bool) -> PersistentBatches:
        """The runner's own and more of its kind, made as it makes them, each with ``logitsprocs`` of its own."""
        made = [runner.input_batch]
        for _ in range(runner.vllm_config.parallel_config.pipeline_parallel_size - 1):
            runner._init_block_sizes = []  # it makes one when they differ from the cache's
            runner.may_reinitialize_input_batch(runner.kv_cache_config)
            runner.input_batch.logitsprocs = logitsprocs(
                runner.vllm_config, runner.device, pin_memory, runner.is_pooling_model
            )
            if hasattr(runner, "_postprocess_tensors"):  # on a CPU there is no second copy of a table
                runner._postprocess_tensors()
            made.append(runner.input_batch)
        return cls(made)

    def take_up(self, runner: Any, output: Any) -> None:
        """Give the runner the rows of the requests that ``output`` schedules; a request is in no others then."""
        scheduled = output.num_scheduled_tokens.keys()
        best = max(self._batches, key=lambda b: (len(scheduled & b.req_id_to_index.keys()), -len(b.req_id_to_index)))
        for other in self._batches:
            if other is not best:
                for name in (scheduled | output.finished_req_ids) & other.req_id_to_index.keys():
                    other.remove_request(name)
        runner.input_batch = best
