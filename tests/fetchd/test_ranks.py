"""Ranks on a real, shaped link whose rate fetchd is not told.  The tests need root, because namespaces do."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fetchd.harness import ROOT, Fetchd, wait_until, write_index, write_model
from thaw.dev import links
from thaw.dev.links import Links
from thaw.ids import GroupId

pytestmark = pytest.mark.full
RATE_MBIT = 200


@contextmanager
def link(directory: Path) -> Iterator[tuple[Links, str]]:
    """Yield one host, and the URI of a store with the models ``a`` and ``b`` at the far end of the host's link."""
    for seed, (name, n_layers) in enumerate((("a", 12), ("b", 6))):
        write_index(write_model(directory / name, n_layers=n_layers, layer_bytes=8_000_000, seed=seed))
    made = links.create(f"tr{secrets.token_hex(3)}", 1, RATE_MBIT)
    try:
        command = (sys.executable, "-m", "bench._origin", str(directory), made.hub_address, "8080")
        with subprocess.Popen(links.inside(made.hub, command), stdout=subprocess.PIPE, text=True, cwd=ROOT) as store:
            assert store.stdout is not None
            assert "listening" in store.stdout.readline()
            try:
                yield made, f"http://{made.hub_address}:8080"
            finally:
                store.terminate()
    finally:
        links.destroy(made.prefix)


def moved(fetchd: Fetchd, group: str) -> int:
    return next(f.done_bytes for f in fetchd.client.status().fetches if f.group_id == group)


def test_a_fetch_with_a_deadline_takes_a_link_that_a_background_fetch_had_filled(tmp_path: Path) -> None:
    with (
        link(tmp_path / "s") as (network, uri),
        Fetchd(tmp_path, namespace=network.host(0), THAW_FETCHD_POOL_MB=256) as fetchd,
    ):
        background, urgent = (fetchd.client.inspect(f"{uri}/{name}") for name in "ab")
        fetchd.start(background, "background", background=True)
        wait_until(lambda: moved(fetchd, "background") > 20_000_000, 30)
        before = moved(fetchd, "background")
        fetchd.start(urgent, "urgent", deadline_ms=60_000)
        done = fetchd.client.wait(GroupId("urgent"), 0, deadline_s=60)
        assert moved(fetchd, "background") - before < 0.4 * done.fetched_bytes
        wait_until(lambda: not fetchd.client.status().fetches, 60)
        assert fetchd.client.status().link_bytes_per_s < 1.1 * RATE_MBIT * 125_000
        assert not [e for e in fetchd.events if e["event"] == "link_yields"], "the namespace ranks packets"


def test_on_a_link_without_ranks_fetchd_says_that_it_yields_and_keeps_below_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_RANKS", {})
    with (
        link(tmp_path / "s") as (network, uri),
        Fetchd(tmp_path, namespace=network.host(0), THAW_FETCHD_POOL_MB=256, THAW_FETCHD_RETAIN="false") as fetchd,
    ):
        facts = fetchd.client.inspect(f"{uri}/b")
        fetchd.start(facts, "first")
        fetchd.client.wait(GroupId("first"), 0, deadline_s=60)
        fetchd.client.cancel(GroupId("first"), 1)
        measured = fetchd.client.status().link_bytes_per_s
        assert [e["interface"] for e in fetchd.events if e["event"] == "link_yields"] == ["eth0"]
        fetchd.start(facts, "second")
        attrs = fetchd.client.wait(GroupId("second"), 0, deadline_s=60).events[-1].attrs
        assert float(str(attrs["bytes_per_s"])) < 0.98 * measured
