"""Many groups at once, an unreliable store and a pool that is too small for all: afterwards every slab is free again,
and nothing hangs.
"""

from __future__ import annotations

import itertools
import random
from functools import partial
from pathlib import Path

import pytest

from tests.conformance.transports import Worker
from tests.fetchd.harness import (
    WEIGHTS,
    Fetchd,
    Instead,
    Request,
    Store,
    of_weights,
    wait_until,
    write_index,
    write_model,
)
from thaw import partition
from thaw.errors import MemoryTooSmall, NotFound, PlatformError, StoreUnavailable
from thaw.ids import GroupId, InstanceId
from thaw.model import FileRange, ModelFacts

EXPECTED = (MemoryTooSmall, NotFound, PlatformError, StoreUnavailable)
"""The errors that a caller of a busy fetchd may get: no room, evicted before the grant, cancelled by the other side."""


def wanted(generator: random.Random, facts: ModelFacts) -> tuple[tuple[FileRange, ...], tuple[FileRange, ...]]:
    """The whole model, or a stage, or a stage first and the rest later.  Segments of the same time overlap."""
    whole = tuple(FileRange(name, 0, n) for name, n in facts.files.items())
    if generator.random() < 0.4 or facts.parts is None:
        return whole, ()
    n_layers = len(facts.parts.layers)
    a, b = sorted(generator.sample(range(n_layers + 1), 2))
    rest = [r for i in range(n_layers) if not a <= i < b for r in facts.parts.layers[i]]
    first = partition.join([r for layer in facts.parts.layers[a:b] for r in layer])
    return first, partition.join(rest) if generator.random() < 0.6 else ()


def live(fetchd: Fetchd, models: list[ModelFacts], contents: dict[str, bytes], number: int, n_wanted: int) -> None:
    """Start, read, cancel and release at random, until ``n_wanted`` models were read completely and correctly."""
    generator, read_whole = random.Random(number), 0
    for step in itertools.count():
        if read_whole == n_wanted:
            return
        assert step < 40 * n_wanted, f"of {step} starts {read_whole} were read whole"
        facts = generator.choice(models)
        group, instance = f"g{number}-{step}", InstanceId(f"i{number}-{step}")
        try:
            ranges, later = wanted(generator, facts)
            started = fetchd.start(
                facts,
                group,
                ranges,
                later_ranges=later,
                pace_bytes_per_s=generator.choice([None, 30_000_000]),
                deadline_ms=generator.choice([None, 50, 5_000]),
                background=generator.random() < 0.3,
            )
            if generator.random() < 0.3:
                fetchd.client.cancel(GroupId(group), 1)
            with fetchd.reading(started.segment_id, instance, group) as reader:
                reader.wait(reader.n_bytes, 30)
                for p in reader.offer.layout:
                    expected = contents[facts.uri][p.offset : p.offset + p.n_bytes]
                    assert p.file != WEIGHTS or reader.view(p.segment_offset, p.n_bytes) == expected
                read_whole += 1
        except EXPECTED:
            pass
        finally:
            fetchd.client.cancel(GroupId(group), 1)
            fetchd.client.close_descriptor_socket(instance)


@pytest.mark.parametrize(
    ("layer_bytes", "pool_mb", "n_wanted"),
    [(1_500_000, 12, 5), pytest.param(6_000_000, 44, 50, marks=pytest.mark.full)],
)
def test_a_storm_of_starts_and_cancels_on_a_flaky_store_loses_nothing(
    tmp_path: Path, layer_bytes: int, pool_mb: int, n_wanted: int
) -> None:
    generator = random.Random(3)

    def cut(request: Request) -> None:
        answer = request.head() + request.body
        request.sock.sendall(answer[: generator.randrange(len(request.head()), len(answer))])

    paths = [write_index(write_model(tmp_path / "s" / f"m{i}", layer_bytes=layer_bytes, seed=i)) for i in range(4)]
    with Store(tmp_path / "s") as store, Fetchd(tmp_path, THAW_FETCHD_POOL_MB=pool_mb, THAW_FETCHD_SLAB_MB=2) as fetchd:
        models = [fetchd.client.inspect(f"{store.uri}/{p.name}") for p in paths]
        contents = {m.uri: (p / WEIGHTS).read_bytes() for m, p in zip(models, paths, strict=True)}
        store.fault = Instead(lambda r: of_weights(r) and generator.random() < 0.2, cut)
        callers = [Worker(partial(live, fetchd, models, contents, number, n_wanted)) for number in range(6)]
        for caller in callers:
            caller.join(200)
        wait_until(lambda: not fetchd.client.status().fetches and fetchd.client.descriptor_sockets() == ())
        wait_until(lambda: all(s.holders == () for s in fetchd.client.status().segments))
        status = fetchd.client.status()
        resident = sum(-(-s.n_bytes // (2 * 2**20)) * 2 * 2**20 for s in status.segments)
        assert status.free_bytes + resident == status.pool_bytes
        assert [e for e in fetchd.events if "defect" in e["event"] or e["event"] == "noise"] == []
