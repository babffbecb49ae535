"""How values look in the terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def size(n_bytes: float) -> str:
    """Binary units, three digits: 257 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" or n_bytes >= 100 else f"{n_bytes:.3g} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.3g} TiB"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


def age(wall_ms: int | None) -> str:
    """How long ago; wall clocks of two machines may differ, so never less than nothing."""
    if not wall_ms:
        return "?"
    seconds = max(0.0, time.time() - wall_ms / 1000)
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"


def moment(wall_ms: int | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_ms / 1000)) if wall_ms else ""
