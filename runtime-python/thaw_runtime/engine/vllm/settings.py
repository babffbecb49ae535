"""What an operator, or a test, may set for every engine of a host.  A container reads it once, when it begins.

The container's image sets the variables; without containers, the host's invoker passes its own on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from thaw.settings import SettingError, load, setting

CPU_CEILING: Final = "THAW_CPU_CEILING"
LOGITS_NOISE: Final = "THAW_LOGITS_NOISE"
SHARED_PREFIXES: Final = "THAW_SHARED_PREFIXES"
CEILINGS: Final = ("avx2", "avx512", "avx512_bf16")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    cpu_ceiling: str = setting(
        CPU_CEILING,
        "the newest instructions of x86 that engines may use on a CPU: avx2, avx512 or avx512_bf16; empty: all. "
        "Hosts with different processors and one ceiling compute with the same kernels. A container's image sets it; "
        "without containers, the invoker",
        "",
    )
    logits_noise: int | None = setting(
        LOGITS_NOISE,
        "for tests: the seed of noise on logits, as large as the rounding of the model's type; empty: none",
        None,
    )
    shared_prefixes: bool = setting(
        SHARED_PREFIXES,
        "callers of a model in a shared package find in the prefix cache what other namespaces have asked, too: they "
        "wait less, and may learn by the time that a prompt takes whether somebody has sent it. A container's image "
        "sets it; without containers, the invoker",
        False,
    )


def cache_salt_of(wanted: str) -> str | None:
    """Return the salt that a request's prompt gets in the prefix cache, as vLLM takes it."""
    return None if not wanted or engine_settings().shared_prefixes else wanted


def engine_settings() -> EngineSettings:
    """Read the environment.  Raises SettingError for a ceiling that does not exist."""
    settings = load(EngineSettings)
    if settings.cpu_ceiling not in ("", *CEILINGS):
        raise SettingError(
            f"{CPU_CEILING}={settings.cpu_ceiling!r} is not a ceiling", hint=f"set it to one of: {', '.join(CEILINGS)}"
        )
    return settings
