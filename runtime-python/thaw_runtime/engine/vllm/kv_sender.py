"""A stage's side of a consolidation: it sends the KV blocks that stage 0 asks for."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

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
"""A part is a message, and a receiver writes it whole: some milliseconds of its receiving thread."""


class KvSender:
    """Copies blocks between two batches, when nothing writes them, and sends the copies on a thread of their own."""

    def __init__(self, link: StageLink, runner: Any, part: StagePart) -> None:
        self._link, self._runner, self._part = link, runner, part
        self._blocks: KvBlocks | None = None  # made when the cache has been allocated

    def send(self, wanted: KvWanted) -> None:
        """Send this stage's part of the blocks.  Raises ProtocolError for blocks that this stage does not have."""
        blocks = self._blocks = self._blocks or KvBlocks(self._runner, vllm.__version__)
        names = blocks.names(self._part.window)
        copies = {name: blocks.gather(name, wanted.blocks) for name in names}
        layouts = {name: blocks.layout(name) for name in names}
        generators = self._generators() if wanted.last and self._part.last else {}
        parts = [
            KvPart(
                wanted.attempt,
                wanted.round,
                wanted.blocks,
                {name: layouts[name] for name in group},
                {name: copies[name] for name in group},
            )
            for group in _grouped(copies)
        ]
        if generators:
            parts[-1] = _with_generators(parts[-1], generators)
        threading.Thread(target=self._send_all, args=(parts,), name="kv-send", daemon=True).start()

    def _send_all(self, parts: Sequence[KvPart]) -> None:
        try:
            for part in parts:
                self._link.send_kv_part(part)
        except (ThawError, OSError) as e:  # stage 0 gives the attempt up when the rest of the round does not come
            _log.event("kv_not_sent", attempt=parts[0].attempt, round=parts[0].round, reason=str(e))

    def _generators(self) -> dict[str, bytes]:
        return {
            name: state.generator.get_state().numpy().tobytes()
            for name, state in self._runner.requests.items()
            if state.generator is not None
        }


def _with_generators(part: KvPart, generators: dict[str, bytes]) -> KvPart:
    return KvPart(part.attempt, part.round, part.blocks, part.layouts, part.layers, generators)


def _grouped(copies: dict[str, memoryview]) -> Iterator[list[str]]:
    """The layers of each part: as many as fit, and at least one."""
    group, n_bytes = list[str](), 0
    for name, data in copies.items():
        if group and n_bytes + len(data) > PART_BYTES:
            yield group
            group, n_bytes = [], 0
        group.append(name)
        n_bytes += len(data)
    if group:
        yield group
