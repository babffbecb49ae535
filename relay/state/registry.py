"""Hosts, instances, demand, plans and models: typed access for the scheduler and the gateways.

An invoker writes its own host and instances, a gateway its own demand, and the scheduler plans.  The component that
inspected a model last writes ``thaw:models``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import redis

from relay.protocol.messages import DemandAdded, DemandRemoved, HostChanged, InstanceChanged
from relay.state import bus, keys, redis_link, starts
from relay.state.bounded_stream import REPLACE, replace_rows
from relay.state.bus import TELL
from relay.state.clock import StateClock
from thaw import wire
from thaw.errors import ModelUnsupported, NotFound, ProtocolError
from thaw.host import HostReport
from thaw.ids import ActionName, ActivationId, GatewayId, GroupId, HostId, InstanceId, Namespace
from thaw.instance import InstanceRecord, InstanceState
from thaw.model import ModelFacts
from thaw.plan import Plan

T = TypeVar("T")

MODEL_BYTES: Final = 128 << 10
"""The facts of one model: some 50 KiB for one of 160 files.  No quota counts them."""
LEASE_MS: Final = 10_000
"""A host or gateway silent for this long is dropped and its work requeued."""
_REPORT_HOST: Final = (
    REPLACE
    + TELL
    + """
replace_field(KEYS[1], ARGV[1], ARGV[2])
replace_string(KEYS[2], '1', ARGV[3])
if ARGV[4] ~= '' then tell(KEYS[3], ARGV[4]) end
"""
)
_ONCE: Final = """
local token = redis.call('GET', KEYS[1])
if token then return token end
redis.call('UNLINK', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]
"""
_ALIVE: Final = (
    REPLACE
    + """
local was_alive = redis.call('EXISTS', KEYS[1])
replace_string(KEYS[1], '1', ARGV[1])
return was_alive
"""
)
_PUT_INSTANCE: Final = (
    REPLACE
    + TELL
    + """
if ARGV[2] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else replace_field(KEYS[1], ARGV[1], ARGV[2]) end
tell(KEYS[2], ARGV[3])
"""
)
_ADD_DEMAND: Final = (
    TELL
    + """
local function counts(row) return row and not cjson.decode(row).ahead and 1 or 0 end
local more = counts(ARGV[2]) - counts(redis.call('HGET', KEYS[1], ARGV[1]))
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if more ~= 0 and redis.call('HINCRBY', KEYS[3], ARGV[3], more) <= 0 then redis.call('HDEL', KEYS[3], ARGV[3]) end
tell(KEYS[2], ARGV[4])
"""
)
_DROP_DEMAND: Final = (
    TELL
    + """
local held = redis.call('HGET', KEYS[1], ARGV[1])
if not held then return 0 end
held = cjson.decode(held)
if held.gateway ~= ARGV[2] or held.action ~= ARGV[4] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
if not held.ahead and redis.call('HINCRBY', KEYS[3], held.namespace, -1) <= 0 then
    redis.call('HDEL', KEYS[3], held.namespace)
end
tell(KEYS[2], ARGV[3])
return 1
"""
)


class Registry:
    def __init__(self, client: redis.Redis, clock: StateClock | None = None) -> None:
        """``clock`` learns from heartbeats and from readings of the hosts."""
        self._redis = client
        self._clock = clock or StateClock()

    # hosts ---------------------------------------------------------------------------------------------------------

    def report_host(self, report: HostReport, *, announce: bool = False, lease_s: float = 0.0) -> None:
        """``announce``: also publish an event, for components that wait for a change in the report.  ``lease_s``: the
        next report comes within this time, where that is longer than the usual lease."""
        event = bus.pack(HostChanged(report.host_id, True)) if announce else b""
        lasts_ms = max(LEASE_MS, int(1000 * lease_s))
        written_to = (keys.HOSTS, keys.host_lease(report.host_id), keys.EVENTS)
        with redis_link.translated("report a host"):
            pipe = self._redis.pipeline(transaction=True)
            pipe.eval(_REPORT_HOST, 3, *written_to, report.host_id, wire.dumps(report), str(lasts_ms), event)
            self._clock.execute(pipe)

    def forget_host(self, host_id: HostId) -> None:
        with redis_link.translated("forget a host"):
            self._redis.hdel(keys.HOSTS, host_id)
            self._redis.delete(keys.host_lease(host_id))

    def drain_host(self, host_id: HostId, *, drain: bool) -> None:
        """Note (or take back) that a host must take nothing new.  The note stays when the host or a scheduler ends.
        Raises NotFound for a host that never reported."""
        with redis_link.translated("drain a host"):
            if not self._redis.hexists(keys.HOSTS, host_id):
                raise NotFound(f"There is no host {host_id}.", hint="thaw host list")
            pipe = self._redis.pipeline(transaction=True)
            pipe.sadd(keys.DRAINED, host_id) if drain else pipe.srem(keys.DRAINED, host_id)
            bus.append(pipe, HostChanged(host_id, True))
            pipe.execute()

    def hosts(self) -> list[HostReport]:
        """Every host that has reported and was not forgotten, alive or not; ``draining`` by its own or an operator's
        wish."""
        with redis_link.translated("read which hosts are drained"):
            drained: Any = self._redis.smembers(keys.DRAINED)
        names = {redis_link.text(d) for d in drained}
        reports = self._all(keys.HOSTS, HostReport)
        return [replace(r, draining=True) if r.host_id in names else r for r in reports]

    def live_host(self, host_id: HostId) -> HostReport | None:
        """One of :meth:`live_hosts`; None when its lease has run out."""
        with redis_link.translated("read a host"):
            pipe = self._redis.pipeline(transaction=True)
            pipe.hget(keys.HOSTS, host_id)
            pipe.exists(keys.host_lease(host_id))
            pipe.sismember(keys.DRAINED, host_id)
            data, alive, drained = pipe.execute()
        if data is None or not alive:
            return None
        found = next(iter(_readable(HostReport, (data,))), None)
        return replace(found, draining=True) if found is not None and drained else found

    def live_hosts(self) -> list[HostReport]:
        reports = self.hosts()
        if not reports:
            return []
        with redis_link.translated("read host leases"):
            pipe = self._redis.pipeline(transaction=False)
            pipe.mget([keys.host_lease(r.host_id) for r in reports])
            (alive,) = self._clock.execute(pipe)
        return [r for r, lease in zip(reports, alive, strict=True) if lease is not None]

    # instances -----------------------------------------------------------------------------------------------------

    def put_instance(self, record: InstanceRecord) -> None:
        """Store and announce in one transaction, which a full server takes, too; a GONE record is announced and
        removed."""
        kept = record if record.error is None else replace(record, error=bus.short_error(record.error))
        row = b"" if record.state is InstanceState.GONE else wire.dumps(kept)
        event = bus.pack(InstanceChanged(record))
        with redis_link.translated("write an instance"):
            pipe = self._redis.pipeline(transaction=True)
            if record.state is InstanceState.GONE:
                starts.note_failed_instance(pipe, record)
            elif record.state is InstanceState.READY and record.takes_requests:
                starts.note_ready(pipe, record)
            pipe.eval(_PUT_INSTANCE, 2, keys.INSTANCES, keys.EVENTS, record.instance_id, row, event)
            pipe.execute()

    def instances(self) -> list[InstanceRecord]:
        return self._all(keys.INSTANCES, InstanceRecord)

    def instance(self, instance_id: InstanceId) -> InstanceRecord | None:
        return self._one(keys.INSTANCES, instance_id, InstanceRecord)

    # demand --------------------------------------------------------------------------------------------------------

    def add_demand(self, demand: DemandAdded) -> None:
        with redis_link.translated("queue a request"):
            self._redis.eval(
                _ADD_DEMAND,
                3,
                keys.DEMAND,
                keys.EVENTS,
                keys.HELD,
                demand.activation_id,
                wire.dumps(demand),
                demand.namespace,
                bus.pack(demand),
            )

    def n_held(self, namespace: Namespace) -> int:
        """The namespace's requests that wait for an instance, at all gateways."""
        with redis_link.translated("count waiting requests"):
            found: Any = self._redis.hget(keys.HELD, namespace)
        return int(found or 0)

    def drop_demand(self, activation_id: ActivationId, action: ActionName, gateway: GatewayId) -> None:
        """``gateway`` does not wait with the request for ``action`` any more.  If another gateway does and has said so,
        or this one for another action, it stays."""
        event = bus.pack(DemandRemoved(activation_id, action))
        with redis_link.translated("unqueue a request"):
            self._redis.eval(
                _DROP_DEMAND,
                3,
                keys.DEMAND,
                keys.EVENTS,
                keys.HELD,
                activation_id,
                gateway,
                event,
                action,
            )

    def demand(self) -> list[DemandAdded]:
        return self._all(keys.DEMAND, DemandAdded)

    # gateways ------------------------------------------------------------------------------------------------------

    def gateway_alive(self, gateway_id: GatewayId) -> bool:
        """Renew the gateway's lease.  Return False if it had run out, so that the gateway may have been called lost."""
        with redis_link.translated("report a gateway"):
            pipe = self._redis.pipeline(transaction=False)
            pipe.eval(_ALIVE, 1, keys.gateway_lease(gateway_id), str(LEASE_MS))
            (was_alive,) = self._clock.execute(pipe)
            return bool(was_alive)

    def forget_gateway(self, gateway_id: GatewayId) -> None:
        """After a clean stop: other gateways may claim its entries at once."""
        with redis_link.translated("forget a gateway"):
            self._redis.delete(keys.gateway_lease(gateway_id))

    def is_gateway_alive(self, gateway_id: GatewayId) -> bool:
        with redis_link.translated("read a gateway's lease"):
            return bool(self._redis.exists(keys.gateway_lease(gateway_id)))

    # plans and models ----------------------------------------------------------------------------------------------

    def put_plan(self, plan: Plan) -> None:
        with redis_link.translated("write a plan"):
            replace_rows(self._redis, keys.PLANS, {plan.group_id: wire.dumps(plan)})

    def drop_plan(self, group_id: GroupId) -> None:
        with redis_link.translated("drop a plan"):
            self._redis.hdel(keys.PLANS, group_id)

    def plans(self) -> list[Plan]:
        return self._all(keys.PLANS, Plan)

    def plan(self, group_id: GroupId) -> Plan | None:
        return self._one(keys.PLANS, group_id, Plan)

    def put_model(self, facts: ModelFacts) -> ModelFacts:
        """Return the facts as they are written: a model whose parts take too many words is not divided.  Raises
        ModelUnsupported for one whose files do."""
        data = wire.dumps(facts)
        if len(data) > MODEL_BYTES:
            facts = replace(facts, parts=None, architecture=facts.architecture[:200])
            data = wire.dumps(facts)
        if len(data) > MODEL_BYTES:
            raise ModelUnsupported(
                f"{facts.asked_for:.200}: what is known of its files has more than {MODEL_BYTES} bytes"
            )
        with redis_link.translated("write a model's facts"):
            self._redis.hset(keys.MODELS, facts.asked_for, data)
        return facts

    def drop_models(self, uris: Sequence[str]) -> None:
        if uris:
            with redis_link.translated("drop models' facts"):
                self._redis.hdel(keys.MODELS, *uris)

    def model(self, uri: str) -> ModelFacts | None:
        return self._one(keys.MODELS, uri, ModelFacts)

    def models(self) -> list[ModelFacts]:
        return self._all(keys.MODELS, ModelFacts)

    # the scheduler's fencing token -----------------------------------------------------------------------------------

    def scheduler_epoch(self) -> int:
        """The epoch of the newest scheduler; 0 before the first."""
        with redis_link.translated("read the scheduler's epoch"):
            epoch: Any = self._redis.get(keys.SCHEDULER_EPOCH)
        return int(epoch or 0)

    # the installation's bearer token -------------------------------------------------------------------------------

    def host_token(self, new_token: str) -> str:
        """The token between platform processes; ``new_token`` becomes it if there is none yet."""
        with redis_link.translated("read the installation's token"):
            return redis_link.text(self._redis.eval(_ONCE, 1, keys.HOST_TOKEN, new_token))

    def _all(self, key: str, cls: type[T]) -> list[T]:
        with redis_link.translated(f"read {key}"):
            rows: Any = self._redis.hvals(key)
        return list(_readable(cls, rows))

    def _one(self, key: str, field: str, cls: type[T]) -> T | None:
        with redis_link.translated(f"read {key}"):
            data: Any = self._redis.hget(key, field)
        return None if data is None else wire.loads(cls, data)


def _readable(cls: type[T], rows: Iterable[bytes]) -> Iterable[T]:
    for row in rows:
        try:
            yield wire.loads(cls, row)
        except ProtocolError:
            continue  # written by another version: only its owner may judge it, and will write it again
