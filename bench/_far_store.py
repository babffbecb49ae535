"""A store at the far end of a shaped link, and a client at the near end, for programs that are not hosts of Thaw."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench._origin import Origin
from thaw.dev import links


@dataclass(frozen=True, slots=True)
class FarStore:
    """``inside`` is the prefix of a command that runs in the near end's namespace.

    ``rate_bytes_per_s`` is set where no namespace can be made: curl limits its own rate then.
    """

    url: str
    inside: tuple[str, ...]
    rate_bytes_per_s: int | None

    def copy(self, model: str, names: Sequence[str], target: Path) -> float:
        """Copy all files with one curl over one connection.  Return the seconds that this took."""
        target.mkdir(parents=True)
        pairs = [word for name in names for word in ("-o", str(target / name), f"{self.url}/models/{model}/{name}")]
        limit = [] if self.rate_bytes_per_s is None else ["--limit-rate", str(self.rate_bytes_per_s)]
        began = time.monotonic()
        subprocess.run([*self.inside, "curl", "-sSf", *limit, *pairs], check=True)
        return time.monotonic() - began


@contextlib.contextmanager
def far_store(work: Path, loopback: Origin, rate_mbit: int) -> Iterator[FarStore]:
    if links.available():
        yield FarStore(loopback.url, (), rate_mbit * 125_000)
        return
    prefix = f"far{os.getpid() % 100000}"
    made = links.create(prefix, 1, rate_mbit)
    try:
        with Origin(work, work, address=made.hub_address, namespace=made.hub) as origin:
            yield FarStore(origin.url, links.inside(made.host(0), ()), None)
    finally:
        links.destroy(prefix)
