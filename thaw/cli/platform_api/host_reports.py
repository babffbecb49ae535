"""The hosts' own reports, from the API."""

from __future__ import annotations

from thaw import wire
from thaw.cli.platform_api.client import Client
from thaw.host import HostReport

_PATH = "/api/v1/thaw/hosts"


def reports(api: Client) -> list[HostReport]:
    """The reports of the live hosts, sorted by name."""
    live = (wire.from_plain(HostReport, h) for h in api.get(_PATH)["hosts"] if h["live"])
    return sorted(live, key=lambda h: h.host_id)
