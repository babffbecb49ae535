"""The way from the store to the host: loopback, or a rate; each with a store of its own at the far end.

While the platform's hosts have no network namespace, a rate is only paced by fetchd itself (and by curl for vLLM):
that is marked, and satisfies no goal.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench._common import median
from bench._origin import Origin
from bench.fetch import build_receiver
from thaw.model import ModelIndex

_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Link:
    """``option`` is for ``thaw dev up --link``; ``inside`` goes before a client's command."""

    name: str
    option: str
    bytes_per_s: float
    paced: bool
    origin: Origin
    inside: list[str] = field(default_factory=list)

    @property
    def curl_limit(self) -> str:
        return str(round(self.bytes_per_s)) if self.paced else ""

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "bytes_per_s": round(self.bytes_per_s), "paced": self.paced,
                "store": self.origin.kind}  # fmt: skip


def unlimited(work: Path, stack: contextlib.ExitStack, index: ModelIndex) -> Link:
    """Its rate is what the raw receiver gets."""
    origin = stack.enter_context(Origin(work, work))
    weights = max(index.files, key=lambda f: f.n_bytes)
    receiver = build_receiver(work)
    command = [str(receiver), origin.address, str(origin.port), f"/models/smollm2/{weights.name}",
               str(weights.n_bytes), "4"]  # fmt: skip
    seconds = [json.loads(subprocess.check_output(command))["seconds"] for _ in range(_ROUNDS)]
    return Link("unlimited", "", weights.n_bytes / median(seconds), False, origin)


def shaped(work: Path, stack: contextlib.ExitStack, rate_mbit: int) -> Link:
    origin = stack.enter_context(Origin(work, work))
    return Link(f"{rate_mbit}m", f"{rate_mbit}mbit", rate_mbit * 125_000, True, origin)
