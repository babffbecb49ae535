"""A stage's side of a consolidation: it sends the KV blocks that stage 0 asks for."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import vllm

from thaw.errors import ThawError
from thaw.logs import Log
from thaw_runtime.engine.vllm.kv_blocks import KvBlocks
from thaw_runtime.pipeline.kv_wire import KvPart
from thaw_runtime.pipeline.link import StageLink
from thaw_runtime.pipeline.stage_parts import StagePart
from thaw_runtime.pipeline.wire import KvWanted

_log = Log("engine")
PART_BYTES: Final = 4 << 20
"""The largest part in bytes.  A part is one message, and the receiving thread writes it as a whole, which takes some
milliseconds."""


class KvSender:
    """Copies blocks between two batches, when nothing writes them, and sends the copies on a thread of their own."""

    def __init__(self, link: StageLink, runner: Any, part: StagePart) -> None:
        self._link, self._runner, self._part = link, runner, part
        self._blocks: KvBlocks | None = None  # made when the cache has been allocated
        self._attempt = 0
        self._sent: dict[str, dict[int, torch.Tensor]] = {}  # sent in the last round: layer → block → elements

    def send(self, wanted: KvWanted) -> None:
        """Send this stage's part of the blocks.  Raises ProtocolError for blocks that this stage does not have."""
        blocks = self._blocks = self._blocks or KvBlocks(self._runner, vllm.__version__)
        if wanted.attempt != self._attempt:
            self._attempt, self._sent = wanted.attempt, {}
        copies = {name: blocks.gather(name, wanted.blocks) for name in blocks.names(self._part.window)}
        sent, self._sent = self._sent, {name: blocks.by_block(name, wanted, copy) for name, copy in copies.items()}
        generators = self._generators() if wanted.last and self._part.last else {}
        args = (blocks, wanted, copies, sent, generators)
        threading.Thread(target=self._send_all, args=args, name="kv-send", daemon=True).start()

    def _send_all(
        self,
        blocks: KvBlocks,
        wanted: KvWanted,
        copies: Mapping[str, torch.Tensor],
        sent: Mapping[str, Mapping[int, torch.Tensor]],
        generators: Mapping[str, bytes],
    ) -> None:
        try:
            layers = {name: blocks.encode(name, wanted, copy, sent.get(name, {})) for name, copy in copies.items()}
            layouts = {name: blocks.layout(name) for name in layers}
            parts = [_part(wanted, layouts, layers, group) for group in _grouped(layers)]
            if generators:
                parts[-1] = replace(parts[-1], generators=generators)
            self._send_parts(parts)
        except (ThawError, OSError) as e:  # stage 0 gives the attempt up when the rest of the round does not come
            _log.event("kv_not_sent", attempt=wanted.attempt, round=wanted.round, reason=str(e))

    def _send_parts(self, parts: Sequence[KvPart]) -> None:
        for part in parts:
            self._link.send_kv_part(part)

    def _generators(self) -> dict[str, bytes]:
        return {
            name: state.generator.get_state().numpy().tobytes()
            for name, state in self._runner.requests.items()
            if state.generator is not None
        }


def _part(
    wanted: KvWanted, layouts: Mapping[str, str], layers: Mapping[str, memoryview], group: Sequence[str]
) -> KvPart:
    of_group = {name: layouts[name] for name in group}
    return KvPart(wanted.attempt, wanted.round, wanted.blocks, of_group, {name: layers[name] for name in group})


def _grouped(layers: Mapping[str, memoryview]) -> Iterator[list[str]]:
    """The layers of each part: as many as fit, and at least one."""
    group, n_bytes = list[str](), 0
    for name, data in layers.items():
        if group and n_bytes + len(data) > PART_BYTES:
            yield group
            group, n_bytes = [], 0
        group.append(name)
        n_bytes += len(data)
    if group:
        yield group
