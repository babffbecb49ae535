"""The control socket: one message, one answer, until the peer hangs up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fetchd import metrics
from fetchd.catalog import Catalog
from fetchd.descriptor_sockets import DescriptorSockets
from fetchd.disclosure import disclosed
from fetchd.fetch_table import FetchTable
from fetchd.inspections import Inspections
from fetchd.pacing import NetworkLink
from fetchd.places import INSPECTIONS, INSPECTIONS_OF_ALL, Places
from fetchd.segments import SegmentStore, fetch_holder
from fetchd.server import peer_pid
from fetchd.slabs import SlabPool
from relay.clients.channel import Channel, ChannelClosed
from relay.protocol.messages import (
    DigestsFound,
    DigestsWanted,
    Done,
    DoorClose,
    DoorGrant,
    DoorList,
    DoorOpen,
    DoorOpened,
    FetchCancel,
    FetchStart,
    FetchWait,
    Inspect,
    Inspected,
    MetricsPage,
    MetricsQuery,
    PoolChanged,
    PoolWatch,
    Refused,
    Status,
    StatusQuery,
    from_plain,
    to_plain,
)
from relay.protocol.messages import Doors as DoorNames
from thaw.errors import PlatformError, ProtocolError, ThawError
from thaw.ids import InstanceId
from thaw.logs import Log
from thaw.model import ModelFacts


class Control:
    def __init__(
        self,
        pool: SlabPool,
        store: SegmentStore,
        catalog: Catalog,
        fetches: FetchTable,
        descriptor_sockets: DescriptorSockets,
        link: NetworkLink,
        log: Log,
    ) -> None:
        self._pool, self._store, self._catalog, self._link = pool, store, catalog, link
        self._fetches, self._descriptor_sockets, self._log = fetches, descriptor_sockets, log
        self._inspections = Inspections(Places(INSPECTIONS, INSPECTIONS_OF_ALL, "inspections of models"))

    def serve(self, channel: Channel) -> None:
        while True:
            try:
                plain, _ = channel.receive()
            except ChannelClosed:
                return
            channel.send(to_plain(self._answer(plain, channel)))

    def _answer(self, plain: Any, channel: Channel) -> Any:
        try:
            return self._dispatch(from_plain(plain), peer_pid(channel))
        except ThawError as e:
            return Refused(e.info())
        except Exception as e:  # noqa: BLE001 - edge of a conversation: the caller must get an answer
            self._log.event("control_defect", error=f"{type(e).__name__}: {e}", message=str(plain)[:200])
            return Refused(PlatformError(f"fetchd: {type(e).__name__}: {e}").info())

    def _dispatch(self, message: Any, peer: int) -> Any:
        match message:
            case Inspect(uri, namespaces):
                question = replace(message, namespaces=()) if message.adapter else uri
                return Inspected(self._inspections.run(question, namespaces, lambda: self._inspect(message)))
            case FetchStart():
                with self._disclosing(message.model.uri):
                    return self._fetches.start(message)
            case DigestsWanted(uri, version, file):
                with self._disclosing(uri):
                    return DigestsFound(self._catalog.digests(uri, version, file))
            case FetchWait(group_id, stage):
                return self._fetches.wait(group_id, stage)
            case FetchCancel():
                self._fetches.cancel(message)
            case DoorOpen(instance_id):
                return DoorOpened(self._descriptor_sockets.open(instance_id, peer))
            case DoorGrant(instance_id, segment_id, group_id, stage):
                self._descriptor_sockets.grant(instance_id, segment_id, fetch_holder(group_id, stage))
            case DoorClose(instance_id):
                self._descriptor_sockets.close(instance_id)
            case DoorList():
                return DoorNames(tuple(InstanceId(i) for i in self._descriptor_sockets.instances()))
            case StatusQuery():
                return self._status()
            case PoolWatch(version, timeout_ms):
                return PoolChanged(self._store.await_change(version, timeout_ms / 1000))
            case MetricsQuery():
                return MetricsPage(self._metrics())
            case _:
                raise ProtocolError(f"fetchd does not answer {type(message).__name__}")
        return Done()

    def _inspect(self, asked: Inspect) -> ModelFacts:
        with self._disclosing(asked.uri):
            if asked.adapter:
                return self._catalog.inspect_adapter(asked.uri, asked.base, asked.max_rank)
            return self._catalog.inspect(asked.uri)

    @contextmanager
    def _disclosing(self, uri: str) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            told = disclosed(uri, e, self._log)
            if told is e:
                raise  # "from" itself would make a reference cycle, which would keep the frames' data alive
            raise told from e

    def _status(self) -> Status:
        pool_bytes = self._pool.n_slabs * self._pool.slab_bytes
        free_bytes = self._pool.free_slabs * self._pool.slab_bytes
        return Status(
            pool_bytes,
            free_bytes,
            self._store.statuses(),
            self._fetches.statuses(),
            self._link.bytes_per_s,
            self._pool.slab_bytes,
        )

    def _metrics(self) -> str:
        status = self._status()
        metrics.RUNNING.set(len(status.fetches))
        metrics.LINK.set(status.link_bytes_per_s)
        metrics.POOL.set(status.pool_bytes)
        metrics.POOL_FREE.set(status.free_bytes)
        return metrics.page()
