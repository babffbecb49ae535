"""The scheduler's metrics for Prometheus, and the rights to read them."""

from __future__ import annotations

import http.client
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from gateway.scheduler.decisions import StartGroup
from gateway.scheduler.io import metrics
from gateway.scheduler.io.metrics_port import MetricsPort
from relay.protocol.messages import Start
from tests.scheduler.facts import CHAT, HELLO, MIB, chat, hello, report
from tests.scheduler.groups import group_world
from tests.scheduler.world import llm_world, of, world


def value(name: str, **labels: str) -> float:
    return metrics.REGISTRY.get_sample_value(name, labels) or 0.0


def test_the_longest_queues_are_named_and_the_others_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LARGEST", 1)
    w = world(report(memory_mb=256), facts=hello())
    for _ in range(3):
        w.ask(HELLO)
    w.deploy(hello(name=CHAT))
    w.ask(CHAT)
    metrics.look(w.view, w.now)
    assert value("thaw_scheduler_waiting_requests", action=HELLO) == 3
    assert value("thaw_scheduler_waiting_requests", action=metrics.OTHERS) == 1
    assert value("thaw_scheduler_starting_groups") == 1


def test_a_links_promises_are_told_in_seconds_and_gone_when_they_are_kept() -> None:
    w = llm_world(report(network_bytes_per_s=50 * MIB), facts=chat(slo_ttft_s=60.0))
    assert len(of(w.ask(CHAT), StartGroup)) == 1
    metrics.look(w.view, w.now)
    assert value("thaw_scheduler_link_promised_seconds", host="h0") == pytest.approx(2.0)  # 100 MiB
    assert value("thaw_scheduler_ledger_pending_bytes") == pytest.approx(100 * MIB)
    w.view.hosts[next(iter(w.view.hosts))].ledger.advance(w.now + 3.0)
    metrics.look(w.view, w.now + 3.0)
    assert value("thaw_scheduler_link_promised_seconds", host="h0") == 0.0


def test_starts_are_counted_by_what_was_promised() -> None:
    w = group_world(facts=chat(slo_ttft_s=0.1))
    before = value("thaw_scheduler_admissions_total", outcome="fallback")
    decided = w.ask(CHAT)
    event = next(iter(w.view.demand.values())).demand
    metrics.decided(w.view, [event], decided, 0.001)
    assert value("thaw_scheduler_admissions_total", outcome="fallback") == before + 1
    assert value("thaw_scheduler_decision_seconds_count", event="DemandAdded") >= 1


def test_a_prediction_is_laid_beside_what_happened_and_a_start_that_beat_its_plans_bound_is_counted() -> None:
    below = value("thaw_scheduler_starts_below_bound_total")
    metrics.foretold(4, 2.0, 1.5, 3.0)
    metrics.foretold(4, 2.0, None, 3.0)
    metrics.foretold(4, 2.0, 1.5, 1.4)
    assert value("thaw_scheduler_ttft_ratio_bucket", stages="4", le="1.5") >= 1
    assert value("thaw_scheduler_starts_below_bound_total") == below + 1


def page(address: str, authorization: str, path: str = "/metrics") -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request("GET", path, headers={"Authorization": authorization} if authorization else {})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def test_the_process_tells_them_to_who_has_the_installations_token_and_to_nobody_else(
    platform: Any, tmp_path: Path
) -> None:
    host = platform.host()
    platform.action()
    scheduler = platform.scheduler()
    activation = platform.ask()
    host.commands.wait(Start)
    platform.served(activation)
    lines = [json.loads(line) for line in (tmp_path / "scheduler-0.log").read_text().splitlines() if line[0] == "{"]
    address = next(line["metrics"] for line in lines if line["event"] == "standing_by")
    status, text = page(address, f"Bearer {platform.registry.host_token('x')}")
    assert status == 200
    found = dict(re.findall(r"^(thaw_scheduler_\S+) ([\d.e+-]+)$", text, re.M))
    assert float(found["thaw_scheduler_leading"]) == 1.0
    assert float(found['thaw_scheduler_decisions_total{type="StartGroup"}']) == 1.0
    assert float(found['thaw_scheduler_admissions_total{outcome="no_deadline"}']) == 1.0
    assert page(address, "")[0] == 401
    assert page(address, "Bearer " + "x" * 43)[0] == 401
    status, text = page(address, "", "/health")
    assert (status, json.loads(text)) == (200, {"status": "ok"})
    scheduler.send_signal(signal.SIGTERM)
    assert scheduler.wait(30) == 0


def test_a_scrapers_token_opens_them_without_the_installations() -> None:
    port = MetricsPort("127.0.0.1:0", lambda: "installation", "scraper")
    try:
        assert [page(port.address, f"Bearer {token}")[0] for token in ("scraper", "installation")] == [200, 200]
        assert [page(port.address, f"Bearer {token}")[0] for token in ("", "scrape")] == [401, 401]
    finally:
        port.close()
