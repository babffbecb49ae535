"""Which store an object transport uses, by the scheme of its URI."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from relay.transports.base import Flow, GroupEnd
from relay.transports.object import CHUNK_BYTES, ObjectTransport, Store
from relay.transports.object_dir import DirStore
from thaw.errors import PlatformError


def connect_object(end: GroupEnd) -> ObjectTransport:
    uri = end.link.address
    open_store = _STORES.get(urlsplit(uri).scheme)
    if open_store is None:
        raise PlatformError(f"the object transport does not know {uri!r}", hint="use s3://bucket/prefix or file:///dir")
    flow = end.flow or Flow(chunk_bytes=CHUNK_BYTES)
    secret = end.link.credential.secret
    return ObjectTransport(open_store(uri), end.group_id, end.stage, end.peers, secret=secret, flow=flow)


def _directory(uri: str) -> Store:
    return DirStore(Path(unquote(urlsplit(uri).path)))


def _s3(uri: str) -> Store:
    from relay.transports.object_s3 import S3Store  # botocore takes 0.1 s to import
    from thaw.s3 import S3Access

    return S3Store(uri, S3Access.from_environment(os.environ))


_STORES: Final[Mapping[str, Callable[[str], Store]]] = {"file": _directory, "s3": _s3}
