"""Which transport a group's stages use, and where they meet."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from gateway.scheduler.events import ActionFacts
from gateway.scheduler.settings import SchedulerSettings
from relay.state import credentials
from thaw.errors import ModelUnsupported
from thaw.ids import GroupId
from thaw.plan import PlanTransport, TransportKind


def has_transport(settings: SchedulerSettings, facts: ActionFacts) -> bool:
    return bool(settings.object_address if facts.transport == TransportKind.OBJECT else settings.relay_url)


def transport_of(settings: SchedulerSettings, facts: ActionFacts, group_id: GroupId) -> PlanTransport:
    """Return the group's transport.  ``auto`` is redis, whose ends find a shorter path by themselves where there is
    one.

    Raises ModelUnsupported when the installation does not have the transport: no retry helps.
    """
    kind = TransportKind.REDIS if facts.transport == "auto" else TransportKind(facts.transport)
    if not has_transport(settings, facts):
        variable = "THAW_TRANSPORT_OBJECT" if kind is TransportKind.OBJECT else "THAW_RELAY_URL"
        raise ModelUnsupported(
            f"{facts.name} wants a group of several stages over the transport {facts.transport}, "
            f"which this installation does not have",
            hint=f"set {variable} of the scheduler, or choose another transport in the function's config",
        )
    address = settings.object_address if kind is TransportKind.OBJECT else public(settings.relay_url)
    return PlanTransport(kind, address, credentials.ref(group_id))


def public(url: str) -> str:
    """Return ``url`` without its secrets: many components read plans."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, parts.query, parts.fragment))
