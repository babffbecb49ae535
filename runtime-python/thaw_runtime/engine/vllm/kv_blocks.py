"""The blocks of an engine's KV cache as bytes, layer by layer, for the stage that becomes a whole worker.

This file uses fields of vLLM's runner, but imports no vLLM, so its tests need none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from thaw.checkpoints.checkpoint import layer_of
from thaw.errors import PlatformError, ProtocolError
from thaw_runtime.pipeline.wire import Blocks, KvWanted

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type by the size of an element: NaN is not equal to itself, but its bits are."""


class KvBlocks:
    """The KV cache of one engine.

    vLLM names a layer's cache like its attention module, with the same name in every stage.
    """

    def __init__(self, runner: Any, version: str) -> None:
        """``version`` is vLLM's version: another version may arrange a block differently.

        Raises PlatformError for a cache in which a block is not one piece.
        """
        n_blocks = runner.vllm_config.cache_config.num_gpu_blocks
        context = runner.compilation_config.static_forward_context
        self._version = version
        self._group_of: dict[str, int] = {}
        self._caches: dict[str, torch.Tensor] = {}
        self._isa: dict[str, str] = {}
        for g, group in enumerate(runner.kv_cache_config.kv_cache_groups):
            for name in group.layer_names:
                cache = context[name].kv_cache
                if cache.shape[0] % n_blocks:
                    raise PlatformError(
                        f"the KV cache of {name} has the shape {tuple(cache.shape)}, not {n_blocks} blocks"
                    )
                self._group_of[name] = g
                # the kernels' blocks may be smaller than those of the block tables
                self._caches[name] = cache.unflatten(0, (n_blocks, cache.shape[0] // n_blocks))
                self._isa[name] = str(getattr(context[name], "isa", ""))
        self._block_size = runner.vllm_config.cache_config.block_size
        self.n_groups = len(runner.kv_cache_config.kv_cache_groups)

    def names(self, layers: tuple[int, int]) -> tuple[str, ...]:
        """The names of the caches of layers ``[a, b)``."""
        a, b = layers
        return tuple(name for name in self._caches if (k := layer_of(name + ".")) is not None and a <= k < b)

    def layout(self, name: str) -> str:
        """Return the properties that two engines must share to read each other's blocks of a layer."""
        cache = self._caches[name]
        shape = "x".join(map(str, cache.shape[1:]))
        return f"vllm {self._version} {cache.device.type} {self._isa[name]} {cache.dtype} {shape}"

    def n_bytes(self, names: Iterable[str], blocks: Blocks) -> int:
        """The bytes of ``blocks`` in these layers."""
        return sum(self._block_bytes(name) * len(blocks[self._group_of[name]]) for name in names)

    def gather(self, name: str, blocks: Blocks) -> torch.Tensor:
        """A copy of a layer's blocks in host memory, (blocks, elements).

        The elements are integers, so that equal bits are equal.  Raises ProtocolError if the groups are not those of
        the cache.
        """
        if len(blocks) != self.n_groups:
            raise ProtocolError(f"KV blocks of {len(blocks)} groups; this stage has {self.n_groups}")
        return self._gather(name, blocks[self._group_of[name]])

    def by_block(self, name: str, wanted: KvWanted, copy: torch.Tensor) -> dict[int, torch.Tensor]:
        """The elements of each block in a copy from ``gather``."""
        return dict(zip(wanted.blocks[self._group_of[name]], copy, strict=True))

    def encode(self, name: str, wanted: KvWanted, copy: torch.Tensor, sent: Mapping[int, torch.Tensor]) -> memoryview:
        """The bytes of a layer for a KvPart.

        ``copy`` is from ``gather``; ``sent`` has the elements of each block that the round before sent.  Raises
        ProtocolError for a known block that was not sent.
        """
        group = self._group_of[name]
        ids, known = wanted.blocks[group], wanted.known[group]
        if not set(known) <= sent.keys():
            raise ProtocolError(f"stage 0 knows KV blocks of {name} that this stage has not sent")
        rows = {block: i for i, block in enumerate(ids)}
        new = copy[[rows[block] for block in ids if block not in set(known)]]
        parts = [new.numpy().tobytes()]
        if known:
            now, before = copy[[rows[block] for block in known]], torch.stack([sent[block] for block in known])
            changed = now != before
            parts += [np.packbits(changed.numpy()).tobytes(), now[changed].numpy().tobytes()]
        return memoryview(b"".join(parts))

    def scatter(self, name: str, wanted: KvWanted, data: memoryview, added: Sequence[Mapping[int, int]]) -> None:
        """Write a layer's blocks, as ``encode`` made them.

        ``added`` says for each known block, by group, how many tokens it has gained since the copy here.  Raises
        ProtocolError unless ``data`` are exactly the blocks' bytes, and for a known block in which more has changed
        than these tokens, because it is a different block.
        """
        if name not in self._caches:
            raise ProtocolError(f"KV blocks of {name}, a layer without a cache here")
        group, cache = self._group_of[name], self._caches[name]
        known = wanted.known[group]
        new = [block for block in wanted.blocks[group] if block not in set(known)]
        n_new, n_bits = len(new) * self._block_bytes(name), len(known) * cache[0].numel()
        if len(data) < n_new + -(-n_bits // 8):
            raise ProtocolError(f"{len(data)} bytes for {len(new)} new and {len(known)} known KV blocks of {name}")
        if new:
            self._write(name, new, _elements(data[:n_new], cache))
        if known or len(data) != n_new:
            self._change(name, known, data[n_new:], added[group])

    def _change(self, name: str, known: Sequence[int], data: memoryview, added: Mapping[int, int]) -> None:
        """Write the changed elements of known blocks."""
        cache = self._caches[name]
        n_bits = len(known) * cache[0].numel()
        n_mask = -(-n_bits // 8)
        mask = np.unpackbits(np.frombuffer(data[:n_mask], np.uint8), count=n_bits).astype(bool)
        mask = mask.reshape(len(known), cache[0].numel())
        if len(data) != n_mask + int(mask.sum()) * cache.element_size():
            raise ProtocolError(f"{len(data)} bytes for the changes of {len(known)} KV blocks of {name}")
        for block, n_changed in zip(known, mask.sum(axis=1).tolist(), strict=True):
            if n_changed > added[block] * cache[0].numel() // self._block_size:
                raise ProtocolError(f"KV block {block} of {name} is not the one that was copied before")
        if len(known):
            blocks = self._gather(name, known)
            blocks[torch.from_numpy(mask)] = _elements(data[n_mask:], cache)
            self._write(name, known, blocks.flatten())

    def _gather(self, name: str, ids: Sequence[int]) -> torch.Tensor:
        picked = self._caches[name][torch.tensor(ids, dtype=torch.int64)]
        return picked.to("cpu").contiguous().flatten(1).view(_INTEGERS[picked.element_size()])

    def _write(self, name: str, ids: Sequence[int], elements: torch.Tensor) -> None:
        cache = self._caches[name]
        blocks = elements.view(cache.dtype).view(len(ids), *cache.shape[1:])
        cache[torch.tensor(ids, dtype=torch.int64)] = blocks.to(cache.device)

    def copy(self, blocks: Blocks, others: Blocks) -> None:
        """Write the contents of some blocks into others, in every layer."""
        for name, cache in self._caches.items():
            cache[self._ids(name, others)] = cache[self._ids(name, blocks)]

    def difference(self, name: str, blocks: Blocks, others: Blocks) -> float:
        """The largest difference between two blocks of a layer at the same place, through the norm of the first."""
        cache = self._caches[name]
        ours, theirs = (cache[self._ids(name, ids)].flatten(1).float() for ids in (blocks, others))
        return float(((ours - theirs).norm(dim=1) / ours.norm(dim=1)).max())

    def _ids(self, name: str, blocks: Blocks) -> torch.Tensor:
        if len(blocks) != self.n_groups:
            raise ProtocolError(f"KV blocks of {len(blocks)} groups; this stage has {self.n_groups}")
        ids: Sequence[int] = blocks[self._group_of[name]]
        return torch.tensor(ids, dtype=torch.int64)

    def _block_bytes(self, name: str) -> int:
        cache = self._caches[name]
        return cache[0].numel() * cache.element_size()


def _elements(data: memoryview, cache: torch.Tensor) -> torch.Tensor:
    """Bytes that came as elements of a cache.  Copies them, because what was received is read-only."""
    dtype = _INTEGERS[cache.element_size()]
    return torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
