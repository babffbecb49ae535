"""A host's link as the scheduler's ledger believes it: who is served when, in a real fetchd."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from gateway.scheduler.ledger import LinkLedger
from relay.messages import FetchUpdate
from tests.fetchd.harness import Fetchd, Request, Store, write_index, write_model
from thaw.errors import PlatformError, StaleEpoch
from thaw.ids import GroupId
from thaw.model import ModelFacts

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
    """No byte of a model before the block is over, however long it takes to ask for all of them."""
    over = threading.Event()

    def hold(request: Request) -> bool:
        if request.method == "GET":
            over.wait(20)
        return False

    store.fault = hold
    try:
        yield
    finally:
        store.fault = lambda request: False
        over.set()


def ends(fetchd: Fetchd, *groups: str) -> list[str]:
    """The groups in order of their ends."""
    at = {g: fetchd.client.wait(GroupId(g), 0, deadline_s=30).events[-1].mono_ns for g in groups}
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


def test_an_update_changes_the_order_of_fetches_that_run_and_an_old_epoch_cannot(tmp_path: Path, store: Store) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_LINK_BYTES_PER_S=RATE) as fetchd:
        facts = models(fetchd, store)
        with held(store):
            fetchd.start(facts[0], "one", deadline_ms=60_000, epoch=2)
            fetchd.start(facts[1], "two", background=True, epoch=2)
            with pytest.raises(StaleEpoch):
                fetchd.client.update(FetchUpdate(GroupId("two"), 0, 1, None, deadline_ms=1_000, background=False))
            fetchd.client.update(FetchUpdate(GroupId("two"), 0, 2, None, deadline_ms=30_000, background=False))
        assert ends(fetchd, "one", "two") == ["two", "one"]


def test_a_cancelled_fetch_gives_the_link_back_at_once(tmp_path: Path, store: Store) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_LINK_BYTES_PER_S=RATE) as fetchd:
        facts = models(fetchd, store)
        fetchd.start(facts[0], "first", deadline_ms=10_000)
        fetchd.start(facts[1], "second", deadline_ms=20_000)
        began = time.monotonic()
        fetchd.client.cancel(GroupId("first"), 1)
        fetchd.client.wait(GroupId("second"), 0, deadline_s=20)
        took = time.monotonic() - began
        assert facts[1].n_bytes >= 0.5 * RATE * took - 512 * 1024, "it had less than half of a link that was its own"


@pytest.mark.full
@pytest.mark.parametrize("discipline", ["edf", "equal"])
@pytest.mark.parametrize("seed", range(3))
def test_what_the_ledger_admits_holds_and_what_it_believes_is_true(
    tmp_path: Path, store: Store, discipline: Literal["edf", "equal"], seed: int
) -> None:
    """The ledger is told nothing but the link's rate; it must be within 5 % of the bytes that are really pending."""
    generator = random.Random(seed)
    with Fetchd(tmp_path, THAW_FETCHD_LINK_BYTES_PER_S=RATE, THAW_LEDGER_DISCIPLINE=discipline) as fetchd:
        facts = models(fetchd, store)
        ledger = LinkLedger(RATE, discipline, time.monotonic())
        total, deadlines = 0, {}
        for i, f in enumerate(facts):
            seconds = generator.uniform(0.5, 2.5)
            now = time.monotonic()
            if ledger.add(f"g{i}", f.n_bytes, now + seconds, now):
                fetchd.start(f, f"g{i}", deadline_ms=round(1000 * seconds))
                deadlines[f"g{i}"], total = now + seconds, total + f.n_bytes
        assert deadlines
        for _ in range(4):
            time.sleep(0.05)  # not to wait for anything: to look at different moments
            really = sum(f.pending_bytes for f in fetchd.client.status().fetches)
            ledger.advance(time.monotonic())
            assert abs(sum(ledger.pending(g) for g in deadlines) - really) <= 0.05 * total + 4 * 256 * 1024
        for group, deadline in deadlines.items():
            done = fetchd.client.wait(GroupId(group), 0, deadline_s=20)
            assert done.events[-1].mono_ns / 1e9 <= deadline + 0.25


def test_metrics_tell_bytes_by_source_fetches_by_outcome_and_the_pool(tmp_path: Path, store: Store) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_LINK_BYTES_PER_S=RATE, THAW_FETCHD_RETRIES=1) as fetchd:
        facts = models(fetchd, store)
        fetchd.start(facts[0], "one")
        fetchd.client.wait(GroupId("one"), 0, deadline_s=20)
        fetchd.start(facts[0], "two")
        assert facts[0].parts is not None
        fetchd.start(facts[0], "part", facts[0].parts.layers[0])
        fetchd.client.wait(GroupId("part"), 0, deadline_s=20)
        store.fault = lambda r: r.sock.sendall(r.head("500 Oh", length=0)) is None
        fetchd.start(facts[1], "broken")
        with pytest.raises(PlatformError):
            fetchd.client.wait(GroupId("broken"), 0, deadline_s=20)
        store.fault = lambda r: False
        found = dict(re.findall(r"^(thaw_fetchd_\S+) ([\d.e+]+)$", fetchd.client.metrics(), re.M))
        values = {name: float(value) for name, value in found.items() if "_created" not in name}
        assert values == {
            'thaw_fetchd_bytes_total{source="http"}': facts[0].n_bytes,
            'thaw_fetchd_bytes_total{source="memory"}': facts[0].layer_bytes[0],
            'thaw_fetchd_fetches_total{outcome="done"}': 2, 'thaw_fetchd_fetches_total{outcome="resident"}': 1,
            'thaw_fetchd_fetches_total{outcome="failed"}': 1, "thaw_fetchd_fetches_running": 0,
            "thaw_fetchd_link_bytes_per_second": RATE, "thaw_fetchd_pool_bytes": 96 * 2**20,
            "thaw_fetchd_pool_free_bytes": fetchd.free_bytes(),
        }  # fmt: skip
