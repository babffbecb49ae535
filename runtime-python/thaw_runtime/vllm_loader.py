"""vLLM takes its weights from a segment while they arrive, and its KV cache from memory nobody has touched yet.

One of the two files that import vLLM.  Extension points used: ``register_model_loader`` for the weights,
``worker_cls`` for the KV allocation, an Executor subclass for what happens between forward pass and sampling.
"""

from __future__ import annotations

import math
import mmap
import re
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform
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


# ── weights ───────────────────────────────────────────────────────────────────────────────────────────────────────


def arriving_tensors(segment: Segment, waited: list[float], finisher: Finisher | None = None) -> _Tensors:
    """Every tensor of the segment in load order, each as soon as its last byte is below the watermark.

    Views, not copies: valid while the segment is.  The seconds slept are added to ``waited[0]``.
    """
    for info in segment.offer.tensors:
        offset = segment.locate(info.file, info.offset)
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
        self._modules: dict[str, list[Any]] = {}
        self._left: dict[str, int] = {}
        self._taken: dict[str, list[weakref.ref[torch.Tensor]]] = {}
        self._finished: list[tuple[Any, Any]] = []
        tied = not any(name.startswith("lm_head.") for name in names)
        groups = {_group(name) for name in names}
        for path, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            whole = type(method) is UnquantizedEmbeddingMethod and tied and path in groups
            if type(method) is UnquantizedLinearMethod or whole:
                self._modules.setdefault(_group(path + "."), []).append(module)
        for name in names:
            self._left[_group(name)] = self._left.get(_group(name), 0) + 1

    def handing_out(self, name: str, tensor: torch.Tensor) -> None:
        group = _group(name)
        self._left[group] -= 1
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
        for module, method in self._finished:
            module.quant_method = method


def _group(name: str) -> str:
    """A layer (``model.layers.3``), or for a tensor outside the layers its module (``model.embed_tokens``)."""
    layer = _LAYER.match(name)
    return layer[1] if layer else name.rpartition(".")[0]


@register_model_loader(LOAD_FORMAT)
class SegmentLoader(BaseModelLoader):
    """Copies (and fuses) each tensor into the model's parameters while the next ones arrive."""

    _finisher: Finisher | None = None

    def download_model(self, model_config: Any) -> None:
        """Nothing to do: the bytes come to us."""

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        with _start().trace.phase(Phase.MODEL_BEGIN):
            model: torch.nn.Module = super().create_model(vllm_config, model_config, prefix)
            return model

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        start = _start()
        tensors = start.segment.offer.tensors
        if current_platform.is_cpu() and model_config.quantization is None:
            self._finisher = Finisher(model, [t.name for t in tensors])
        waited = [0.0]
        with start.trace.phase(Phase.LOAD_BEGIN) as notes, warnings.catch_warnings():
            # the views are read-only on purpose; nothing writes through them
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            cpu, parameters = time.thread_time(), {name for name, _ in model.named_parameters()}
            loaded = model.load_weights(arriving_tensors(start.segment, waited, self._finisher))
            notes.n_bytes = sum(t.n_bytes for t in tensors)
            notes.attrs |= {"wait_s": round(waited[0], 4), "cpu_s": round(time.thread_time() - cpu, 4),
                            "waits_for": "fetch"}  # fmt: skip
        start.trace.mark(Phase.ENGINE_BEGIN)
        _check_complete(parameters, model_config, loaded)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        model: torch.nn.Module = super().load_model(vllm_config, model_config, prefix)
        if self._finisher is not None:
            self._finisher.restore()
        return model


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

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        with _start().trace.phase(Phase.KV_BEGIN) as notes:
            super().initialize_from_config(kv_cache_configs)
            notes.n_bytes = sum(t.size for c in kv_cache_configs for t in c.kv_cache_tensors[:1])

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
