"""vLLM's stage 0 as a consolidation uses it: see FirstStage in pipeline/consolidation.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import vllm
from vllm.v1.core.sched.interface import PauseState

from thaw.errors import ProtocolError, from_info
from thaw_runtime.engine.protocol import EngineRequest
from thaw_runtime.engine.vllm.background_load import BackgroundLoad
from thaw_runtime.engine.vllm.block_tables import cached_blocks, held_blocks
from thaw_runtime.engine.vllm.kv_blocks import KvBlocks
from thaw_runtime.engine.vllm.switch import become_whole, check_generators
from thaw_runtime.engine.vllm.verification import GoldenRequest, Verification
from thaw_runtime.pipeline.block_copies import BlockCopies, HeldBlock
from thaw_runtime.pipeline.consolidation import BlockCheck, Checking, CheckingBlocks
from thaw_runtime.pipeline.stage_parts import StagePart
from thaw_runtime.pipeline.wire import Blocks, KvWanted, Parted


class VllmFirstStage:
    """One attempt's view of the engine."""

    def __init__(
        self,
        core: Any,
        part: StagePart,
        background: BackgroundLoad,
        attempt: int,
        add: Callable[[EngineRequest], None],
        step: Callable[[], None],
    ) -> None:
        """``add`` hands a request to vLLM, and ``step`` computes a step."""
        self._core, self._executor, self._scheduler = core, core.model_executor, core.scheduler
        self._background, self._step, self._n_layers = background, step, part.bounds[-1][1]
        self._kv = KvBlocks(self._executor.runner, vllm.__version__)
        self.n_stages, self.n_groups = part.n_stages, self._kv.n_groups
        self.layers = {k: frozenset(self._kv.names(part.bounds[k])) for k in range(1, part.n_stages)}
        model = core.vllm_config.model_config
        most = min(model.max_model_len - 1, self._executor.runner.max_num_tokens)
        self._golden = GoldenRequest(attempt, model.get_vocab_size(), most)
        add(self._golden.request)

    def take_output(self, output: Any) -> None:
        """Take vLLM's output for a request that no client sent."""
        if output.request_id == self._golden.request.request_id:
            self._golden.take(output)
            if self._golden.is_complete:
                self._executor.forget(output.request_id)

    def ready(self) -> bool:
        if self._background.error is not None:
            raise from_info(self._background.error)
        return self._background.has_ended and self._golden.is_complete

    def held(self) -> list[list[HeldBlock]]:
        return held_blocks(self._scheduler)

    def n_bytes(self, blocks: Blocks) -> int:
        return sum(self._kv.n_bytes(names, blocks) for names in self.layers.values())

    def ask(self, wanted: KvWanted) -> None:
        self._executor.ask_for_kv(wanted)

    def write(
        self, name: str, layout: str, wanted: KvWanted, data: memoryview, added: Sequence[Mapping[int, int]]
    ) -> None:
        if layout != (ours := self._kv.layout(name)):
            raise ProtocolError(f"KV blocks of {name} are arranged as {layout!r} there, as {ours!r} here")
        self._kv.scatter(name, wanted, data, added)

    def verify_weights(self) -> Checking:
        return self._verification().check_weights(self._golden)

    def verify_blocks(self, missing: frozenset[int]) -> CheckingBlocks:
        copied = {f"stage {stage}": sorted(names) for stage, names in self.layers.items()}
        verification = self._verification()
        problem = yield from verification.check_blocks(copied, missing)
        return BlockCheck(problem, verification.n_compared, frozenset(verification.overwritten))

    def _verification(self) -> Verification:
        return Verification(self._executor, self._scheduler, self._kv, self._n_layers)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            yield
        finally:
            self._scheduler.set_pause_state(PauseState.UNPAUSED)

    def drain(self) -> None:
        while self._core.batch_queue:
            self._step()

    def check_generators(self, generators: Mapping[str, bytes]) -> None:
        check_generators(self._executor.runner, generators)

    def become_whole(self, copies: Sequence[BlockCopies], generators: Mapping[str, bytes]) -> None:
        cached = cached_blocks(self._scheduler)
        unusable = (group.unusable(held, cached) for group, held in zip(copies, self.held(), strict=True))
        # a block is one group's, and is unusable for all others
        become_whole(self._core, self._n_layers, generators, set.intersection(*unusable))

    def parted(self) -> Parted:
        """Return the message to the other stages after the switch."""
        return Parted(tuple(self._golden.tokens), tuple(self._golden.logprobs))

    def give_up(self) -> None:
        if not self._golden.is_complete:
            self._core.abort_requests([self._golden.request.request_id])
            self._executor.forget(self._golden.request.request_id)
