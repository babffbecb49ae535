"""A host's report on its device and on its fetchd: progress for the ledger, and fetchd's metrics after its own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from invoker.device_kind import kind_of
from invoker.heartbeat import Reporter, _fetches
from relay.clients.fetch import FetchClient
from relay.protocol.messages import FetchStatus, Status
from tests.invoker.platform import Host
from thaw.host import FetchReport
from thaw.ids import GroupId
from thaw.logs import Log
from thaw.process import lasting


def test_the_heartbeat_says_what_is_pending_of_each_stage_and_what_follows_later() -> None:
    fetch = FetchStatus(GroupId("g"), 2, "u", 100, 60, 5.0, 40, 300)
    assert _fetches(Status(1, 1, (), (fetch,), 0.0)) == (FetchReport("g", 100, 60, 5.0, 2, 40, 300),)
    assert _fetches(None) == ()


def test_a_host_says_apart_what_was_declared_of_its_link_and_what_was_measured(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate that is only assumed, because it is not known, is neither declared nor measured."""
    reporter = host.agent.reporter
    found = []
    for declared, measured in ((None, None), (2e8, None), (2e8, 1e8), (None, 1e8)):
        status = None if measured is None else Status(1, 1, (), (), measured)
        monkeypatch.setattr(reporter, "_fetchd", status)
        monkeypatch.setattr(reporter, "_settings", replace(reporter._settings, link_bytes_per_s=declared))
        report = reporter.report()
        found.append((report.network_bytes_per_s, report.declared_bytes_per_s, report.measured_bytes_per_s))
    assert found == [(125e6, None, None), (2e8, 2e8, None), (1e8, 2e8, 1e8), (1e8, None, 1e8)]


def test_fetchds_metrics_stand_behind_the_invokers(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FetchClient, "metrics", lambda self, **_: "thaw_fetchd_pool_bytes 7.0\n")
    page = host.ask("GET", "/metrics")[1].decode()
    assert page.endswith("thaw_fetchd_pool_bytes 7.0\n")
    assert {"thaw_invoker_memory_held_bytes", "thaw_invoker_runs_total"} <= set(re.findall(r"\w+", page))


def test_health_needs_no_token_and_names_the_thread_that_died(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def health() -> tuple[int, dict[str, object]]:
        status, said = host.ask("GET", "/health", headers={})
        return status, json.loads(said)

    assert health() == (200, {"status": "ok"})
    monkeypatch.setattr(lasting, "_dead", ["the thread heartbeat has died: KeyError: 'x'"])
    assert health() == (503, {"status": "failing", "problems": ["the thread heartbeat has died: KeyError: 'x'"]})


def test_a_device_is_of_the_kind_that_its_driver_names(tmp_path: Path) -> None:
    for bus, model in (("0000:9b:00.0", "NVIDIA H200"), ("0000:1b:00.0", "NVIDIA L4")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 42\nDevice Minor: \t 0\n")
    names = ("cuda:0", "cuda:1", "cuda", "cuda:2", "cuda:x", "cpu", "cpu:0")
    kinds = ["NVIDIA L4", "NVIDIA H200", "NVIDIA L4", "cuda", "cuda", "cpu", "cpu"]
    assert [kind_of(name, tmp_path) for name in names] == kinds
    assert kind_of("cuda:0", tmp_path / "no driver") == "cuda"


def test_a_host_with_a_gpu_is_no_cpu_host(host: Host) -> None:
    agent = host.agent
    assert [(d.name, d.kind) for d in agent.reporter.report().devices] == [("cpu", "cpu")]
    settings = replace(host.settings, device="cuda:0")
    other = Reporter(settings, agent.fleet, agent.cells, host.registry, agent.address, Log("test"))
    (device,) = other.report().devices
    assert device.name == "cuda:0"
    assert device.kind != "cpu"
