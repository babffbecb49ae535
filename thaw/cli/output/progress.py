"""How far a long command is: a bar in a terminal, a line every few seconds on a pipe or in a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from thaw.cli.context import err, out

EVERY_S: Final = 5.0


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a callback that gets the number of bytes of each step.  ``what`` is the verb, ``total`` the bytes."""
    console = out()
    if not console.is_terminal:
        lines = err()
        yield Lines(what, total, lambda line: lines.print(line, soft_wrap=True), time.monotonic)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda n: bar.advance(task, n)


class Lines:
    """Says how far it is, how fast the last seconds were and how long the rest takes at that rate."""

    def __init__(self, what: str, total: int, say: Callable[[str], None], now_s: Callable[[], float]) -> None:
        self._what, self._total, self._say, self._now_s = what, total, say, now_s
        self._done = self._said = 0
        self._said_s = now_s()

    def __call__(self, n_bytes: int) -> None:
        from thaw.cli.output.tables import duration, size

        self._done += n_bytes
        took_s = self._now_s() - self._said_s
        if took_s < EVERY_S:
            return
        rate = (self._done - self._said) / took_s
        left = f", {duration((self._total - self._done) / rate)} to go" if rate > 0 else ""
        self._say(f"{self._what}: {size(self._done)} of {size(self._total)}, {size(int(rate))}/s{left}")
        self._said, self._said_s = self._done, self._said_s + took_s
