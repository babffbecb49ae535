"""The blocks of an engine's KV cache as bytes, layer by layer, for the stage that becomes a whole worker.

This file uses fields of vLLM's runner, but imports no vLLM, so its tests need none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from thaw.checkpoint import layer_of
from thaw.errors import PlatformError, ProtocolError
from thaw_runtime.pipeline.wire import Blocks


class KvBlocks:
    """The KV cache of one engine.

    vLLM names a layer's cache like its attention module, with the same name in every stage.
    """

    def __init__(self, runner: Any, version: str) -> None:
        """``version`` is vLLM's: another one may arrange a block differently.

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
        """What two engines must have in common to read each other's blocks of a layer."""
        cache = self._caches[name]
        shape = "x".join(map(str, cache.shape[1:]))
        return f"vllm {self._version} {cache.device.type} {self._isa[name]} {cache.dtype} {shape}"

    def n_bytes(self, names: Iterable[str], blocks: Blocks) -> int:
        """The bytes of ``blocks`` in these layers."""
        return sum(self._block_bytes(name) * len(blocks[self._group_of[name]]) for name in names)

    def gather(self, name: str, blocks: Blocks) -> memoryview:
        """A copy of a layer's blocks, in host memory.  Raises ProtocolError for other groups than the cache has."""
        picked = self._caches[name][self._ids(name, blocks)]
        return memoryview(picked.to("cpu").contiguous().view(-1).view(torch.uint8).numpy())

    def scatter(self, name: str, blocks: Blocks, data: memoryview, added: Sequence[Sequence[int | None]]) -> None:
        """Write a layer's blocks.

        ``added`` says of each block, in its group's order, how many tokens it has more than what is in its place here;
        None means that something else is there.  Raises ProtocolError unless ``data`` are exactly the blocks' bytes,
        and for a block that does not continue what is here: it is another one.  (A block that was used before may hold
        the same tokens already, so nothing need differ.)
        """
        if name not in self._caches:
            raise ProtocolError(f"KV blocks of {name}, a layer without a cache here")
        ids, cache = self._ids(name, blocks), self._caches[name]
        if len(data) != len(ids) * self._block_bytes(name):
            raise ProtocolError(f"{len(data)} bytes for {len(ids)} KV blocks of {name}")
        if not len(ids):
            return
        came = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(cache.dtype)
        came = came.view(len(ids), *cache.shape[1:]).to(cache.device)
        n_changed = (came != cache[ids]).flatten(1).sum(dim=1).tolist()
        for i, n_tokens in enumerate(added[self._group_of[name]]):
            most = (n_tokens or 0) * cache[0].numel() // self._block_size
            if n_tokens is not None and n_changed[i] > most:
                raise ProtocolError(f"KV block {int(ids[i])} of {name} is not the one that was copied before")
        cache[ids] = came

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
