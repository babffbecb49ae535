"""Makes the transports that use the relay server: redis and tcp."""

from __future__ import annotations

from relay.transports.auto import AutoTransport
from relay.transports.base import GroupEnd, Transport
from relay.transports.redis import RedisTransport
from relay.transports.tcp import TcpTransport


def connect_redis(end: GroupEnd) -> Transport:
    """Make the redis transport.  A stage that others may reach also tries TCP, to each stage that it can reach."""
    link, flow = end.link, end.flow_on_relay
    if not link.host_address:
        return RedisTransport(link.address, end.group_id, end.stage, end.peers, credential=link.credential, flow=flow)
    return AutoTransport(
        link.address,
        end.group_id,
        end.stage,
        end.peers,
        host_address=link.host_address,
        credential=link.credential,
        flow=flow,
    )


def connect_tcp(end: GroupEnd) -> Transport:
    link = end.link
    return TcpTransport(
        link.address,
        end.group_id,
        end.stage,
        end.peers,
        host_address=link.host_address,
        credential=link.credential,
        flow=end.flow_on_relay,
    )
