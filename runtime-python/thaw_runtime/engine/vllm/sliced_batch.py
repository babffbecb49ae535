"""A batch of the check before a consolidation, computed a few layers at a time between the steps of the pipeline.

All layers at once would take as long as a prompt of so many tokens, and every request would wait for it.  A slice of
two layers delays a step by little.  Between two slices the hidden states are kept here, as a stage of a pipeline would
send them to the next.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from vllm import SamplingParams
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.sample.logits_processor import build_logitsprocs

from thaw_runtime.engine.vllm.executors import StageExecutor
from thaw_runtime.engine.vllm.persistent_batches import empty_batch
from thaw_runtime.engine.vllm.stage import Tensors
from thaw_runtime.engine.vllm.window import set_window
from thaw_runtime.pipeline.wire import Blocks

SLICE_LAYERS: Final = 2


@dataclass(frozen=True, slots=True)
class CheckedSequence:
    """A prompt in a batch of the check; ``computed`` of its tokens are in the cache."""

    name: str
    tokens: list[int]
    computed: int
    blocks: Blocks


class SlicedBatch:
    """``stage`` is stage 0, whose model is whole; ``n_layers`` are all of its layers."""

    def __init__(self, stage: StageExecutor, n_layers: int) -> None:
        self._stage, self._runner, self._n_layers = stage, stage.runner, n_layers
        self._rows = empty_batch(self._runner, build_logitsprocs, PIN_MEMORY)

    def compute(
        self, sequences: Sequence[CheckedSequence], prompt_logprobs: int | None = None
    ) -> Generator[None, None, Any]:
        """Compute one batch and return vLLM's output.  Yields after each slice but the last, so that a step follows."""
        output, ended = _begun(sequences, prompt_logprobs), _ended(sequences)
        n_tokens = output.total_num_scheduled_tokens
        received: Tensors = {}
        begins = range(0, self._n_layers, SLICE_LAYERS)
        for k, begin in enumerate(begins):
            with self._alone(k, len(begins), (begin, min(begin + SLICE_LAYERS, self._n_layers)), n_tokens):
                received = self._stage.compute_slice(output, received)
                sampled = self._stage.sample_slice() if k == len(begins) - 1 else None
                self._stage.compute_slice(ended, {})
            if k < len(begins) - 1:
                yield
        return sampled

    @contextmanager
    def _alone(self, k: int, n: int, layers: tuple[int, int], n_tokens: int) -> Iterator[None]:
        """While the block runs, this is stage ``k`` of ``n`` and computes these layers, in a batch of its own."""
        group, runner = self._stage.group, self._runner
        stage, window = (group.rank_in_group, group.world_size), self._window
        rows, tensors = runner.input_batch, runner.intermediate_tensors
        group.take_place(k, n)
        set_window(runner.model, layers)
        runner.input_batch = self._rows
        if k:  # vLLM copies what stage 0 does not receive into tensors of its own
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=n_tokens, dtype=runner.dtype, device=runner.device
            )
        try:
            yield
        finally:
            runner.input_batch, runner.intermediate_tensors = rows, tensors
            set_window(runner.model, window)
            group.take_place(*stage)

    @property
    def _window(self) -> tuple[int, int]:
        modules = self._runner.model.modules()
        return next((m.start_layer, m.end_layer) for m in modules if hasattr(m, "start_layer"))


def _begun(sequences: Sequence[CheckedSequence], prompt_logprobs: int | None) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [_new_request(each, prompt_logprobs) for each in sequences]
    output.num_scheduled_tokens = {each.name: len(each.tokens) - each.computed for each in sequences}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    return output


def _ended(sequences: Sequence[CheckedSequence]) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {each.name for each in sequences}
    return output


def _new_request(sequence: CheckedSequence, prompt_logprobs: int | None) -> NewRequestData:
    return NewRequestData(
        req_id=sequence.name,
        prompt_token_ids=sequence.tokens,
        mm_features=[],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=prompt_logprobs),
        pooling_params=None,
        block_ids=tuple(map(list, sequence.blocks)),
        num_computed_tokens=sequence.computed,
        lora_request=None,
    )
