"""Formats values for the terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold", no_wrap=column == "activation id")  # it is copied from here
    return made


def show(made: Table, found: object = None) -> None:
    """Print a table on stdout, or with --json the values ``found``, by default the table's cells.  A narrow terminal
    breaks cells between words, and inside a word only if it must."""
    from rich.text import Text

    from thaw.cli.context import globals_, out, print_json

    if globals_.json:
        names = [str(column.header) for column in made.columns]
        cells = zip(*([Text.from_markup(str(c)).plain for c in column.cells] for column in made.columns), strict=True)
        print_json([dict(zip(names, row, strict=True)) for row in cells] if found is None else found)
        return
    for column in made.columns:
        words = [w for cell in (column.header, *column.cells) for w in Text.from_markup(str(cell)).plain.split()]
        column.min_width = max(map(len, words), default=0)
    out().print(made)


def size(n_bytes: float) -> str:
    """Binary units, three digits: 257 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" or n_bytes >= 100 else f"{n_bytes:.3g} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.3g} TiB"


def bit_rate(bytes_per_s: float) -> str:
    """Decimal, as links are sold: 400 Mbit/s, 10 Gbit/s."""
    mbit = bytes_per_s * 8 / 1e6
    return f"{mbit:.3g} Mbit/s" if mbit < 1000 else f"{mbit / 1000:.3g} Gbit/s"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


def age(wall_ms: int | None) -> str:
    """How long ago ``wall_ms`` was.  It is never negative, although the wall clocks of two machines may differ."""
    if not wall_ms:
        return "?"
    seconds = max(0.0, time.time() - wall_ms / 1000)
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"


def moment(wall_ms: int | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_ms / 1000)) if wall_ms else ""
