"""The small real model.  Its conversion is kept outside of any checkout, under a name made of its content."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def cache_dir() -> Path:
    import platformdirs

    return platformdirs.user_cache_path("thaw") / "models"


def obtain_quietly(directory: Path, progress: Callable[[str], None]) -> Path:
    from thaw.dev import smollm2

    return smollm2.obtain(directory, progress)
