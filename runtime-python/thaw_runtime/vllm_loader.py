"""vLLM takes its weights from a segment while they arrive, and its KV cache from memory nobody has touched yet.

One of the two files that import vLLM.  Extension points used: ``register_model_loader`` for the weights,
``worker_cls`` for the KV allocation, an Executor subclass for what happens between forward pass and sampling.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
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
from thaw_runtime.packing import Finisher, Kinds, Rehearsal
from thaw_runtime.start_trace import StartTrace

LOAD_FORMAT = "thaw_segment"
_Tensors = Iterator[tuple[str, torch.Tensor]]
_KINDS = Kinds(UnquantizedLinearMethod, UnquantizedEmbeddingMethod, ParallelLMHead, set_default_torch_dtype)
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
    finisher = Finisher(model, [t.name for t in segment.offer.tensors], _KINDS)
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
