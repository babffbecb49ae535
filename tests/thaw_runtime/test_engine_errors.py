"""Whose fault it is when vLLM does not start."""

from __future__ import annotations

import pytest

from thaw.errors import DeveloperError, InitFailed, ModelUnsupported, PlatformError
from thaw_runtime.engine_errors import translated

NO_ROOM = (
    "Available memory on node 0 (1.53/2.0 GiB) on kv cache allocation is less than requested memory for kv (1.59 GiB). "
    "Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes."
)


@pytest.mark.parametrize("error", [ValueError(NO_ROOM), MemoryError(), RuntimeError("CUDA out of memory")], ids=repr)
def test_memory_that_the_host_had_promised_and_has_not_is_no_fault_of_the_function(error: Exception) -> None:
    said = translated(error)
    assert type(said) is PlatformError
    assert not isinstance(said, DeveloperError)
    assert "THAW_MEMORY_MB" in said.hint


def test_what_the_engine_cannot_do_and_what_it_does_not_take_are_the_functions_fault() -> None:
    assert isinstance(translated(ValueError("fp9 is not supported")), ModelUnsupported)
    assert isinstance(translated(TypeError("unexpected keyword")), InitFailed)
