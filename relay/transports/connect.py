"""The transport a plan asks for: what a stage calls with the link it got at ``/init``."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from relay.protocol.messages import GroupLink
from relay.transports.auto import AutoTransport
from relay.transports.base import MAX_STAGES, Flow, Transport
from relay.transports.object import CHUNK_BYTES as OBJECT_CHUNK_BYTES
from relay.transports.object import ObjectTransport, Store
from relay.transports.object_dir import DirStore
from relay.transports.redis import RedisTransport
from relay.transports.tcp import TcpTransport
from thaw.errors import PlatformError
from thaw.ids import GroupId
from thaw.plan import TransportKind


def connect(link: GroupLink, group_id: GroupId, stage: int, n_stages: int, *, flow: Flow | None = None) -> Transport:
    """Stage ``stage`` of ``n_stages``.

    Kind redis with a ``host_address`` tries TCP between two ends that both have one, and keeps to redis where that
    does not work (auto.py).  Raises PlatformError for a link that says nothing this side can follow, WorkerLost for
    a credential that the relay does not know.
    """
    if not 0 <= stage < n_stages <= MAX_STAGES:
        raise PlatformError(f"stage {stage} of {n_stages}")
    peers = [peer for peer in range(n_stages) if peer != stage]
    if link.kind is not TransportKind.OBJECT:
        flow = flow or Flow.of_group(n_stages)
    if link.kind is TransportKind.REDIS and link.host_address:
        return AutoTransport(link.address, group_id, stage, peers, host_address=link.host_address,
                             credential=link.credential, flow=flow)  # fmt: skip
    if link.kind is TransportKind.REDIS:
        return RedisTransport(link.address, group_id, stage, peers, credential=link.credential, flow=flow)
    if link.kind is TransportKind.TCP:
        return TcpTransport(link.address, group_id, stage, peers, host_address=link.host_address,
                            credential=link.credential, flow=flow)  # fmt: skip
    if link.kind is TransportKind.OBJECT:
        return ObjectTransport(_store(link.address), group_id, stage, peers, secret=link.credential.secret,
                               flow=flow or Flow(chunk_bytes=OBJECT_CHUNK_BYTES))  # fmt: skip
    raise PlatformError(f"a group of {n_stages} stages has no transport", hint="the plan says: none")


def _store(uri: str) -> Store:
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return DirStore(Path(unquote(parts.path)))
    if parts.scheme == "s3":
        from relay.transports.object_s3 import S3Store  # botocore takes 0.1 s: for those who need it
        from thaw.s3 import S3Access

        return S3Store(uri, S3Access.from_environment(os.environ))
    raise PlatformError(f"the object transport does not know {uri!r}", hint="use s3://bucket/prefix or file:///dir")
