"""Does the whole worker compute what the pipeline computes?  Asked before a group is consolidated, answered by numbers.

Two batches go through all layers of this stage, a few layers between two steps of the pipeline (sliced_batch.py):

- The *golden request*: the pipeline has answered it, with the logprob of each token.  The whole model computes the
  logprobs of the same tokens.  This compares the weights of all layers and of the head.
- The last tokens of the last full block of the longest running requests.  The whole model computes them again, in a
  copy of the block that nobody uses, with the copied blocks before it as the context.  This compares the copied KV
  cache itself, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, Final

import torch

from thaw.errors import ErrorInfo, ModelCorrupt, Unavailable
from thaw.logs import Log
from thaw_runtime.engine.protocol import EngineRequest, Sampling
from thaw_runtime.engine.vllm.executors import StageExecutor
from thaw_runtime.engine.vllm.kv_blocks import KvBlocks
from thaw_runtime.engine.vllm.sliced_batch import CheckedSequence, SlicedBatch
from thaw_runtime.pipeline.consolidation import Checking
from thaw_runtime.pipeline.wire import Blocks

_log = Log("engine")
GOLDEN_TOKENS: Final = 16
CHECKED_TOKENS, CHECKED_REQUESTS = 64, 2
"""The most tokens and requests of one batch of the check."""
MAX_LOGPROB_DIFFERENCE: Final = {torch.float32: 0.0005, torch.bfloat16: 0.25, torch.float16: 0.05}
MAX_KV_DIFFERENCE: Final = {torch.float32: 0.0001, torch.bfloat16: 0.05, torch.float16: 0.01}
"""The largest norm of a block's difference, divided by the norm of the block.  docs/consolidation.md has the
measurement."""
_CHECK: Final = "consolidation-check"


class GoldenRequest:
    """A greedy request that the pipeline answers for the check."""

    def __init__(self, attempt: int, vocab_size: int, most_tokens: int) -> None:
        """``most_tokens`` of prompt and answer together are one batch."""
        n = max(1, min(GOLDEN_TOKENS, most_tokens // 2))
        prompt = tuple((1 + i * 7919) % vocab_size for i in range(n))
        self.request = EngineRequest(f"golden-{attempt}", prompt, Sampling(n, temperature=0.0, logprobs=0), 0)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.is_complete = False

    def take(self, output: Any) -> None:
        """Take an EngineCoreOutput of this request."""
        self.tokens += output.new_token_ids
        self.logprobs += [float(row[0]) for row in output.new_logprobs.logprobs]
        self.is_complete = output.finish_reason is not None


class Verification:
    """``stage`` is stage 0, whose model is whole; ``n_layers`` are all of its layers."""

    def __init__(self, stage: StageExecutor, scheduler: Any, kv: KvBlocks, n_layers: int) -> None:
        self._runner, self._scheduler, self._kv = stage.runner, scheduler, kv
        self._batch = SlicedBatch(stage, n_layers)
        self.overwritten: set[int] = set()  # blocks that held something else before
        self.n_compared = 0  # requests whose copied blocks were compared

    def check_weights(self, golden: GoldenRequest) -> Checking:
        """Compare the logprobs of the golden request, and return a description of the difference, or None.  The engine
        thread continues the check between two steps, as with ``check_blocks``.
        """
        try:
            return (yield from self._check_logprobs(golden))
        except _NoRoomError as e:
            return Unavailable(str(e), hint="it is tried again").info()

    def check_blocks(self, copied: Mapping[str, Sequence[str]], missing: Set[int]) -> Checking:
        """Compare copied blocks with the whole model's own results; return None if nothing differs.

        ``copied`` are the names of the layers whose blocks came from other stages, by the stage's name for the error;
        the blocks ``missing`` have not come.
        """
        try:
            return (yield from self._check_blocks(copied, missing))
        except _NoRoomError as e:
            return Unavailable(str(e), hint="it is tried again").info()

    def _check_logprobs(self, golden: GoldenRequest) -> Checking:
        tokens = [*golden.request.prompt_token_ids, *golden.tokens]
        with self._scratch(-(-len(tokens) // self._block_size)) as blocks:
            sequence = CheckedSequence(f"{_CHECK}-0", tokens, 0, blocks)
            output = yield from self._batch.compute([sequence], prompt_logprobs=0)
        found = output.prompt_logprobs_dict[f"{_CHECK}-0"].logprobs[-len(golden.tokens) :, 0]
        difference = float((found - torch.tensor(golden.logprobs)).abs().max())
        _log.event("consolidation_checked", what="logprobs", difference=round(difference, 6))
        if not difference <= MAX_LOGPROB_DIFFERENCE[self._runner.dtype]:  # NaN differs
            return ModelCorrupt(f"the whole worker's logprobs differ from the pipeline's by {difference:.3g}").info()
        return None

    def _check_blocks(self, copied: Mapping[str, Sequence[str]], missing: Set[int]) -> Checking:
        chosen = self._chosen(missing)
        if not chosen:
            return None
        size, n_tokens = self._block_size, self._most_tokens // len(chosen)
        with self._scratch(len(chosen)) as scratch, self._held_by_check(chosen):
            sequences, ours = [], [list[int]() for _ in scratch]
            for i, (request, end) in enumerate(chosen):
                held, computed = self._held(request), end * size - min(size, n_tokens)
                blocks = tuple((*ids[: end - 1], new[i]) for ids, new in zip(held, scratch, strict=True))
                tokens = list(request.all_token_ids[: end * size])
                sequences.append(CheckedSequence(f"{_CHECK}-{i}", tokens, computed, blocks))
                for mine, ids in zip(ours, held, strict=True):
                    mine.append(ids[end - 1])
            of_requests = tuple(map(tuple, ours))
            self._kv.copy(of_requests, scratch)
            yield from self._batch.compute(sequences)
            self.n_compared += len(chosen)
            return self._compare(copied, of_requests, scratch)

    def _compare(self, copied: Mapping[str, Sequence[str]], ours: Blocks, scratch: Blocks) -> ErrorInfo | None:
        found = {
            (stage, name): self._kv.difference(name, ours, scratch) for stage, names in copied.items() for name in names
        }
        _log.event("consolidation_checked", what="blocks", difference=round(max(found.values()), 6))
        for (stage, name), difference in found.items():
            if not difference <= MAX_KV_DIFFERENCE[self._runner.dtype]:
                said = f"KV blocks of {name} from {stage} differ from the whole worker's by {difference:.3g}"
                return ModelCorrupt(said).info()
        return None

    def _chosen(self, missing: Set[int]) -> list[tuple[Any, int]]:
        """The requests that have most copied blocks, each with the number of them."""
        copied = [(self._n_copied(request, missing), request) for request in self._scheduler.running]
        longest = sorted((each for each in copied if each[0]), key=lambda each: -each[0])
        return [(request, end) for end, request in longest[: min(CHECKED_REQUESTS, self._runner.max_num_reqs)]]

    @property
    def _most_tokens(self) -> int:
        return min(CHECKED_TOKENS, int(self._runner.max_num_tokens))

    def _n_copied(self, request: Any, missing: Set[int]) -> int:
        """How many full blocks from the first one on are here."""
        n_full = request.num_computed_tokens // self._block_size
        found = (i for ids in self._held(request) for i, block in enumerate(ids[:n_full]) if block in missing)
        return min(found, default=n_full)

    def _held(self, request: Any) -> tuple[list[int], ...]:
        held: tuple[list[int], ...] = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return held

    @contextmanager
    def _held_by_check(self, chosen: Sequence[tuple[Any, int]]) -> Iterator[None]:
        """While the block runs, no other request gets these blocks, even if the requests that have them end."""
        manager = self._scheduler.kv_cache_manager
        groups = [(ids, end) for request, end in chosen for ids in manager.get_blocks(request.request_id).blocks]
        blocks = [block for ids, end in groups for block in ids[:end]]
        manager.block_pool.touch(blocks)
        try:
            yield
        finally:
            manager.block_pool.free_blocks(reversed(blocks))

    @property
    def _block_size(self) -> int:
        return int(self._runner.vllm_config.cache_config.block_size)

    @contextmanager
    def _scratch(self, n_blocks: int) -> Iterator[Blocks]:
        """Blocks that no request has, ``n_blocks`` of each group."""
        pool, n_groups = self._scheduler.kv_cache_manager.block_pool, self._kv.n_groups
        if n_blocks * n_groups > pool.get_num_free_blocks():
            raise _NoRoomError(f"{n_blocks * n_groups} free KV blocks are needed to check the whole worker")
        taken = pool.get_new_blocks(n_blocks * n_groups)
        ids = [block.block_id for block in taken]
        self.overwritten.update(ids)
        try:
            yield tuple(tuple(ids[g * n_blocks : (g + 1) * n_blocks]) for g in range(n_groups))
        finally:
            pool.free_blocks(taken)


class _NoRoomError(Exception):
    pass
