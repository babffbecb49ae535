"""Translates what vLLM raises while an engine starts into Thaw's errors."""

from __future__ import annotations

import errno
import re
from typing import Final

from thaw.errors import InitFailed, MemoryTooSmall, ModelUnsupported, PlatformError, ThawError

_NO_MEMORY: Final = re.compile(
    r"out of memory|(can.?t|cannot|could not) allocate memory"  # CUDA's driver, torch's allocators, the kernel
    r"|^(available|free) memory on (node|device) ",  # vLLM, which checks the machine before it takes its part
    re.IGNORECASE,
)
"""Sentences that say that memory is missing.  The word "memory" alone proves nothing: a model's name or an option may
contain it."""
_GRANT_TOO_SMALL: Final = re.compile(
    r"^No available memory for the cache blocks|larger than the available KV cache memory"
)
"""vLLM's message when the plan gave it too little memory, even if the host has more."""


def translated(error: Exception) -> ThawError:
    """The error of a start.  Memory that is missing now is missing on the host, which had promised it: before vLLM
    takes any, the memory plan refuses a function that needs more than it asked for."""
    text = f"{type(error).__name__}: {error}"
    if _is_memory_missing(error):
        return PlatformError(
            f"the host has less memory than it promised this start: {text}",
            hint="lower THAW_MEMORY_MB on this host, or free memory there",
        )
    if _GRANT_TOO_SMALL.search(str(error)):
        return MemoryTooSmall(text)
    if "not supported" in text or "architecture" in text:
        return ModelUnsupported(text)
    return InitFailed(text)


def _is_memory_missing(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None
