"""A token's time in a pipeline of two hosts behind links of 200 Mbit/s: idle, and while both hosts fetch another model.

The stages exchange messages through the relay, over the same links that the fetch fills.  Inference traffic has
priority over fetches on these links.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench import _model
from bench._common import median, say
from bench._origin import Origin
from bench._pipelines import DEVICE_MB, Pipelines, tpot_ms
from bench._platform import BenchPlatform
from relay.clients.fetch import FetchClient
from relay.protocol.messages import FetchStart, FetchStatus
from thaw.ids import GroupId
from thaw.model import ModelIndex
from thaw.plan import PlanModel

RATE_MBIT: Final = 200
_HOSTS: Final = 2
_BULK_BYTES: Final = 500_000_000  # 20 s of such a link, which is longer than the answers that are measured meanwhile
_POOL_MB: Final = 1088
_ANSWERS: Final = 2
"""A round measures this many answers on idle links, and then this many during a fetch."""


@dataclass(slots=True)
class BusyLink:
    """Milliseconds per token.  ``filled`` is the part of the link that a fetch got while the answers came, one value
    per fetch.
    """

    ranks: str
    path: str = ""  # the path of the messages between the stages
    idle: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    filled: list[float] = field(default_factory=list)


def measure(work: Path, engine_core: int, rounds: int) -> BusyLink:
    """``work/models/smollm2`` must exist.  The measurement needs network namespaces (thaw.dev.links.available)."""
    index = _model.write_random(work / "models" / "bulk", _BULK_BYTES)
    with BenchPlatform(
        work / "state-busy",
        hosts=_HOSTS,
        link=f"{RATE_MBIT}mbit",
        store=work / "empty",
        direct=False,
        memory_mb=DEVICE_MB,
        pool_mb=_POOL_MB,
    ) as platform:
        network = platform.platform.network
        assert network is not None  # the caller has checked that namespaces are available
        found = BusyLink(network.ranks)
        with Origin(work, work, address=network.hub_address, namespace=network.hub) as origin:
            fetches = _Fetches(platform, work, f"{origin.url}/models", index)
            pipelines = Pipelines(platform, f"{origin.url}/models/smollm2", engine_core)
            with pipelines.deployed("two", _HOSTS, "redis") as two:
                found.path = pipelines.paths["two"]
                for _ in range(rounds):
                    found.idle += [tpot_ms(two) for _ in range(_ANSWERS)]
                    with fetches.running() as filled:
                        found.busy += [tpot_ms(two) for _ in range(_ANSWERS)]
                    found.filled += filled
                    say(
                        f"  idle {median(found.idle):.2f} ms a token, under a fetch {median(found.busy):.2f} ms; "
                        f"it had {min(filled):.2f} of the link"
                    )
    return found


class _Fetches:
    """Fetches of a model that no host has.  They run on all hosts at the same time; each host's own fetchd is asked."""

    def __init__(self, platform: BenchPlatform, work: Path, url: str, index: ModelIndex) -> None:
        run_dir = Path(platform.platform.run_dir)
        self._clients = [FetchClient(str(run_dir / f"host-{k}" / "fetchd.sock")) for k in range(_HOSTS)]
        self._models, self._url, self._ranges = work / "models", url, _model.whole(index)
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def running(self) -> Iterator[list[float]]:
        """Yield a list that is filled when the block ends."""
        name = f"bulk-{next(self._numbers)}"
        (self._models / name).symlink_to(self._models / "bulk")
        group = GroupId(f"bench-{name}")
        for client in self._clients:
            facts = client.inspect(f"{self._url}/{name}")
            model = PlanModel(facts.uri, facts.sha256, facts.etag, facts.n_bytes)
            if client.start(FetchStart(group, 0, 1, model, self._ranges)).resident:
                raise SystemExit(f"{name} was there already: nothing was measured")
        shares: list[float] = []
        before, began = [self._done(client, group) for client in self._clients], time.monotonic()
        try:
            yield shares
            seconds = time.monotonic() - began
            got = [self._done(client, group) - b for client, b in zip(self._clients, before, strict=True)]
            shares += [n_bytes / seconds / (RATE_MBIT * 125_000) for n_bytes in got]
        finally:
            for client in self._clients:
                client.cancel(group, 1)

    @staticmethod
    def _done(client: FetchClient, group: GroupId) -> int:
        fetch: FetchStatus | None = next((f for f in client.status().fetches if f.group_id == group), None)
        if fetch is None or fetch.done_bytes >= fetch.n_bytes:
            raise SystemExit("the fetch was over before the answers were: nothing was measured")
        return fetch.done_bytes
