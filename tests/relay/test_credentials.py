"""A group's credential gives access to the group's part of the relay server, and to nothing else on either server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from relay.protocol.frames import FrameHeader, FrameKind
from relay.state import credentials
from relay.transports.redis import RedisTransport
from tests.conftest import ValkeyServer
from thaw.errors import WorkerLost
from thaw.ids import GroupId, random_hex_id

HIDDEN = FrameHeader(FrameKind.HIDDEN_STATES)
MINE, OTHER = GroupId("ab" * 16), GroupId("cd" * 16)
MY_KEY, OTHER_KEY = (f"thaw:relay:{group}:0:1:0" for group in (MINE, OTHER))


@pytest.fixture
def relay(own_valkey: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(own_valkey.url) as client:
        yield client


@pytest.fixture
def member(client: redis.Redis, relay: redis.Redis, own_valkey: ValkeyServer) -> Iterator[redis.Redis]:
    """A stage of another group on the relay server, which holds a frame of our group."""
    relay.xadd(MY_KEY, {"f": b"secret"})
    relay.set(f"thaw:relay:{MINE}:alive", "x")
    credential = credentials.read(client, credentials.issue(client, relay, OTHER))
    with redis.Redis(port=own_valkey.port, username=credential.username, password=credential.secret) as stage:
        yield stage


def test_a_group_reads_and_writes_its_own_streams(member: redis.Redis) -> None:
    member.execute_command("XADD", OTHER_KEY, "1-0", "f", "frame")
    assert member.execute_command("XREAD", "STREAMS", OTHER_KEY, "0")
    member.execute_command("XTRIM", OTHER_KEY, "MINID", "=", "1-1")


READS = (f"XREAD STREAMS {MY_KEY} 0", f"XREAD STREAMS {OTHER_KEY} {MY_KEY} 0 0", f"GET thaw:relay:{MINE}:alive")
WRITES = (f"XADD {MY_KEY} * f forged", f"SET {MY_KEY} x", "SET thaw:relay x")
REMOVALS = (f"XTRIM {MY_KEY} MAXLEN 0", f"PEXPIRE {MY_KEY} 1")
WITH_ITS_OWN_KEY = (f"DEL {OTHER_KEY}", f"XDEL {OTHER_KEY} 1-0", f"XRANGE {OTHER_KEY} - +", f"XINFO STREAM {OTHER_KEY}")
WITH_ALL_KEYS = ("KEYS *", "SCAN 0", "RANDOMKEY", "DBSIZE", "SELECT 1", "FLUSHALL", "FLUSHDB")
WITH_CLIENTS = ("ACL LIST", "ACL SETUSER me on", "CLIENT LIST", "CLIENT KILL TYPE normal", "MONITOR", "PING")
WITH_CHANNELS_AND_SCRIPTS = ("PUBLISH c x", "SUBSCRIBE c", "EVAL script 0", "FUNCTION LIST")
WITH_THE_SERVER = ("CONFIG GET *", "SHUTDOWN", "DEBUG SLEEP 0", "INFO", "REPLICAOF 127.0.0.1 1")


@pytest.mark.parametrize("command", [*READS, *WRITES, *REMOVALS])
def test_another_groups_keys_are_out_of_reach(member: redis.Redis, relay: redis.Redis, command: str) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError):
        member.execute_command(*command.split())
    assert relay.xlen(MY_KEY) == 1
    assert relay.ttl(MY_KEY) == -1


@pytest.mark.parametrize(
    "command",
    [*WITH_ITS_OWN_KEY, *WITH_ALL_KEYS, *WITH_CLIENTS, *WITH_CHANNELS_AND_SCRIPTS, *WITH_THE_SERVER],
)
def test_no_other_command_is_open_to_a_group(member: redis.Redis, command: str) -> None:
    with pytest.raises(redis.exceptions.ResponseError, match="no permissions|NOPERM|not allowed"):
        member.execute_command(*command.split())


def test_the_state_server_does_not_know_a_groups_user(client: redis.Redis, relay: redis.Redis, valkey_url: str) -> None:
    credential = credentials.read(client, credentials.issue(client, relay, MINE))
    transport_url = valkey_url.removesuffix("/0")
    with pytest.raises(WorkerLost, match="the relay server does not know group"):
        RedisTransport(transport_url, MINE, 0, (1,), credential=credential)
    with pytest.raises(redis.exceptions.AuthenticationError):
        redis.Redis.from_url(valkey_url, username=credential.username, password=credential.secret).ping()


def test_issuing_twice_gives_the_same_secret_and_teaches_a_restarted_relay(
    client: redis.Redis, relay: redis.Redis, own_valkey: ValkeyServer
) -> None:
    ref = credentials.issue(client, relay, MINE)
    assert ref == f"thaw:group-credential:{MINE}"
    first = credentials.read(client, ref)
    own_valkey.kill()
    own_valkey.start()
    assert credentials.issue(client, relay, MINE) == ref
    assert credentials.read(client, ref) == first
    with redis.Redis(port=own_valkey.port, username=first.username, password=first.secret) as stage:
        assert stage.get(credentials.key_prefix(MINE) + "x") is None


def test_secrets_are_long_differ_and_are_not_on_the_relay(client: redis.Redis, relay: redis.Redis) -> None:
    secrets = [credentials.read(client, credentials.issue(client, relay, group)).secret for group in (MINE, OTHER)]
    assert len(set(secrets)) == 2
    assert all(len(secret) >= 40 for secret in secrets)
    assert not any(secret in str(relay.execute_command("ACL", "LIST")) for secret in secrets)


def test_revoking_ends_connections_and_leaves_nothing(
    client: redis.Redis, relay: redis.Redis, own_valkey: ValkeyServer
) -> None:
    credential = credentials.read(client, credentials.issue(client, relay, MINE))
    stage = RedisTransport(own_valkey.url, MINE, 0, (1,), credential=credential)
    stage.send(1, HIDDEN, b"x", deadline_s=20)
    relay.set(f"thaw:relay:{OTHER}:alive", "x")
    credentials.revoke(client, relay, MINE)
    with pytest.raises(WorkerLost, match="does not know group"):
        stage.receive(deadline_s=20)
    with pytest.raises(WorkerLost):
        for _ in range(2):
            stage.send(1, HIDDEN, b"x", deadline_s=20)
    stage.close()
    assert list(relay.scan_iter("*")) == [f"thaw:relay:{OTHER}:alive".encode()]
    assert "thaw-group" not in str(relay.execute_command("ACL", "LIST"))
    with pytest.raises(WorkerLost, match="the group has ended"):
        credentials.read(client, f"thaw:group-credential:{MINE}")
    credentials.revoke(client, relay, MINE)


def test_a_group_that_was_never_issued_has_no_credential(client: redis.Redis) -> None:
    with pytest.raises(WorkerLost, match="is gone: the group has ended"):
        credentials.read(client, credentials.ref(GroupId(random_hex_id())))
