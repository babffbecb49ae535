"""Which transport a group's stages use, and where they meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from gateway.scheduler.events import ActionFacts
from gateway.scheduler.settings import SchedulerSettings
from relay.state import credentials
from thaw.errors import ModelUnsupported
from thaw.ids import GroupId
from thaw.plan import PlanTransport, TransportKind


@dataclass(frozen=True, slots=True)
class _MeetingPlace:
    """Where the ends of a transport find each other, and the setting that says so."""

    address: Callable[[SchedulerSettings], str]
    variable: str


_RELAY: Final = _MeetingPlace(lambda settings: settings.relay_url, "THAW_RELAY_URL")
"""Every transport meets at the relay server unless the table says otherwise: one that a package has added does, too."""
_PLACES: Final[Mapping[str, _MeetingPlace]] = {
    TransportKind.OBJECT: _MeetingPlace(lambda settings: settings.object_address, "THAW_TRANSPORT_OBJECT"),
}


def has_transport(settings: SchedulerSettings, facts: ActionFacts) -> bool:
    return bool(_place(facts).address(settings))


def transport_of(settings: SchedulerSettings, facts: ActionFacts, group_id: GroupId) -> PlanTransport:
    """Return the group's transport.  ``auto`` is redis, whose ends find a shorter path by themselves where there is
    one.

    Raises ModelUnsupported when the installation does not have the transport: no retry helps.
    """
    place = _place(facts)
    address = place.address(settings)
    if not address:
        raise ModelUnsupported(
            f"{facts.name} wants a group of several stages over the transport {facts.transport}, "
            f"which this installation does not have",
            hint=f"set {place.variable} of the scheduler, or choose another transport in the function's config",
        )
    kind = TransportKind.REDIS if facts.transport == "auto" else facts.transport
    return PlanTransport(kind, public(address), credentials.ref(group_id))


def _place(facts: ActionFacts) -> _MeetingPlace:
    return _PLACES.get(facts.transport, _RELAY)


def public(url: str) -> str:
    """Return ``url`` without its secrets: many components read plans."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, parts.query, parts.fragment))
