"""What a host says of its fetchd: progress for the ledger, metrics behind its own."""

from __future__ import annotations

import pytest

from invoker.report import _fetches
from relay.fetch_client import FetchClient
from relay.messages import FetchStatus, Status
from tests.invoker.platform import Host
from thaw.host import FetchReport
from thaw.ids import GroupId


def test_the_heartbeat_says_what_is_pending_of_each_stage_and_what_follows_later() -> None:
    fetch = FetchStatus(GroupId("g"), 2, "u", 100, 60, 5.0, 40, 300)
    assert _fetches(Status(1, 1, (), (fetch,), 0.0)) == (FetchReport("g", 100, 60, 5.0, 2, 40, 300),)
    assert _fetches(None) == ()


def test_fetchds_metrics_stand_behind_the_invokers(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FetchClient, "metrics", lambda self, **_: "thaw_fetchd_pool_bytes 7.0\n")
    connection = host.connection()
    connection.request("GET", "/metrics", headers=host.headers())
    page = connection.getresponse().read().decode()
    connection.close()
    assert page.endswith("thaw_fetchd_pool_bytes 7.0\n")
    assert "thaw_invoker_memory_held_bytes" in page
