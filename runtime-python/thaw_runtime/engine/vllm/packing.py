"""What is done to a model while its weights are still on their way: layers are packed, and one batch is rehearsed.

Only for a CPU and unquantised weights; see SegmentLoader, which says what vLLM calls the things named here.
"""

from __future__ import annotations

import ctypes
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from thaw_runtime.process.thread_accounts import OtherThreads
from thaw_runtime.weights.segment import Segment

_LAYER = re.compile(r"\A(.*?\.\d+)\.")

Aside = Sequence[tuple[Any, Any]]
"""Modules without a quant_method, which the engine's packing therefore passes over, and the one of each."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """The engine's classes that packing tells apart; given by the adapter, so that this file imports no engine."""

    linear: type[Any]  # the quant_method of a plain linear layer
    embedding: type[Any]  # and of an embedding or a head
    head: type[Any]  # the module that turns hidden states into logits
    default_dtype: Callable[[torch.dtype], AbstractContextManager[None]]


class Finisher:
    """Packs a layer's weights for the CPU kernels while the next layer's bytes are still on their way.

    vLLM does this for the whole model after the last byte.  A layer is finished once all its tensors were taken *and
    let go of* by the model: one that collects tensors before it copies them is left to vLLM's own pass.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        names: Sequence[str],
        kinds: Kinds,
        kernels: OtherThreads,
        computes: Callable[[str], bool] | None = None,
    ) -> None:
        """Packs the modules by whose path ``computes`` says so; the others are put ``aside``, for :func:`pack`."""
        self._model, self.kinds, self.kernels = model, kinds, kernels
        self.aside = _put_aside(model, computes) if computes is not None else []
        self._modules: dict[str, list[Any]] = {}
        self._left: dict[str, int] = {}
        self._taken: dict[str, list[weakref.ref[torch.Tensor]]] = {}
        self._finished: list[tuple[Any, Any]] = []
        self._spared = _spare_embeddings(model, kinds)
        groups = {_group(name) for name in names}
        arriving = {id(m.weight): path for path, m in model.named_modules() if path in groups and hasattr(m, "weight")}
        for path, module in model.named_modules():
            kind = type(getattr(module, "quant_method", None))
            if kind is kinds.linear:
                self._modules.setdefault(_group(path + "."), []).append(module)
            elif kind is kinds.embedding and id(module.weight) in arriving:  # a tied head with the embedding
                self._modules.setdefault(arriving[id(module.weight)], []).append(module)
        for name in names:
            self._left[_group(name)] = self._left.get(_group(name), 0) + 1
        self._untouched = set(self._left)

    def handing_out(self, name: str, tensor: torch.Tensor) -> None:
        group = _group(name)
        self._left[group] -= 1
        self._untouched.discard(group)
        self._taken.setdefault(group, []).append(weakref.ref(tensor))

    def finish_complete(self) -> None:
        """The model has come back for its next tensor."""
        for group in [g for g in self._taken if self._left[g] == 0]:
            if any(ref() is not None for ref in self._taken[group]):
                continue  # the last one is still in the model's hand; or it collects them
            del self._taken[group]
            self._finish(group)

    def _finish(self, group: str) -> None:
        for module in self._modules.get(group, ()):
            method = module.quant_method
            with self.kernels.counted():
                method.process_weights_after_loading(module)
            module.quant_method = None  # vLLM's own pass skips what has no method
            self._finished.append((module, method))

    def restore(self) -> None:
        for module, method in (*self._finished, *self._spared):
            module.quant_method = method

    def playable(self) -> bool:
        """Some layer is finished and each of the others has either been filled or not been begun."""
        return bool(self._finished) and all(n == 0 or group in self._untouched for group, n in self._left.items())

    @contextmanager
    def played(self) -> Iterator[None]:
        """While the block runs, the model computes: what has not arrived counts as zeros and is multiplied plainly.

        Zeros, because what the memory held before might be NaN, and the batch leaves its keys and values in the cache.
        """
        for name, parameter in self._model.named_parameters():
            if _group(name) in self._untouched:
                parameter.data.zero_()
        plain = [m for m in self._model.modules() if getattr(m, "weight", None) is not None
                 and getattr(m, "quant_method", None) is not None and not hasattr(m, "cpu_linear")]  # fmt: skip
        for module in plain:
            module.cpu_linear = torch.nn.functional.linear
        self.restore()
        try:
            yield
        finally:
            for module, _ in (*self._finished, *self._spared):
                module.quant_method = None
            for module in plain:
                del module.cpu_linear


class Rehearsal:
    """One batch through the engine while the weights arrive, so that the first request finds everything used before.

    The first step of a process costs more than a later one: lazy imports and initialisations on its path, kernels
    generated for the shapes, pages of the libraries and of the heap.  It is held when the rest of the bytes takes
    longer than it does; else it would delay what it is for.
    """

    MIN_LEFT_S = 0.8  # it takes 0.1–0.3 s, on a busy host more

    def __init__(self, segment: Segment, end: int, finisher: Finisher, run: Callable[[], None]) -> None:
        """``end`` is where in the segment this stage's weights end."""
        self._segment = segment
        self._end = end
        self._finisher = finisher
        self._run = run
        self._held = False
        self._first = segment.wait(0, 0.0)
        self._began = time.monotonic()
        self.took_s = 0.0

    def hold_if_due(self) -> None:
        if self._held or not self._finisher.playable() or self._left_s() < self.MIN_LEFT_S:
            return
        self._held = True
        began = time.monotonic()
        kinds, kernels = self._finisher.kinds, self._finisher.kernels
        with self._finisher.played(), kinds.default_dtype(torch.float32), kernels.counted_over_many():
            self._run()
        self.took_s = time.monotonic() - began

    def _left_s(self) -> float:
        """Until the last byte, at the rate so far."""
        have = self._segment.wait(0, 0.0)
        arrived, elapsed = have - self._first, time.monotonic() - self._began
        return max(0, self._end - have) * elapsed / arrived if arrived else 0.0


def give_back_freed() -> None:
    """Packing replaces every weight by another of its size; the heap keeps a fifth of the model in what was freed.

    Takes some 7 ms, so it is called when the first request is already on its way and not before.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def _spare_embeddings(model: torch.nn.Module, kinds: Kinds) -> list[tuple[Any, Any]]:
    """Keep vLLM from packing the input embedding too where a head does the multiplying: it holds all of it again."""
    if not _has_head(model, kinds):
        return []
    spared = [(m, m.quant_method) for m in model.modules() if _only_looked_up(m, kinds)]
    for module, _ in spared:
        module.cpu_linear = torch.nn.functional.linear
        module.quant_method = None
    return spared


def _put_aside(model: torch.nn.Module, computes: Callable[[str], bool]) -> list[tuple[Any, Any]]:
    aside = [(m, m.quant_method) for path, m in model.named_modules()
             if getattr(m, "quant_method", None) is not None and not computes(path)]  # fmt: skip
    for module, _ in aside:
        module.quant_method = None
    return aside


def pack(model: torch.nn.Module, aside: Aside, kinds: Kinds) -> None:
    """What a Finisher has put aside, now that its weights are there.  The modules compute nothing meanwhile."""
    headed = _has_head(model, kinds)
    for module, method in aside:
        module.quant_method = method
        if headed and _only_looked_up(module, kinds):
            module.cpu_linear = torch.nn.functional.linear
        else:
            method.process_weights_after_loading(module)


def _has_head(model: torch.nn.Module, kinds: Kinds) -> bool:
    return any(type(m) is kinds.head for m in model.modules())


def _only_looked_up(module: Any, kinds: Kinds) -> bool:
    """An embedding that, where there is a head, nothing is multiplied by."""
    return type(module) is not kinds.head and type(getattr(module, "quant_method", None)) is kinds.embedding


def _group(name: str) -> str:
    """A layer (``model.layers.3``), or for a tensor outside the layers its module (``model.embed_tokens``)."""
    layer = _LAYER.match(name)
    return layer[1] if layer else name.rpartition(".")[0]
