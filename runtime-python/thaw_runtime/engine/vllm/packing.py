"""Work on a model while its weights arrive: packs its layers for the CPU's kernels, and rehearses one batch.

Applies to unquantised weights on a CPU only; see SegmentLoader.
"""

from __future__ import annotations

import ctypes
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.utils.torch_utils import set_default_torch_dtype

from thaw_runtime.engine.vllm import linear_on_cpu
from thaw_runtime.process.thread_accounts import OtherThreads
from thaw_runtime.weights.readable_segment import Segment

_LAYER = re.compile(r"\A(.*?\.\d+)\.")

DeferredModules = Sequence[tuple[Any, Any]]
"""Modules that are packed later, each with its quant_method.  They have none meanwhile, so vLLM passes over them."""


class LayerPacker:
    """Packs a layer's weights for the CPU kernels while the next layer's bytes are still on their way.

    vLLM packs the whole model after the last byte.  This class packs a layer once the model has taken all its tensors
    *and let go of them*.  A model that collects tensors before it copies them is left to vLLM's own pass.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        names: Sequence[str],
        kernels: OtherThreads,
        computes: Callable[[str], bool] | None = None,
    ) -> None:
        """``computes`` says by a module's path whether it is packed now; the others are ``deferred``, for pack()."""
        self._model, self.kernels = model, kernels
        self.deferred = _defer(model, computes) if computes is not None else []
        self._modules: dict[str, list[Any]] = {}
        self._left: dict[str, int] = {}
        self._taken: dict[str, list[weakref.ref[torch.Tensor]]] = {}
        self._packed: list[tuple[Any, Any]] = []
        self._spared = _spare_embeddings(model)
        groups = {_group(name) for name in names}
        arriving = {id(m.weight): path for path, m in model.named_modules() if path in groups and hasattr(m, "weight")}
        for path, module in model.named_modules():
            method = type(getattr(module, "quant_method", None))
            if method is UnquantizedLinearMethod:
                self._modules.setdefault(_group(path + "."), []).append(module)
            elif method is UnquantizedEmbeddingMethod and id(module.weight) in arriving:
                # a head whose weights are the embedding's is packed when the embedding has arrived
                self._modules.setdefault(arriving[id(module.weight)], []).append(module)
        for name in names:
            self._left[_group(name)] = self._left.get(_group(name), 0) + 1
        self._untouched = set(self._left)

    def handing_out(self, name: str, tensor: torch.Tensor) -> None:
        group = _group(name)
        self._left[group] -= 1
        self._untouched.discard(group)
        self._taken.setdefault(group, []).append(weakref.ref(tensor))

    def pack_complete(self) -> None:
        """Pack the groups whose tensors have all been used, now that the model asks for its next tensor."""
        for group in [g for g in self._taken if self._left[g] == 0]:
            if any(ref() is not None for ref in self._taken[group]):
                continue  # the model still holds the last tensor, or it collects them
            del self._taken[group]
            self._pack(group)

    def _pack(self, group: str) -> None:
        for module in self._modules.get(group, ()):
            method = module.quant_method
            with self.kernels.counted():
                method.process_weights_after_loading(module)
            module.quant_method = None  # vLLM's own pass skips a module without a method
            self._packed.append((module, method))

    def restore(self) -> None:
        """Give the modules back their quant_method, after vLLM's own pass."""
        for module, method in (*self._packed, *self._spared):
            module.quant_method = method

    def is_computable(self) -> bool:
        """True when some layer is packed, and each of the others is either filled or untouched."""
        return bool(self._packed) and all(n == 0 or group in self._untouched for group, n in self._left.items())

    @contextmanager
    def computable(self) -> Iterator[None]:
        """While the block runs, the model computes: weights that have not arrived are zeros and are not packed.

        They must be zeros, because the memory might have held NaN, and the batch leaves its keys and values in the
        cache.
        """
        for name, parameter in self._model.named_parameters():
            if _group(name) in self._untouched:
                parameter.data.zero_()
        unpacked = [m for m in self._model.modules() if _is_unpacked(m)]
        packed = [module for module, _ in self._packed]
        for module in unpacked:
            module.cpu_linear = linear_on_cpu.product_like(packed, module.weight)
        self.restore()
        try:
            yield
        finally:
            for module, _ in (*self._packed, *self._spared):
                module.quant_method = None
            for module in unpacked:
                del module.cpu_linear


class Rehearsal:
    """One batch through the engine while the weights arrive, so that the first request finds everything used before.

    The first step of a process costs more than a later one: lazy imports and initialisations on its path, kernels
    generated for the shapes, pages of the libraries and of the heap.  The rehearsal takes place only if the remaining
    bytes take longer than it does; otherwise it would delay the first request instead of speeding it up.
    """

    MIN_LEFT_S = 0.8  # a rehearsal takes 0.1–0.3 s, on a busy host or without instructions for bfloat16 up to a second

    def __init__(self, segment: Segment, end: int, packer: LayerPacker, run: Callable[[], None]) -> None:
        """``end`` is the offset in the segment at which this stage's weights end."""
        self._segment = segment
        self._end = end
        self._packer = packer
        self._run = run
        self._held = False
        self._first = segment.wait(0, 0.0)
        self._began = time.monotonic()
        self.took_s = 0.0

    def hold_if_due(self) -> None:
        if self._held or not self._packer.is_computable() or self._left_s() < self.MIN_LEFT_S:
            return
        self._held = True
        began = time.monotonic()
        packer = self._packer
        with packer.computable(), set_default_torch_dtype(torch.float32), packer.kernels.counted_over_many():
            self._run()
        self.took_s = time.monotonic() - began

    def _left_s(self) -> float:
        """Seconds until the last byte arrives, at the rate so far."""
        have = self._segment.wait(0, 0.0)
        arrived, elapsed = have - self._first, time.monotonic() - self._began
        return max(0, self._end - have) * elapsed / arrived if arrived else 0.0


def give_back_freed() -> None:
    """Return freed heap memory to the kernel: packing replaces every weight by another allocation of its size, and the
    heap would keep a fifth of the model in what was freed.

    Takes some 7 ms, so it is called once the first request is already on its way.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def pack(model: torch.nn.Module, deferred: DeferredModules) -> None:
    """Pack the modules that a LayerPacker has deferred, now that their weights are there.  Nothing computes with them
    meanwhile."""
    headed = _has_head(model) or getattr(model, "is_pooling_model", False)
    for module, method in deferred:
        module.quant_method = method
        if headed and _is_only_looked_up(module):
            module.cpu_linear = torch.nn.functional.linear
        else:
            method.process_weights_after_loading(module)


def _defer(model: torch.nn.Module, computes: Callable[[str], bool]) -> list[tuple[Any, Any]]:
    deferred = [
        (m, m.quant_method)
        for path, m in model.named_modules()
        if getattr(m, "quant_method", None) is not None and not computes(path)
    ]
    for module, _ in deferred:
        module.quant_method = None
    return deferred


def _spare_embeddings(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Keep vLLM from packing an input embedding that is not multiplied: the packed copy would hold all of it again."""
    if not (_has_head(model) or getattr(model, "is_pooling_model", False)):
        return []
    spared = [(m, m.quant_method) for m in model.modules() if _is_only_looked_up(m)]
    for module, _ in spared:
        module.cpu_linear = torch.nn.functional.linear
        module.quant_method = None
    return spared


def _is_unpacked(module: Any) -> bool:
    has_weight = getattr(module, "weight", None) is not None
    return has_weight and getattr(module, "quant_method", None) is not None and not hasattr(module, "cpu_linear")


def _has_head(model: torch.nn.Module) -> bool:
    return any(type(m) is ParallelLMHead for m in model.modules())


def _is_only_looked_up(module: Any) -> bool:
    """True for an embedding by which nothing is multiplied, if the model has a head."""
    method = getattr(module, "quant_method", None)
    return type(module) is not ParallelLMHead and type(method) is UnquantizedEmbeddingMethod


def _group(name: str) -> str:
    """The layer of a tensor (``model.layers.3``), or for a tensor outside the layers its module
    (``model.embed_tokens``).
    """
    layer = _LAYER.match(name)
    return layer[1] if layer else name.rpartition(".")[0]
