"""Many groups at once, an unreliable store and a pool that is too small for all: afterwards every slab is free again,
and nothing hangs.
"""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path

import pytest

from relay.clients.fetch import DescriptorClient
from tests.fetchd.harness import Fetchd, Request, Store, wait_until, write_index, write_model
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
            path = fetchd.client.open_descriptor_socket(instance)
            fetchd.client.grant_segment(instance, started.segment_id, GroupId(group), 0)
            descriptors = DescriptorClient.connect(path)
            reader = descriptors.segment(deadline_s=30)
            try:
                reader.wait(reader.n_bytes, 30)
                for p in reader.offer.layout:
                    expected = contents[facts.uri][p.offset : p.offset + p.n_bytes]
                    assert p.file != "model.safetensors" or reader.view(p.segment_offset, p.n_bytes) == expected
                read_whole += 1
            finally:
                reader.close()
                descriptors.close()
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

    def fault(request: Request) -> bool:
        if request.method == "GET" and request.name == "model.safetensors" and generator.random() < 0.2:
            answer = request.head() + request.body
            request.sock.sendall(answer[: generator.randrange(len(request.head()), len(answer))])
            return True
        return False

    paths = [write_model(tmp_path / "s" / f"m{i}", layer_bytes=layer_bytes, seed=i) for i in range(4)]
    for path in paths:
        write_index(path)
    with Store(tmp_path / "s") as store, Fetchd(tmp_path, THAW_FETCHD_POOL_MB=pool_mb, THAW_FETCHD_SLAB_MB=2) as fetchd:
        models = [fetchd.client.inspect(f"{store.uri}/{p.name}") for p in paths]
        contents = {m.uri: (p / "model.safetensors").read_bytes() for m, p in zip(models, paths, strict=True)}
        store.fault = fault
        failures: list[BaseException] = []

        def run(number: int) -> None:
            try:
                live(fetchd, models, contents, number, n_wanted)
            except BaseException as e:  # noqa: BLE001 - the test's own thread raises it again
                failures.append(e)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(200)
            assert not t.is_alive(), "a caller hangs"
        assert failures == []
        wait_until(lambda: not fetchd.client.status().fetches and fetchd.client.descriptor_sockets() == ())
        wait_until(lambda: all(s.holders == () for s in fetchd.client.status().segments))
        status = fetchd.client.status()
        resident = sum(-(-s.n_bytes // (2 * 2**20)) * 2 * 2**20 for s in status.segments)
        assert status.free_bytes + resident == status.pool_bytes
        assert [e for e in fetchd.events if "defect" in e["event"] or e["event"] == "noise"] == []
