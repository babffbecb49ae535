"""What vLLM raises while an engine starts, as one of our errors."""

from __future__ import annotations

from thaw.errors import InitFailed, ModelUnsupported, PlatformError, ThawError


def translated(error: Exception) -> ThawError:
    """The memory plan has refused what cannot fit (MemoryTooSmall) before vLLM asks for memory.  So memory that is
    missing then is the host's fault and not the function's."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or "memory" in text.lower():
        return PlatformError(
            f"the host has less memory than it promised this start: {text}",
            hint="lower THAW_MEMORY_MB on this host, or free memory there",
        )
    if "not supported" in text or "architecture" in text:
        return ModelUnsupported(text)
    return InitFailed(text)
