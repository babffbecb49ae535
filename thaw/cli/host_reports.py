"""The hosts' own reports: from the API, else, for the platform that runs here, from its state server."""

from __future__ import annotations

from thaw import wire
from thaw.cli.client import ApiError, Client
from thaw.errors import ThawError
from thaw.host import HostReport

_PATH = "/api/v1/hosts"


def reports(api: Client) -> list[HostReport]:
    """By name.  Raises ApiError when the API does not tell and the platform is not this machine's."""
    try:
        return sorted((wire.from_plain(HostReport, h) for h in api.get(_PATH)), key=lambda h: h.host_id)
    except ApiError as e:
        if e.http_status not in (404, 405):
            raise
        found = _local(api)
        if found is None:
            raise
        return found


def links(api: Client) -> dict[str, float]:
    """Bytes per second of each host's link; empty where nobody tells (it is only a comparison)."""
    try:
        return {str(h.host_id): h.network_bytes_per_s for h in reports(api) if h.network_bytes_per_s > 0}
    except ThawError:
        return {}


def _local(api: Client) -> list[HostReport] | None:
    from thaw.dev.layout import default_layout

    platform = default_layout().read_platform()
    if platform is None or platform.apihost != api.apihost:
        return None
    from relay.redis_link import connect
    from relay.registry import Registry

    client = connect(platform.state_url)
    try:
        return sorted(Registry(client).live_hosts(), key=lambda h: h.host_id)
    finally:
        client.close()
