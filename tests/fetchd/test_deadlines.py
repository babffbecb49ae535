"""A real fetchd serves the fetches on a host's link as the scheduler's ledger predicts it."""

from __future__ import annotations

import queue
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.scheduler.placement.link_ledger import DISCIPLINES, Discipline
from gateway.scheduler.placement.plans import fetch_key
from gateway.scheduler.view.hosts import new_host
from invoker.heartbeat import _fetches
from relay.clients.fetch import FetchClient
from tests.fetchd.harness import Fetchd, Instead, Store, every, holding, wait_until, write_index, write_model
from tests.scheduler.world import report
from thaw.errors import PlatformError, StaleEpoch
from thaw.host import HostReport
from thaw.ids import GroupId
from thaw.model import FileRange, ModelFacts

RATE = 8_000_000
N_MODELS = 6


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    root = tmp_path_factory.mktemp("s")
    for i in range(N_MODELS):
        write_index(write_model(root / str(i), n_layers=1, layer_bytes=2_000_000, seed=i))
    with Store(root) as running:
        yield running


def models(fetchd: Fetchd, store: Store) -> list[ModelFacts]:
    return [fetchd.client.inspect(f"{store.uri}/{i}") for i in range(N_MODELS)]


@contextmanager
def held(store: Store) -> Iterator[None]:
    """Hold back every byte of a model until the block ends, so that a test can first request all fetches."""
    over = threading.Event()
    store.fault = holding(over)
    try:
        yield
    finally:
        over.set()


def ends(fetchd: Fetchd, *groups: str) -> list[str]:
    """The groups in the order in which their fetches ended."""
    at = {g: fetchd.wait(g).events[-1].mono_ns for g in groups}
    return sorted(at, key=lambda g: at[g])


def test_deadlines_go_by_their_time_then_who_has_none_then_the_background(tmp_path: Path, store: Store) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_LINK_BYTES_PER_S=RATE) as fetchd:
        facts = models(fetchd, store)
        with held(store):
            fetchd.start(facts[0], "background", background=True)
            fetchd.start(facts[1], "plain")
            fetchd.start(facts[2], "late", deadline_ms=60_000)
            fetchd.start(facts[3], "early", deadline_ms=30_000)
        assert ends(fetchd, "background", "plain", "late", "early") == ["early", "late", "plain", "background"]


def test_a_repeated_start_changes_the_order_of_fetches_that_run_and_an_old_epoch_cannot(
    tmp_path: Path, store: Store
) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_LINK_BYTES_PER_S=RATE) as fetchd:
        facts = models(fetchd, store)
        with held(store):
            fetchd.start(facts[0], "one", deadline_ms=60_000, epoch=2)
            two = fetchd.start(facts[1], "two", background=True, epoch=2)
            with pytest.raises(StaleEpoch):
                fetchd.start(facts[1], "two", deadline_ms=1_000, epoch=1)
            assert fetchd.start(facts[1], "two", deadline_ms=30_000, epoch=2) == two
        assert ends(fetchd, "one", "two") == ["two", "one"]


def test_a_cancelled_fetch_gives_the_link_back_at_once(tmp_path: Path, store: Store) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_LINK_BYTES_PER_S=50_000) as fetchd:
        facts = models(fetchd, store)
        fetchd.start(facts[0], "first", deadline_ms=100_000)  # the link would need 40 s for it
        fetchd.start(facts[1], "second", (FileRange("model.safetensors", 0, 100_000),), deadline_ms=200_000)
        fetchd.cancel("first")
        fetchd.client.wait(GroupId("second"), 0, deadline_s=25)


SLOW = 2_000_000
SIZES = (300_000, 2_000_000, 900_000, 1_500_000, 600_000, 1_200_000)


class LinkClock:
    """A clock for the ledger that goes by the bytes that the link has carried.

    So it stands still while this machine does, and what the ledger believes depends on how fetchd shares the link alone.
    """

    def __init__(self, fetchd: Fetchd, n_bytes: int) -> None:
        self._fetchd, self._n_bytes = fetchd, n_bytes
        self._began = time.monotonic()

    def heartbeat(self, n_pending: int | None = None) -> tuple[float, HostReport, dict[str, int]]:
        """The time, a host's report on its fetches, and the bytes that are really pending for each.

        ``n_pending``: the bytes still to come if fetchd does not know all fetches yet.
        """
        status = self._fetchd.client.status()
        pending = {f.group_id: f.pending_bytes for f in status.fetches}
        now = self._began + (self._n_bytes - (sum(pending.values()) if n_pending is None else n_pending)) / SLOW
        told = report("h", network_bytes_per_s=SLOW, seen_wall_ms=int(now * 1000), fetches=_fetches(status))
        return now, told, pending


@pytest.mark.parametrize("discipline", DISCIPLINES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 3))])
def test_what_the_ledger_believes_is_within_a_twentieth_of_what_fetchd_has_really_left(
    tmp_path: Path, store: Store, discipline: Discipline, seed: int
) -> None:
    """The ledger is checked whenever a fetch has ended, and only then does it get a heartbeat.

    In between it knows only the link's rate.  One check in a run may fail: while all connections of a fetch read, the
    next fetch may take a few reads of its own.
    """
    generator = random.Random(seed)
    sizes, due_s = generator.sample(SIZES, len(SIZES)), generator.sample(range(30, 60, 5), len(SIZES))
    with Fetchd(tmp_path, THAW_FETCHD_LINK_BYTES_PER_S=SLOW, THAW_LEDGER_DISCIPLINE=discipline) as fetchd:
        facts = models(fetchd, store)
        clock = LinkClock(fetchd, sum(sizes))
        now, told, _ = clock.heartbeat(sum(sizes))
        host = new_host(told, discipline, now)
        groups = [f"g{i}" for i in range(len(SIZES))]
        with held(store):
            for group, f, n_bytes, seconds in zip(groups, facts, sizes, due_s, strict=True):
                fetchd.start(f, group, (FileRange("model.safetensors", 0, n_bytes),), deadline_ms=1000 * seconds)
        for group, n_bytes, seconds in zip(groups, sizes, due_s, strict=True):
            assert host.ledger.add(fetch_key(group, 0), n_bytes, now + seconds, now)
        off: list[float] = []
        ended = _as_they_end(fetchd, groups)
        for _ in groups:
            ended.get(timeout=30)
            now, told, really = clock.heartbeat()
            host.ledger.advance(now)
            off.append(max(abs(host.ledger.pending(fetch_key(g, 0)) - really.get(g, 0)) for g in groups))
            host.take_report(told, {}, now)
        assert sorted(off)[-2] <= 0.05 * sum(sizes), off
        assert host.ledger.fetches() == {}


def _as_they_end(fetchd: Fetchd, groups: list[str]) -> queue.SimpleQueue[str]:
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def wait(group: str) -> None:
        FetchClient(fetchd.socket).wait(GroupId(group), 0, deadline_s=30)
        ended.put(group)

    for group in groups:
        threading.Thread(target=wait, args=(group,), daemon=True).start()
    return ended


def test_metrics_tell_bytes_by_source_fetches_by_outcome_and_the_pool(tmp_path: Path, store: Store) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_LINK_BYTES_PER_S=RATE, THAW_FETCHD_RETRIES=1) as fetchd:
        facts = models(fetchd, store)
        fetchd.fetch(facts[0], "one")
        fetchd.start(facts[0], "two")
        assert facts[0].parts is not None
        fetchd.fetch(facts[0], "part", facts[0].parts.layers[0])
        store.fault = Instead(every, lambda r: r.refuse("500 Oh"))
        with pytest.raises(PlatformError):
            fetchd.fetch(facts[1], "broken")
        store.fault = lambda r: False
        expected = {
            'thaw_fetchd_bytes_total{source="http"}': facts[0].n_bytes,
            'thaw_fetchd_bytes_total{source="memory"}': facts[0].layer_bytes[0],
            'thaw_fetchd_fetches_total{outcome="done"}': 2,
            'thaw_fetchd_fetches_total{outcome="resident"}': 1,
            'thaw_fetchd_fetches_total{outcome="failed"}': 1,
            "thaw_fetchd_slow_connections_total": 0,
            "thaw_fetchd_fetches_running": 0,
            "thaw_fetchd_link_bytes_per_second": RATE,
            "thaw_fetchd_pool_bytes": 96 * 2**20,
            "thaw_fetchd_pool_free_bytes": 88 * 2**20,
        }
        # a failed fetch frees its memory after the error is reported
        wait_until(lambda: metrics_of(fetchd)["thaw_fetchd_pool_free_bytes"] == expected["thaw_fetchd_pool_free_bytes"])
        assert metrics_of(fetchd) == expected


def metrics_of(fetchd: Fetchd) -> dict[str, float]:
    found = dict(re.findall(r"^(thaw_fetchd_\S+) ([\d.e+]+)$", fetchd.client.metrics(), re.M))
    return {name: float(value) for name, value in found.items() if "_created" not in name}
