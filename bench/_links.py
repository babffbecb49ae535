"""The link from the store to a host: loopback without a limit, or a shaped link of the platform's own namespaces.

Where namespaces cannot be made, fetchd limits its own rate instead.  Such a value is marked as paced and satisfies no
goal.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench._common import median, say
from bench._origin import Origin
from bench._platform import BenchPlatform
from bench.fetch import build_receiver
from thaw.dev import links

_ROUNDS = 5
_SHAPED_BYTES = 64_000_000


@dataclass(frozen=True, slots=True)
class Link:
    """``option`` is the value for ``thaw dev up --link``.  ``bytes_per_s`` is the rate that a raw receiver gets."""

    name: str
    option: str
    bytes_per_s: float
    paced: bool
    work: Path
    loopback: Origin

    @contextlib.contextmanager
    def store(self, platform: BenchPlatform) -> Iterator[str]:
        """Yield the URL of a static store at the far end of the platform's link."""
        network = platform.platform.network
        if network is None:
            yield self.loopback.url
            return
        with Origin(self.work, self.work, address=network.hub_address, namespace=network.hub) as origin:
            yield origin.url

    def describe(self) -> dict[str, object]:
        return {
            "name": self.name,
            "bytes_per_s": round(self.bytes_per_s),
            "paced": self.paced,
            "store": self.loopback.kind,
        }


def unlimited(work: Path, loopback: Origin) -> Link:
    receiver = build_receiver(work)
    return Link("unlimited", "", _rate(work, receiver, loopback, ()), False, work, loopback)


def shaped(work: Path, loopback: Origin, rate_mbit: int) -> Link:
    name, option, nominal = f"{rate_mbit}m", f"{rate_mbit}mbit", rate_mbit * 125_000.0
    if reason := links.available():
        say(f"links are paced, not shaped: {reason}")
        return Link(name, option, nominal, True, work, loopback)
    receiver = work / "receiver"
    if not receiver.exists():
        build_receiver(work)
    prefix = f"bench{os.getpid() % 10000}"
    made = links.create(prefix, 1, rate_mbit)
    try:
        with Origin(work, work, address=made.hub_address, namespace=made.hub) as origin:
            rate = _rate(work, receiver, origin, links.inside(made.host(0), ()), _SHAPED_BYTES)
    finally:
        links.destroy(prefix)
    return Link(name, option, rate, False, work, loopback)


def _rate(work: Path, receiver: Path, origin: Origin, inside: tuple[str, ...], most: int = 1 << 40) -> float:
    """The rate that a raw receiver gets.  The burst at the beginning of a shaped link counts, as it does in a start."""
    weights = max((work / "models" / "smollm2").iterdir(), key=lambda p: p.stat().st_size)
    n_bytes = min(most, weights.stat().st_size)
    command = [
        *inside,
        str(receiver),
        origin.address,
        str(origin.port),
        f"/models/smollm2/{weights.name}",
        str(n_bytes),
        "4",
    ]
    return n_bytes / median([json.loads(subprocess.check_output(command))["seconds"] for _ in range(_ROUNDS)])
