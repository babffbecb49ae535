"""How long does one slow connection to the store hold up the bytes behind it?

fetchd reads SmolLM2's size in bytes over four connections, through a link of 200 Mbit/s, and the engine may load only
what lies below the watermark.  There are three stores.  The first treats all connections alike.  The second gives each
fourth connection a hundredth of the link, as TCP sometimes does; the third gives it a byte a second, so that it hangs.
Measured are the longest time for which the watermark stood, and the time until the last byte has arrived.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from bench import _common, _model
from bench._common import Goal, figure, interleave, judge, median
from bench._fetchd import Fetchd
from bench._origin import Origin
from relay.clients.fetch import DescriptorClient, FetchClient
from relay.protocol.messages import FetchStart
from thaw.dev import links
from thaw.ids import GroupId, InstanceId
from thaw.model import CHUNK_BYTES, ModelFacts, ModelIndex
from thaw.plan import PlanModel

_RATE_MBIT: Final = 200
_STORES: Final = {"even": 0, "starved": _RATE_MBIT * 125_000 // 100, "hung": 1}
"""Bytes per second of each fourth connection; 0 means no limit."""
_CONNECTIONS: Final = 4
_POOL_MB: Final = 768
_DEADLINE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Fetched:
    seconds: float
    stood_s: float  # the longest time for which the watermark stood
    n_given_up: int  # connections

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s, the watermark stood for {self.stood_s:.2f} s, {self.n_given_up} given up"


def main() -> int:
    options = _common.options(__doc__ or "")
    rounds = options.n or 5
    if reason := links.available():
        raise SystemExit(f"a shaped link cannot be made: {reason}")
    work = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    try:
        index = _model.write_random(work / "models" / "random", 135_000_000 if options.quick else 270_000_000)
        with _fetches(work, index) as fetches:
            found = interleave(fetches, rounds)
    finally:
        shutil.rmtree(work)
    return _common.report(
        "slow_connections",
        [
            *_goals(found, "starved", index.n_bytes),
            *_goals(found, "hung", index.n_bytes),
            figure("watermark_stood_even", _stood(found["even"], found["even"], index.n_bytes)),
        ],
        rounds=rounds,
        n_bytes=index.n_bytes,
        rate_mbit=_RATE_MBIT,
        given_up={name: [f.n_given_up for f in fetched] for name, fetched in found.items()},
    )


@contextlib.contextmanager
def _fetches(work: Path, index: ModelIndex) -> Iterator[dict[str, Callable[[], Fetched]]]:
    made = links.create(f"thaw-bench-{os.getpid() % 10000}", 1, _RATE_MBIT)
    try:
        with contextlib.ExitStack() as running:
            daemon = running.enter_context(Fetchd(work, _POOL_MB, connections=_CONNECTIONS, namespace=made.host(0)))
            client = FetchClient(str(work / "fetchd.sock"))
            found: dict[str, Callable[[], Fetched]] = {}
            for name, slow_bytes_per_s in _STORES.items():
                origin = Origin(
                    work, work, address=made.hub_address, namespace=made.hub, slow_bytes_per_s=slow_bytes_per_s
                )
                url = running.enter_context(origin).url
                facts = client.inspect(f"{url}/models/random")
                found[name] = partial(_fetch, daemon, client, name, facts, index)
            yield found
    finally:
        links.destroy(made.prefix)


def _fetch(daemon: Fetchd, client: FetchClient, name: str, facts: ModelFacts, index: ModelIndex) -> Fetched:
    group, instance = GroupId(f"{name}-{time.monotonic_ns()}"), InstanceId(f"{name}-{time.monotonic_ns()}")
    model = PlanModel(facts.uri, facts.sha256, facts.etag, facts.n_bytes)
    began_s = time.monotonic()
    started = client.start(FetchStart(group, 0, 1, model, _model.whole(index)))
    path = client.open_descriptor_socket(instance)
    client.grant_segment(instance, started.segment_id, group, 0)
    descriptors = DescriptorClient.connect(path)
    reader = descriptors.segment(deadline_s=_DEADLINE_S)
    end, moved_s, stood_s = 0, began_s, 0.0
    while end < reader.n_bytes:
        end = reader.wait(end + 1, _DEADLINE_S)
        stood_s, moved_s = max(stood_s, time.monotonic() - moved_s), time.monotonic()
    done = client.wait(group, 0, deadline_s=_DEADLINE_S)
    reader.close()
    descriptors.close()
    client.close_descriptor_socket(instance)
    client.cancel(group, 1)
    daemon.settle()
    return Fetched(moved_s - began_s, stood_s, int(str(done.events[-1].attrs["slow_connections"])))


def _goals(found: dict[str, list[Fetched]], name: str, n_bytes: int) -> list[Goal]:
    slow, even = found[name], found["even"]
    kept = {"starved": f"takes {CHUNK_BYTES / _STORES['starved']:.0f} s", "hung": "never ends"}
    stood = _stood(slow, even, n_bytes)
    floor = f"{median([f.stood_s for f in slow]):.2f} s; a chunk on a slow connection {kept[name]}"
    took = median([a.seconds / b.seconds for a, b in zip(slow, even, strict=True)])
    return [
        judge(f"watermark_stood_{name}", stood, "<=", 2.0, floor=floor),
        judge(
            f"last_byte_{name}", took, "<=", 1.05, floor=f"{_last_byte_s(slow):.2f} against {_last_byte_s(even):.2f} s"
        ),
    ]


def _stood(fetched: Sequence[Fetched], even: Sequence[Fetched], n_bytes: int) -> float:
    """The longest time for which the watermark stood, over the time in which the link brings a chunk for each
    connection."""
    return median([f.stood_s for f in fetched]) / (_CONNECTIONS * CHUNK_BYTES * _last_byte_s(even) / n_bytes)


def _last_byte_s(fetched: Sequence[Fetched]) -> float:
    return median([f.seconds for f in fetched])


if __name__ == "__main__":
    sys.exit(main())
