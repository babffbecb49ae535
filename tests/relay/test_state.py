"""The connection, the registry, the records and the lease, with a real state server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import redis

from relay.protocol.messages import DemandAdded
from relay.state import keys, lease, redis_link
from relay.state.api_keys import ApiKey, ApiKeys, Subject
from relay.state.code import UNNAMED_TTL_S
from relay.state.lease import SchedulerLease
from relay.state.records import RECORD_TTL_S, RELEASED_CODES, Ended, Records
from relay.state.registry import Registry
from tests.conftest import ValkeyServer
from tests.relay.samples import GROUP, GUEST, INSTANCE, PLAN, pending, record
from thaw import wire
from thaw.action import Action, Exec, Limits
from thaw.errors import Conflict, NotFound, PlatformError, ProtocolError, Unavailable
from thaw.host import Device, HostReport
from thaw.ids import ActionName, ActivationId, GatewayId, HostId, Namespace
from thaw.instance import InstanceState
from thaw.tracing.trace import Phase, event

CHAT = ActionName("guest/chat")
ACTION = Action(CHAT, GUEST, "0.0.1", Exec("python:3.11", "def main(a): return a"), Limits())
HOST = HostReport(HostId("h"), "boot", "127.0.0.1:1", (Device("cpu", "cpu", 10, 5),), 2, 1e9, "none", "process", 1, 2)


def test_a_host_whose_lease_ended_is_known_but_not_live(client: redis.Redis, registry: Registry) -> None:
    registry.report_host(HOST)
    assert registry.live_hosts() == [HOST]
    client.delete(keys.host_lease("h"))
    assert (registry.live_hosts(), registry.hosts()) == ([], [HOST])
    registry.forget_host(HOST.host_id)
    assert registry.hosts() == []


def test_an_instance_that_is_gone_is_removed_and_announced(client: redis.Redis, registry: Registry) -> None:
    registry.put_instance(INSTANCE)
    assert registry.instances() == [INSTANCE]
    registry.put_instance(replace(INSTANCE, state=InstanceState.GONE))
    assert registry.instances() == []
    assert client.xlen(keys.EVENTS) == 2


def test_a_dead_gateways_demand_is_dropped_unless_another_has_claimed_it(
    client: redis.Redis, registry: Registry
) -> None:
    left, claimed = (DemandAdded(ActivationId(c * 32), CHAT, GUEST, GatewayId("dead"), 5) for c in "ab")
    registry.add_demand(left)
    registry.add_demand(replace(claimed, gateway=GatewayId("new")))  # the scheduler does not know this yet
    before = client.xlen(keys.EVENTS)
    for demand in (left, claimed):
        registry.drop_demand(demand.activation_id, CHAT, GatewayId("dead"))
    registry.drop_demand(ActivationId("c" * 32), CHAT, GatewayId("dead"))
    assert registry.demand() == [replace(claimed, gateway=GatewayId("new"))]
    assert client.xlen(keys.EVENTS) == before + 1, "removed: said once, of the one that was"


def test_a_plan_is_kept_under_its_group_and_a_row_of_another_version_is_passed_over(
    client: redis.Redis, registry: Registry
) -> None:
    client.hset(keys.PLANS, "x", b'{"version": "later"}')
    registry.put_plan(PLAN)
    assert registry.plans() == [PLAN]
    assert registry.plan(GROUP) == PLAN
    registry.drop_plan(GROUP)
    assert registry.plans() == []


def test_the_installation_token_is_made_once(registry: Registry) -> None:
    assert [registry.host_token("first"), registry.host_token("second")] == ["first", "first"]


def test_of_two_who_write_the_same_version_of_an_action_one_is_refused(client: redis.Redis, records: Records) -> None:
    records.put_action(ACTION, last=None)
    with pytest.raises(Conflict, match="Concurrent modification"):
        records.put_action(replace(ACTION, publish=True), last=None)
    for _ in range(2):  # the answer to the first was lost
        records.put_action(replace(ACTION, version="0.0.2"), last="0.0.1")
    with pytest.raises(Conflict, match="Concurrent modification"):
        records.put_action(replace(ACTION, version="0.0.2", publish=True), last="0.0.1")
    assert records.action(GUEST, CHAT) == replace(ACTION, version="0.0.2")
    assert [a.name for a in records.all_actions()] == [CHAT]
    records.delete_action(GUEST, CHAT)
    with pytest.raises(NotFound):
        records.action(GUEST, CHAT)
    assert records.last_version(CHAT) == "0.0.2"
    assert 0 < int(client.ttl(keys.last_version(CHAT))) <= RECORD_TTL_S
    records.put_action(replace(ACTION, version="0.0.3"), last="0.0.2")
    assert client.ttl(keys.last_version(CHAT)) == -1


def with_code(records: Records, version: str, *pieces: bytes) -> Action:
    upload = records.code.begin()
    for piece in pieces:
        upload.add(piece)
    return replace(ACTION, version=version, exec=Exec("python:3.11", upload.end()))


def pass_by(records: Records) -> None:
    """Write and delete more actions with code than a namespace has released codes."""
    for i in range(RELEASED_CODES + 1):
        other = replace(with_code(records, "0.0.1", b"def"), name=ActionName(f"guest/other-{i}"))
        records.put_action(other, last=None)
        records.delete_action(GUEST, other.name)


def code_key(action: Action) -> str:
    assert action.exec.stored is not None
    return keys.code(action.exec.stored.id)


def test_code_stays_while_an_action_names_it(client: redis.Redis, records: Records) -> None:
    first = with_code(records, "0.0.1", b"abc", b"def")
    assert 0 < int(client.ttl(code_key(first))) <= UNNAMED_TTL_S
    records.put_action(first, last=None)
    assert client.ttl(code_key(first)) == -1
    assert list(records.code.pieces(records.action(GUEST, CHAT))) == [b"abc", b"def"]
    second = with_code(records, "0.0.2", b"ghi")
    records.put_action(second, last="0.0.1", old=first)
    assert client.ttl(code_key(second)) == -1
    assert 0 < int(client.ttl(code_key(first))) <= UNNAMED_TTL_S
    assert list(records.code.pieces(first)) == [b"abc", b"def"], "who reads it now reads to the end"
    assert records.delete_action(GUEST, CHAT) == second
    assert int(client.ttl(code_key(second))) > 0


def test_a_namespace_has_few_codes_that_no_action_names(client: redis.Redis, records: Records) -> None:
    """Otherwise a tenant that updates, or deletes and creates, all the time would fill the state server."""
    old, versions = None, [f"0.0.{i}" for i in range(1, 8)]
    for last, version in zip(["", *versions], versions, strict=False):
        new = with_code(records, version, b"abc")
        records.put_action(new, last=last or None, old=old)
        old = new
    assert len(client.keys("thaw:code:*")) == RELEASED_CODES + 1
    pass_by(records)
    assert len(client.keys("thaw:code:*")) == RELEASED_CODES + 1
    theirs = replace(with_code(records, "0.0.1", b"abc"), name=ActionName("b/f"), namespace=Namespace("b"))
    records.put_action(theirs, last=None)
    records.delete_action(theirs.namespace, theirs.name)
    assert len(client.keys("thaw:code:*")) == RELEASED_CODES + 2
    assert client.ttl(keys.released_code("guest")) > 0


def test_the_code_of_a_deleted_action_is_read_to_its_end_while_others_are_deleted(records: Records) -> None:
    actions = [replace(with_code(records, "0.0.1", b"abc"), name=ActionName(f"guest/a{i}")) for i in range(3)]
    for action in actions:
        records.put_action(action, last=None)
    first, *_ = [records.delete_action(GUEST, action.name) for action in actions]
    assert list(records.code.pieces(first)) == [b"abc"]


def test_an_action_that_was_deleted_while_it_was_updated_stays_deleted(client: redis.Redis, records: Records) -> None:
    """If it were written again, it would name code that expires."""
    first = with_code(records, "0.0.1", b"abc")
    records.put_action(first, last=None)
    read = records.action(GUEST, CHAT)
    records.delete_action(GUEST, CHAT)
    with pytest.raises(Conflict):
        records.put_action(replace(read, version="0.0.2"), last="0.0.1", old=read)
    with pytest.raises(NotFound):
        records.action(GUEST, CHAT)
    assert int(client.ttl(code_key(first))) > 0


def test_code_that_an_action_takes_back_is_released_no_longer(records: Records) -> None:
    first = with_code(records, "0.0.1", b"abc")
    records.put_action(first, last=None)
    records.delete_action(GUEST, CHAT)
    again = replace(first, version="0.0.2")
    records.put_action(again, last="0.0.1")
    pass_by(records)
    assert list(records.code.pieces(records.action(GUEST, CHAT))) == [b"abc"]


@dataclass(frozen=True)
class OldExec:
    kind: str
    code: str = ""


@dataclass(frozen=True)
class OldAction:
    name: str
    exec: OldExec


def test_a_reader_that_knows_no_stored_code_refuses_the_action(client: redis.Redis, records: Records) -> None:
    """Otherwise an older gateway would write the action back without its code, which would then be lost."""
    records.put_action(with_code(records, "0.0.1", b"abc"), last=None)
    row = client.hget(keys.actions(GUEST), CHAT)
    assert isinstance(row, bytes)
    with pytest.raises(ProtocolError, match=r"\$\.exec\.code: expected str"):
        wire.loads(OldAction, row)


def test_code_of_an_action_that_was_not_written_expires(client: redis.Redis, records: Records) -> None:
    records.put_action(ACTION, last=None)
    late = with_code(records, "0.0.2", b"abc")
    with pytest.raises(Conflict):
        records.put_action(late, last="0.0.0", old=ACTION)
    assert int(client.ttl(code_key(late))) > 0
    client.delete(code_key(late))
    with pytest.raises(Unavailable, match="was lost before the action was written"):
        records.put_action(late, last="0.0.1", old=ACTION)
    assert records.action(GUEST, CHAT) == ACTION
    with pytest.raises(Unavailable, match="was changed or deleted while its code was read"):
        list(records.code.pieces(late))


def test_code_that_is_lost_is_not_taken_for_replaced(client: redis.Redis, records: Records) -> None:
    action = with_code(records, "0.0.1", b"abc")
    records.put_action(action, last=None)
    client.delete(code_key(action))
    with pytest.raises(PlatformError, match="deploy the action again"):
        list(records.code.pieces(action))
    with pytest.raises(PlatformError, match="deploy the action again"):
        records.put_action(replace(action, version="0.0.2"), last="0.0.1", old=action)
    records.delete_action(GUEST, CHAT)
    with pytest.raises(Unavailable, match="try again"):
        list(records.code.pieces(action))


def test_an_upload_is_discarded_unless_an_action_has_its_code(client: redis.Redis, records: Records) -> None:
    upload = records.code.begin()
    upload.add(b"abc")
    action = replace(ACTION, exec=Exec("python:3.11", upload.end()))
    records.put_action(action, last=None)
    upload.discard()  # the answer to put_action may have been lost
    assert client.exists(code_key(action))
    other = records.code.begin()
    other.add(b"def")
    other.discard()
    assert client.keys("thaw:code:*") == [code_key(action).encode()]


def test_an_action_that_is_updated_while_it_is_deleted_goes_with_its_new_code(client: redis.Redis) -> None:
    first = with_code(Records(client), "0.0.1", b"abc")

    class Slow(Records):
        def action(self, namespace: Namespace, name: ActionName) -> Action:
            found = super().action(namespace, name)
            if found.version == "0.0.1":
                self.second = with_code(self, "0.0.2", b"ghi")
                self.put_action(self.second, last="0.0.1", old=found)
            return found

    records = Slow(client)
    records.put_action(first, last=None)
    assert records.delete_action(GUEST, CHAT) == records.second
    assert int(client.ttl(code_key(records.second))) > 0


def test_an_action_of_before_versions_were_kept_is_updated_and_deleted(client: redis.Redis, records: Records) -> None:
    client.hset(keys.actions(GUEST), CHAT, wire.dumps(ACTION))
    records.delete_action(GUEST, CHAT)
    assert records.last_version(CHAT) == ACTION.version
    client.delete(keys.last_version(CHAT))
    client.hset(keys.actions(GUEST), CHAT, wire.dumps(ACTION))
    records.put_action(replace(ACTION, version="0.0.2"), last=ACTION.version)
    assert records.action(GUEST, CHAT).version == "0.0.2"


def test_a_key_is_found_by_its_hash_only(client: redis.Redis) -> None:
    known = ApiKeys(client)
    assert not known.any()
    known.put("00ff", ApiKey(GUEST, "guest"))
    assert known.subject("00ff") == Subject(GUEST, "guest")
    assert known.subject("0000") is None


def test_ending_a_202_takes_its_queue_entry_away(client: redis.Redis, records: Records) -> None:
    client.xgroup_create(keys.PENDING, keys.PENDING_GROUP, id="0", mkstream=True)
    records.accept(pending("b" * 32))
    ((_, ((entry_id, _),)),) = client.xreadgroup(keys.PENDING_GROUP, "g", {keys.PENDING: ">"})
    records.end(record("b" * 32), pending_entry=entry_id)
    assert client.xlen(keys.PENDING) == 0
    assert client.xpending(keys.PENDING, keys.PENDING_GROUP)["pending"] == 0


def test_an_activation_that_ends_again_changes_neither_its_record_nor_its_trace_nor_its_place_in_the_index(
    client: redis.Redis, records: Records
) -> None:
    records, one = records, ActivationId("a" * 32)
    first, again = record(one, start_ms=1000), replace(record(one, start_ms=2000), result={"second": True})
    assert records.end_all([Ended(first, (event(Phase.RECEIVED),))]) == [True]
    other = Ended(record("b" * 32, start_ms=5000), (event(Phase.RECEIVED), event(Phase.FINISHED)))
    assert records.end_all([Ended(again, (event(Phase.QUEUED_BEGIN),)), other]) == [False, True]
    assert not records.end(again)
    assert records.activation(one) == first
    assert [e.name for e in records.trace(one)] == [Phase.RECEIVED]
    assert [e.name for e in records.trace("b" * 32)] == [Phase.RECEIVED, Phase.FINISHED]
    assert records.count_activations(GUEST, upto_ms=1000) == 1
    assert 0 < int(client.ttl(keys.trace(one))) <= RECORD_TTL_S


def test_a_202_stays_when_the_server_refuses_its_record(own_valkey: ValkeyServer) -> None:
    with redis_link.connect(own_valkey.url) as client:
        records = Records(client)
        client.xgroup_create(keys.PENDING, keys.PENDING_GROUP, id="0", mkstream=True)
        entry = records.accept(pending("b" * 32))
        client.config_set("maxmemory", 1)
        with pytest.raises(PlatformError, match="write records"):
            records.end(record("b" * 32), pending_entry=entry)
        assert client.xlen(keys.PENDING) == 1
        client.config_set("maxmemory", 0)
        assert records.end(record("b" * 32), pending_entry=entry)
        assert client.xlen(keys.PENDING) == 0


def test_a_run_is_claimed_once(records: Records) -> None:
    assert [records.mark_started(ActivationId("c"), gateway) for gateway in ("g1", "g2")] == [True, False]


def test_long_records_are_written_in_several_transactions(
    client: redis.Redis, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [Ended(record(str(n) * 32), (event(Phase.RECEIVED),)) for n in range(5)]
    monkeypatch.setattr("relay.state.records._TRANSACTION_BYTES", 2 * len(wire.dumps(many[0].record)))
    client.config_resetstat()
    assert records.end_all(many) == [True] * 5
    assert client.info("commandstats")["cmdstat_exec"]["calls"] == 3
    assert records.end_all(many[:1]) == [False]
    assert records.count_activations(GUEST) == 5


def test_a_trace_joins_an_activation_with_its_group(records: Records) -> None:
    later = event(Phase.RECEIVED, activation_id="a")
    records.add_trace(CHAT, "group", [event(Phase.FETCH_BEGIN, group_id="group", n_bytes=5, attrs={"rate": 1.5})])
    records.add_trace(CHAT, "a", [later])
    assert [e.name for e in records.trace("a", "group")] == [Phase.RECEIVED, Phase.FETCH_BEGIN]


def test_a_202_survives_a_kill_of_the_state_server(own_valkey: ValkeyServer) -> None:
    with redis_link.connect(own_valkey.url) as client:
        Records(client).accept(pending("d" * 32))
        own_valkey.kill()
        own_valkey.start()
        assert client.xlen(keys.PENDING) == 1


def test_no_202_without_an_append_only_file(own_valkey: ValkeyServer) -> None:
    with redis_link.connect(own_valkey.url) as client:
        client.config_set("appendonly", "no")
        with pytest.raises(PlatformError, match="cannot promise durability") as caught:
            Records(client).accept(pending("e" * 32))
        assert caught.value.hint == "start it with --appendonly yes"
        assert client.xlen(keys.PENDING) == 0  # no gateway runs an entry that was refused


def test_a_lost_server_is_unavailable_not_a_redis_error(own_valkey: ValkeyServer) -> None:
    with redis_link.connect(own_valkey.url) as client:
        own_valkey.kill()
        with (
            pytest.raises(Unavailable, match="count: the state server does not answer"),
            redis_link.translated("count"),
        ):
            client.ping()
        with pytest.raises(Unavailable, match="does not answer"):
            Registry(client).hosts()


def test_a_crowd_shares_a_few_connections(client: redis.Redis) -> None:
    with ThreadPoolExecutor(300) as crowd:
        before = client.info("stats")["total_connections_received"]
        assert all(crowd.map(lambda _: client.ping(), range(300)))
        assert client.info("stats")["total_connections_received"] - before <= 32


def test_the_lease_is_held_by_one_and_every_holder_gets_a_higher_epoch(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_MS", 60_000)  # none may end while this test is held up
    first, second = SchedulerLease(client, "one"), SchedulerLease(client, "two")
    epoch = first.acquire()
    assert epoch is not None
    assert second.acquire() is None
    assert first.renew()
    first.release()
    assert second.acquire() == epoch + 1
    assert not first.renew()
    first.release()  # the lease is not its own any more, so this changes nothing
    assert second.renew()
