"""The transport that a plan asks for: a stage calls this with the link that it got at ``/init``."""

from __future__ import annotations

from relay.protocol.messages import GroupLink
from relay.transports.base import MAX_STAGES, Flow, GroupEnd, Transport
from relay.transports.registry import TRANSPORTS
from thaw.errors import PlatformError
from thaw.ids import GroupId
from thaw.plan import TransportKind


def connect(link: GroupLink, group_id: GroupId, stage: int, n_stages: int, *, flow: Flow | None = None) -> Transport:
    """Make the transport of stage ``stage`` of ``n_stages``.  Raises PlatformError if the link names no transport that
    this container has, WorkerLost for a credential that the relay server does not know.
    """
    if not 0 <= stage < n_stages <= MAX_STAGES:
        raise PlatformError(f"stage {stage} of {n_stages}")
    if link.kind == TransportKind.NONE:
        raise PlatformError(f"a group of {n_stages} stages has no transport", hint="the plan says: none")
    make = TRANSPORTS.find(link.kind)
    if make is None:
        raise PlatformError(
            f"the plan asks for transport {link.kind!r}, which this container does not have",
            hint=f"known transports: {TRANSPORTS.known()}",
        )
    return make(GroupEnd(link, group_id, stage, n_stages, flow))
