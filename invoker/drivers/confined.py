"""The environment and the limits of every container that confines a function, for every engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SCRATCH: Final = "/tmp"  # noqa: S108  the container's own
ENVIRONMENT: Final = {
    "HOME": SCRATCH,
    "USER": "thaw",  # no entry of /etc/passwd has the container's uid
    "TMPDIR": SCRATCH,
    "XDG_CACHE_HOME": f"{SCRATCH}/.cache",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}

OF_OWN_IMAGES: Final = {name: ENVIRONMENT[name] for name in ("HOME", "USER", "TMPDIR")}
"""What users' images get of it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of every container; each Spec adds memory and share."""

    n_cores: int
    pids: int = 512
    tmp_mb: int = 256
    default_memory_mb: int = 2048
