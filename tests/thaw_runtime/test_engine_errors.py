"""The party at fault when vLLM does not start."""

from __future__ import annotations

import errno

import pytest

from thaw.errors import DeveloperError, InitFailed, MemoryTooSmall, ModelUnsupported, PlatformError
from thaw_runtime.engine.vllm.errors import translated

NO_ROOM = (
    "Available memory on node 0 (1.53/2.0 GiB) on kv cache allocation is less than requested memory for kv (1.59 GiB). "
    "Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes."
)


TORCH = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 2048 bytes. Error code 12"
NO_GPU_ROOM = "Free memory on device cuda:0 (1.2/80.0 GiB) on startup is less than desired GPU memory utilization"


@pytest.mark.parametrize(
    "error",
    [
        ValueError(NO_ROOM),
        ValueError(NO_GPU_ROOM),
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError(TORCH),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=repr,
)
def test_memory_that_the_host_had_promised_and_has_not_is_no_fault_of_the_function(error: Exception) -> None:
    said = translated(error)
    assert type(said) is PlatformError
    assert not isinstance(said, DeveloperError)
    assert "THAW_MEMORY_MB" in said.hint


def test_what_the_engine_cannot_do_and_what_it_does_not_take_are_the_functions_fault() -> None:
    assert isinstance(translated(ValueError("fp9 is not supported")), ModelUnsupported)
    assert isinstance(translated(TypeError("unexpected keyword")), InitFailed)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("Model architectures ['MemoryMambaForCausalLM'] are not supported for now."), ModelUnsupported),
        (ValueError("Unknown option swap_space: it is not a memory option"), InitFailed),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "/models/long-memory-7b/config.json"),
            InitFailed,
        ),
        (
            ValueError("(2.0 GiB KV cache is needed, which is larger than the available KV cache memory (1.0 GiB)"),
            MemoryTooSmall,
        ),
    ],
    ids=repr,
)
def test_a_mistake_of_the_function_stays_its_own_whatever_words_it_has(
    error: Exception, kind: type[DeveloperError]
) -> None:
    said = translated(error)
    assert type(said) is kind
    assert isinstance(said, DeveloperError)
