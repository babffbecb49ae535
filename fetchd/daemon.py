"""fetchd put together: pool, catalogue, fetches, descriptor sockets, control socket."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

from fetchd.address_gate import gate_of
from fetchd.catalog import Catalog
from fetchd.control import Control
from fetchd.credentials import credentials_of
from fetchd.descriptor_sockets import DescriptorSockets
from fetchd.fetch import Machinery
from fetchd.fetch_table import FetchTable
from fetchd.janitor import Heart, Janitor
from fetchd.marks import InterfaceWatch
from fetchd.pacing import Discipline, NetworkLink
from fetchd.read_once import Board
from fetchd.segments import SegmentStore
from fetchd.server import UnixServer
from fetchd.settings import FetchdSettings
from fetchd.slabs import SlabPool
from fetchd.sources import registry
from fetchd.sources.file import roots_of
from thaw.hub.links import endpoint_of
from thaw.logs import Log
from thaw.settings import SettingError

_MIB = 1024 * 1024
_CONVERSATIONS = 1024
"""Upper limit of open connections.  A caller that waits for a fetch occupies one."""
_INDEX_RETRIES = 4
"""Four attempts with the read timeout of 10 s take less than the minute that callers of Inspect wait."""


class Daemon:
    """Serves from construction to :meth:`stop`."""

    def __init__(self, settings: FetchdSettings, log: Log) -> None:
        _check(settings)
        registry.prepare(settings, log)
        self._janitor, self._heart = Janitor(), Heart()
        slab_bytes = settings.slab_mb * _MIB
        self._pool = SlabPool(settings.pool_mb * _MIB // slab_bytes, slab_bytes, log)
        self._pool.on_returned = partial(self._janitor.call_later, 0.0, self._scrub)
        store = SegmentStore(self._pool, retain=settings.retain)
        self._stopping = threading.Event()
        opener = partial(registry.open_source, settings=settings, huge=self._pool.huge)
        retries = min(settings.retries, _INDEX_RETRIES)
        catalog = Catalog(opener, retries, self._stopping, self._janitor.call_later, settings.inspection_s)
        discipline: Discipline = "equal" if settings.discipline == "equal" else "edf"
        link = NetworkLink(settings.link_bytes_per_s, discipline, yields=settings.yields == "pace")
        interfaces = InterfaceWatch(link, log if settings.yields == "auto" else None)
        machinery = Machinery(catalog, link, interfaces, Board(store), settings, log)
        self._fetches = FetchTable(store, machinery, self._janitor, self._heart, log)
        Path(settings.socket).parent.mkdir(parents=True, exist_ok=True)
        self._descriptor_sockets = DescriptorSockets(settings.descriptor_sockets, store, log)
        control = Control(self._pool, store, catalog, self._fetches, self._descriptor_sockets, link, log)
        self._server = UnixServer(settings.socket, 0o600, control.serve, log, most=_CONVERSATIONS)

    def stop(self) -> None:
        """Stop serving.  Readers of unfinished segments get an error; readers of finished ones keep their mapping."""
        self._stopping.set()
        self._server.close()
        self._fetches.stop()
        self._descriptor_sockets.stop()
        self._heart.stop()
        self._janitor.stop()

    def _scrub(self) -> None:
        while self._pool.scrub_one():
            pass


def _check(settings: FetchdSettings) -> None:
    gate_of(settings)
    roots_of(settings)
    credentials_of(settings)
    endpoint_of(settings.hub_endpoint)
    if settings.slab_mb < 2 or settings.slab_mb % 2:
        raise SettingError(f"THAW_FETCHD_SLAB_MB={settings.slab_mb} is not a multiple of 2", hint="try 64")
    if settings.pool_mb < settings.slab_mb:
        raise SettingError(
            f"THAW_FETCHD_POOL_MB={settings.pool_mb} holds no slab of {settings.slab_mb} MiB",
            hint="make the pool larger than the largest model",
        )
    if settings.connections < 1 or settings.retries < 1:
        raise SettingError("THAW_FETCHD_CONNECTIONS and THAW_FETCHD_RETRIES must be at least 1", hint="try 4 and 6")
    if settings.discipline not in ("edf", "equal"):
        raise SettingError(
            f"THAW_LEDGER_DISCIPLINE={settings.discipline!r} is not known", hint="set it to edf or equal"
        )
    if settings.yields not in ("auto", "mark", "pace"):
        raise SettingError(f"THAW_FETCHD_YIELDS={settings.yields!r} is not known", hint="set it to auto, mark or pace")
    if settings.link_bytes_per_s is not None and settings.link_bytes_per_s <= 0:
        raise SettingError("THAW_FETCHD_LINK_BYTES_PER_S must be above 0", hint="leave it empty for no pacing")
