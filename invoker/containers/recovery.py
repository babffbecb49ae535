"""The recovery of an invoker that follows another one: it adopts containers that serve or wait, ends the others, and
reports both.  fetchd outlives an invoker, so the fetches of starts that ended with the last one are cancelled.

A container can be adopted if it speaks as this version does (CONTRACT), answers, and is no other living invoker's.  Of
the stem cells only those of Python functions are: that of a model has a descriptor socket of a fetchd that may be gone.
docs/decisions/0052-an-invoker-leaves-its-containers-to-the-next.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from invoker.containers import adapters, spare_cells
from invoker.containers.consolidate import Consolidating, as_worker, health_of
from invoker.containers.fleet import Fleet
from invoker.containers.instance import State
from invoker.containers.last_output import printed_by
from invoker.containers.live import Live
from invoker.containers.stem_cells import LABEL, StemCells
from invoker.drivers.base import CONTRACT, Owned
from relay.protocol.messages import FILE_READER
from relay.state.records import Records
from relay.state.registry import Registry
from thaw import wire
from thaw.action import KIND_LLM, KIND_PYTHON, Action
from thaw.clock import wall_ms
from thaw.errors import NotFound, PlatformError, ProtocolError, ThawError, WorkerLost
from thaw.ids import GroupId, HostId, InstanceId, Namespace
from thaw.instance import InstanceRecord, InstanceState
from thaw.logs import Log

_OWN_FETCHES: Final = (f"{adapters.LABEL}-", f"{spare_cells.LABEL}-")
"""An invoker begins these for itself, under names of its own."""


def recover(
    fleet: Fleet,
    cells: StemCells,
    registry: Registry,
    records: Records,
    host_id: HostId,
    address: str,
    consolidating: Consolidating,
    log: Log,
) -> None:
    """Call this before the first command is read.  Raises Unavailable when the state server is away."""
    fleet.epoch = registry.scheduler_epoch()  # an instance that ends before the first command needs it for fetchd
    known = {r.instance_id: r for r in registry.instances() if r.host_id == host_id}
    adopted: set[InstanceId] = set()
    in_use: set[InstanceId] = set()
    left: list[Owned] = []
    for owned in fleet.driver.list_owned():
        if _is_waiting_cell(owned):
            cells.adopt(owned)
            log.event("stem_cell_adopted", container_id=owned.handle.container_id)
            continue
        live = _revived(owned, records, address)
        if live is None or not fleet.driver.take_over(owned):
            left.append(owned)
            continue
        _adopt(fleet, owned, live)
        if live.record.is_consolidating:
            consolidating.resume(live)
        adopted.add(live.record.instance_id)
        in_use.add(live.descriptor_socket_id)
        log.event("instance_adopted", instance_id=live.record.instance_id)
    _end(fleet, left, log)
    _close_descriptor_sockets(fleet, in_use, log)
    kept = {record.group_id for instance_id, record in known.items() if instance_id in adopted}
    _cancel_fetches(fleet, {record.group_id for record in known.values()} - kept, log)
    lost = WorkerLost("the host's invoker was restarted and the container is no more").info()
    for instance_id, record in known.items():
        if instance_id not in adopted:
            fleet.publisher.put(replace(record, state=InstanceState.GONE, error=lost, inflight=0))


def _end(fleet: Fleet, left: Sequence[Owned], log: Log) -> None:
    """End containers that are not adopted, and first save their output, which is removed with them."""
    printed = {o.handle.container_id: printed_by(o.handle) for o in left if o.labels.get("role") == "instance"}
    for owned in fleet.driver.end(left):
        text = printed.get(owned.handle.container_id)
        if not text:
            continue
        try:
            record = wire.loads(InstanceRecord, owned.labels["record"])
        except (ProtocolError, KeyError) as e:
            log.event("last_output_lost", container_id=owned.handle.container_id, error=str(e))
            continue
        fleet.last_output.keep(record, text, "its host's invoker was restarted")


def _is_waiting_cell(owned: Owned) -> bool:
    if owned.handle.kind != KIND_PYTHON or owned.labels.get("role") != LABEL:
        return False
    if not (owned.alive and owned.is_current and owned.labels.get("contract") == CONTRACT):
        return False
    health = health_of(owned.handle.socket_path)
    return health is not None and health.get("state") == "new"


def _revived(owned: Owned, records: Records, address: str) -> Live | None:
    """The instance of a container that was READY, still answers, and whose function still exists."""
    if not owned.alive or owned.labels.get("role") != "instance" or owned.labels.get("contract") != CONTRACT:
        return None
    try:
        record = wire.loads(InstanceRecord, owned.labels["record"])
        health = health_of(owned.handle.socket_path)
        if record.state is not InstanceState.READY or health is None or health.get("state") != "ready":
            return None
        if owned.handle.kind == KIND_PYTHON and health.get("inflight"):
            return None  # nobody waits for the run's end, and another one must not run beside it
        function = records.action(Namespace(record.action.partition("/")[0]), record.action)
    except (ProtocolError, NotFound, KeyError):
        return None
    record = _as_its_container_says(record, function, health)
    live = Live(replace(record, address=address, inflight=0, idle_since_wall_ms=wall_ms()), owned.labels["kind"])
    live.function, live.served, live.has_descriptor_socket = function, True, live.kind == KIND_LLM
    live.fetching = live.in_group  # a stage that keeps the whole model may still be fetching the rest
    return live


def _as_its_container_says(record: InstanceRecord, function: Action, health: dict[str, Any]) -> InstanceRecord:
    """A stage may have become a worker, or be about to, without this host's last invoker having noted it.  Either way
    somebody must read the outcome, whose trace the last invoker has not written."""
    has_switched = record.n_stages > 1 and health.get("stages") == 1
    if has_switched:
        record = as_worker(record, function)
    return replace(record, is_consolidating=has_switched or health.get("consolidating") is True)


def _adopt(fleet: Fleet, owned: Owned, live: Live) -> None:
    fleet.ledger.adopt(live.record.instance_id, live.record.reserve_bytes)
    fleet.add(live)
    fleet.attach(live, owned.handle)
    if live.logs is not None:
        live.logs.skip()
    live.state = State.IDLE
    fleet.driver.adopt(owned)
    fleet.announce(live)


def _cancel_fetches(fleet: Fleet, groups: set[GroupId], log: Log) -> None:
    """Cancel what fetchd still fetches for these groups, and for adapters and checks of the last invoker.  Otherwise it
    would fetch to the last byte, and take its part of the link and of the pool for nobody."""
    try:
        of_fetches = {GroupId(fetch.group_id) for fetch in fleet.fetch.status().fetches}
        for group_id in sorted(g for g in of_fetches if g in groups or g.startswith(_OWN_FETCHES)):
            fleet.fetch.cancel(group_id, fleet.epoch)
            log.event("fetch_cancelled", group_id=group_id)
    except ThawError as e:
        log.event("fetches_not_cancelled", error=e.message)


def _close_descriptor_sockets(fleet: Fleet, used: set[InstanceId], log: Log) -> None:
    try:
        for instance_id in fleet.fetch.descriptor_sockets():
            if instance_id not in used and not instance_id.startswith(FILE_READER):
                fleet.fetch.close_descriptor_socket(instance_id)
    except PlatformError as e:
        log.event("descriptor_sockets_not_checked", error=e.message)  # fetchd is down or new: then it has none either
