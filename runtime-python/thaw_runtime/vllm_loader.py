"""vLLM takes its weights from a segment while they arrive, and its KV cache from memory nobody has touched yet.

One of the two files that import vLLM.  Extension points used: ``register_model_loader`` for the weights,
``worker_cls`` for the KV allocation, an Executor subclass for what happens between forward pass and sampling.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import re
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker.cpu_worker import CPUWorker

from thaw.errors import ModelCorrupt, ModelUnsupported
from thaw.model import TensorInfo
from thaw.trace import Phase
from thaw_runtime.engine import ARRIVAL_DEADLINE_S, Segment
from thaw_runtime.start_trace import StartTrace

LOAD_FORMAT = "thaw_segment"
_Tensors = Iterator[tuple[str, torch.Tensor]]
CPU_WORKER = "thaw_runtime.vllm_loader.LazyKvCpuWorker"

_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(slots=True)
class _Start:
    """What the classes vLLM instantiates itself need to know.  One engine a process, so one at a time."""

    segment: Segment
    trace: StartTrace
    load: Callable[[Callable[[], None]], None] | None = None  # set by a loader that left the weights for later


_current: _Start | None = None


@contextmanager
def starting_from(segment: Segment, trace: StartTrace) -> Iterator[None]:
    """While the block runs, the loader reads ``segment`` and writes its phases to ``trace``."""
    global _current
    _current = _Start(segment, trace)
    try:
        yield
    finally:
        _current = None


def _start() -> _Start:
    if _current is None:
        raise RuntimeError("the segment loader runs inside starting_from() only")
    return _current


def load_postponed(rehearse: Callable[[], None]) -> None:
    """Fill the model that the engine was built around.  ``rehearse`` runs a batch; see Rehearsal."""
    load = _start().load
    if load is not None:
        load(rehearse)


# ── weights ───────────────────────────────────────────────────────────────────────────────────────────────────────


def arriving_tensors(
    segment: Segment, waited: list[float], finisher: Finisher | None = None, rehearsal: Rehearsal | None = None
) -> _Tensors:
    """Every tensor of the segment in load order, each as soon as its last byte is below the watermark.

    Views, not copies: valid while the segment is.  The seconds slept are added to ``waited[0]``.
    """
    for info in segment.offer.tensors:
        offset = segment.locate(info.file, info.offset)
        if rehearsal is not None:
            rehearsal.hold_if_due()
        began = time.perf_counter()
        segment.wait(offset + info.n_bytes, ARRIVAL_DEADLINE_S)
        waited[0] += time.perf_counter() - began
        tensor = _as_tensor(info, segment.view(offset, info.n_bytes))
        if finisher is not None:
            finisher.handing_out(info.name, tensor)
        yield info.name, tensor
        del tensor  # ours must not be the reference that looks like a consumer's
        if finisher is not None:
            finisher.finish_complete()


def _as_tensor(info: TensorInfo, view: memoryview) -> torch.Tensor:
    if info.dtype not in _DTYPES:
        raise ModelUnsupported(f"tensor {info.name} has dtype {info.dtype}, which the engine does not have")
    dtype = _DTYPES[info.dtype]
    count = math.prod(info.shape)
    if count * dtype.itemsize != info.n_bytes:
        raise ModelCorrupt(f"tensor {info.name}: shape {list(info.shape)} of {info.dtype} is not {info.n_bytes} bytes")
    if count == 0:
        return torch.empty(info.shape, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype).view(info.shape)


_LAYER = re.compile(r"\A(.*?\.\d+)\.")


class Finisher:
    """Packs a layer's weights for the CPU kernels while the next layer's bytes are still on their way.

    vLLM does this for the whole model after the last byte.  A layer is finished once all its tensors were taken *and
    let go of* by the model: one that collects tensors before it copies them is left to vLLM's own pass.
    """

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        self._model = model
        self._modules: dict[str, list[Any]] = {}
        self._left: dict[str, int] = {}
        self._taken: dict[str, list[weakref.ref[torch.Tensor]]] = {}
        self._finished: list[tuple[Any, Any]] = []
        self._spared = _spare_embeddings(model)
        groups = {_group(name) for name in names}
        arriving = {id(m.weight): path for path, m in model.named_modules() if path in groups and hasattr(m, "weight")}
        for path, module in model.named_modules():
            kind = type(getattr(module, "quant_method", None))
            if kind is UnquantizedLinearMethod:
                self._modules.setdefault(_group(path + "."), []).append(module)
            elif kind is UnquantizedEmbeddingMethod and id(module.weight) in arriving:  # a tied head with the embedding
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
            for module in self._modules.get(group, ()):
                method = module.quant_method
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

    def __init__(self, segment: Segment, finisher: Finisher, run: Callable[[], None]) -> None:
        self._segment = segment
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
        with self._finisher.played(), set_default_torch_dtype(torch.float32):
            self._run()
        self.took_s = time.monotonic() - began

    def _left_s(self) -> float:
        """Until the last byte, at the rate so far."""
        have = self._segment.wait(0, 0.0)
        arrived, elapsed = have - self._first, time.monotonic() - self._began
        return (self._segment.n_bytes - have) * elapsed / arrived if arrived else 0.0


def _spare_embeddings(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Keep vLLM from packing the input embedding too where a head does the multiplying: it holds all of it again."""
    modules = list(model.modules())
    if not any(type(m) is ParallelLMHead for m in modules):
        return []
    spared = [(m, m.quant_method) for m in modules if type(m) is not ParallelLMHead
              and type(getattr(m, "quant_method", None)) is UnquantizedEmbeddingMethod]  # fmt: skip
    for module, _ in spared:
        module.cpu_linear = torch.nn.functional.linear
        module.quant_method = None
    return spared


def _group(name: str) -> str:
    """A layer (``model.layers.3``), or for a tensor outside the layers its module (``model.embed_tokens``)."""
    layer = _LAYER.match(name)
    return layer[1] if layer else name.rpartition(".")[0]


@register_model_loader(LOAD_FORMAT)
class SegmentLoader(BaseModelLoader):
    """Copies (and fuses) each tensor into the model's parameters while the next ones arrive.

    On a CPU the engine is first built around the empty model, so that only a layer's packing is left to do after the
    last byte: ``load_model`` returns at once and the weights come with load_postponed.  Otherwise (a GPU, quantised
    weights, whose methods replace parameters) they come before anything else is built, as in vLLM.
    """

    def download_model(self, model_config: Any) -> None:
        """Nothing to do: the bytes come to us."""

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        with _start().trace.phase(Phase.MODEL_BEGIN):
            model: torch.nn.Module = super().create_model(vllm_config, model_config, prefix)
            return model

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        _take_weights(model, model_config, None, None)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        if not current_platform.is_cpu() or model_config.quantization is not None:
            whole: torch.nn.Module = super().load_model(vllm_config, model_config, prefix)
            return whole
        with set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
            model = self.create_model(vllm_config, model_config, prefix)
        _start().load = partial(_load_layer_by_layer, model, model_config)
        return model.eval()


def _load_layer_by_layer(model: torch.nn.Module, model_config: Any, rehearse: Callable[[], None]) -> None:
    segment = _start().segment
    finisher = Finisher(model, [t.name for t in segment.offer.tensors])
    device = torch.device("cpu")
    with set_default_torch_dtype(model_config.dtype), device:
        _take_weights(model, model_config, finisher, Rehearsal(segment, finisher, rehearse))
        process_weights_after_loading(model, model_config, device)
    finisher.restore()


def give_back_freed() -> None:
    """Packing replaces every weight by another of its size; the heap keeps a fifth of the model in what was freed.

    Takes some 7 ms, so it is called when the first request is already on its way and not before.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def _take_weights(
    model: torch.nn.Module, model_config: Any, finisher: Finisher | None, rehearsal: Rehearsal | None
) -> None:
    start = _start()
    waited = [0.0]
    with start.trace.phase(Phase.LOAD_BEGIN) as notes, warnings.catch_warnings():
        # the views are read-only on purpose; nothing writes through them
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        cpu, parameters = time.thread_time(), {name for name, _ in model.named_parameters()}
        loaded = model.load_weights(arriving_tensors(start.segment, waited, finisher, rehearsal))
        notes.n_bytes = sum(t.n_bytes for t in start.segment.offer.tensors)
        notes.attrs |= {"wait_s": round(waited[0], 4), "cpu_s": round(time.thread_time() - cpu, 4),
                        "waits_for": "fetch"}  # fmt: skip
        if rehearsal is not None:
            notes.attrs |= {"rehearsal_s": round(rehearsal.took_s, 4)}
    start.trace.mark(Phase.ENGINE_BEGIN)
    _check_complete(parameters, model_config, loaded)


def _check_complete(parameters: set[str], model_config: Any, loaded: set[str] | None) -> None:
    """A parameter no tensor filled would hold whatever its memory held before."""
    if loaded is None or model_config.quantization is not None:
        return
    missing = sorted(parameters - loaded)
    if missing:
        raise ModelCorrupt(f"the checkpoint lacks {len(missing)} of the model's tensors, first {missing[0]}")


# ── KV cache ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _ZeroOnDemand(TorchFunctionMode):
    """torch.zeros as a private anonymous mapping: the kernel zeroes a page when it is first touched.

    A 1 GiB cache cost 0.8 s of page faults at the start, nearly all for blocks that a short conversation never uses.
    """

    MIN_BYTES = 1 << 20

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = len(args) == 1 and isinstance(args[0], int) and kwargs.get("dtype") is torch.int8
        if func is torch.zeros and plain and args[0] >= self.MIN_BYTES:
            return torch.frombuffer(mmap.mmap(-1, args[0], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.int8)
        return func(*args, **kwargs)


class LazyKvCpuWorker(CPUWorker):
    """vLLM's CPU worker; its KV cache is allocated without being touched."""

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        return _ZeroOnDemand() if tag == "kv_cache" else nullcontext()


# ── between forward pass and sampling ─────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Continuation:
    """A request whose prompt ends with tokens it generated elsewhere."""

    output_so_far: list[int]
    rewound: bool = False  # its generator stands where the uninterrupted run's would


class SegmentExecutor(UniProcExecutor):
    """The in-process executor, with traced phases, and continued requests that sample as if never interrupted."""

    def _init_executor(self) -> None:
        self.continuations: dict[str, Continuation] = {}
        super()._init_executor()
        _start().trace.mark(Phase.KV_BEGIN)  # the engine marks its end, when the scheduler over it stands

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        runner = self.driver_worker.worker.model_runner
        batch = getattr(runner, "input_batch", None)
        if batch is not None and hasattr(batch, "generators"):
            self._keep_discarded_draws(runner, batch)
            for request_id, continuation in self.continuations.items():
                row = batch.req_id_to_index.get(request_id)
                if row is not None:
                    self._continue(batch, row, continuation, runner.requests[request_id].output_token_ids)
        return super().sample_tokens(grammar_output, non_block)

    def _continue(self, batch: Any, row: int, continuation: Continuation, generated_here: list[int]) -> None:
        generator = batch.generators.get(row)
        if generator is not None and not continuation.rewound:
            for _ in continuation.output_so_far:  # one draw a token: vLLM's sampler on the CPU
                torch.randint(0, 2**31, (1,), generator=generator)
        continuation.rewound = True
        penalised = batch.sampling_metadata.output_token_ids
        if penalised:  # penalties look at the whole output, not only at what was generated here
            penalised[row] = [*continuation.output_so_far, *generated_here]

    @staticmethod
    def _keep_discarded_draws(runner: Any, batch: Any) -> None:
        """A prompt's non-final chunk samples too and vLLM rewinds the generator, by a call CPU generators lack."""
        for row in runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0]:
            generator = batch.generators.get(int(row))
            if generator is not None and not isinstance(generator, _Rewindable):
                batch.generators[int(row)] = generator = _Rewindable.of(generator)
                runner.requests[batch.req_ids[int(row)]].generator = generator
            if generator is not None:
                generator.mark()


class _Rewindable(torch.Generator):
    """A CPU generator with the offset calls of a CUDA one: ``set_offset`` goes back to the last ``mark``."""

    @classmethod
    def of(cls, generator: torch.Generator) -> _Rewindable:
        made = cls()
        made.set_state(generator.get_state())
        return made

    def mark(self) -> None:
        self._marked = self.get_state()

    def get_offset(self) -> int:
        return 4  # what one draw costs on CUDA: vLLM subtracts it

    def set_offset(self, offset: int) -> None:
        self.set_state(self._marked)
