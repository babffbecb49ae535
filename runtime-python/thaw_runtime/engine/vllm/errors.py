"""What vLLM raises while an engine starts, as one of our errors."""

from __future__ import annotations

import errno
import re
from typing import Final

from thaw.errors import InitFailed, MemoryTooSmall, ModelUnsupported, PlatformError, ThawError

_NO_MEMORY: Final = re.compile(
    r"out of memory|(can.?t|cannot|could not) allocate memory"  # CUDA's driver, torch's allocators, the kernel
    r"|^(available|free) memory on (node|device) ",  # vLLM, which looks at the machine before it takes its part
    re.IGNORECASE,
)
"""How it is said that memory is missing.  The word alone says nothing: a model's name or an option may hold it."""
_GRANT_TOO_SMALL: Final = re.compile(
    r"^No available memory for the cache blocks|larger than the available KV cache memory"
)
"""What vLLM says of the part that the plan gave it, whatever else the host has."""


def translated(error: Exception) -> ThawError:
    """Before vLLM takes any memory, the memory plan refuses a function that needs more than it asked for.  So memory
    that is missing later is missing on the host, which had promised it."""
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
