"""The transports, by the name that a plan and a function's config give them (docs/formats/plan.md).

All but S3 are imported at once: a stem cell has then imported them before a stage needs one.
"""

from __future__ import annotations

from typing import Final

from relay.transports.base import MakeTransport
from relay.transports.object_store import connect_object
from relay.transports.on_relay import connect_redis, connect_tcp
from thaw import extensions
from thaw.extensions import Registry
from thaw.plan import TransportKind

TRANSPORTS: Final = Registry[MakeTransport](
    extensions.TRANSPORTS,
    {
        TransportKind.REDIS: connect_redis,
        TransportKind.TCP: connect_tcp,
        TransportKind.OBJECT: connect_object,
    },
)
