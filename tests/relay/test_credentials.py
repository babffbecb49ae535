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
def state(valkey_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_url) as client:
        yield client


@pytest.fixture
def relay(own_valkey: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(own_valkey.url) as client:
        yield client


@pytest.fixture
def member(state: redis.Redis, relay: redis.Redis, own_valkey: ValkeyServer) -> Iterator[redis.Redis]:
    """A stage of another group on the relay server, which holds a frame of our group."""
    relay.xadd(MY_KEY, {"f": b"secret"})
    relay.set(f"thaw:relay:{MINE}:alive", "x")
    credential = credentials.read(state, credentials.issue(state, relay, OTHER))
    with redis.Redis(port=own_valkey.port, username=credential.username, password=credential.secret) as client:
        yield client


def test_a_group_reads_and_writes_its_own_streams(member: redis.Redis) -> None:
    member.execute_command("XADD", OTHER_KEY, "1-0", "f", "frame")
    assert member.execute_command("XREAD", "STREAMS", OTHER_KEY, "0")
    member.execute_command("XTRIM", OTHER_KEY, "MINID", "=", "1-1")


@pytest.mark.parametrize(
    "command",
    [
        ("XREAD", "STREAMS", MY_KEY, "0"),
        ("XADD", MY_KEY, "*", "f", "forged"),
        ("XTRIM", MY_KEY, "MAXLEN", "0"),
        ("PEXPIRE", MY_KEY, "1"),
        ("SET", MY_KEY, "x"),
        ("GET", f"thaw:relay:{MINE}:alive"),
        ("XREAD", "STREAMS", OTHER_KEY, MY_KEY, "0", "0"),
        ("SET", "thaw:relay", "x"),
    ],
    ids=" ".join,
)
def test_another_groups_keys_are_out_of_reach(
    member: redis.Redis, relay: redis.Redis, command: tuple[str, ...]
) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError):
        member.execute_command(*command)
    assert relay.xlen(MY_KEY) == 1
    assert relay.ttl(MY_KEY) == -1


@pytest.mark.parametrize(
    "command",
    [
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("DEL", OTHER_KEY),
        ("XDEL", OTHER_KEY, "1-0"),
        ("XRANGE", OTHER_KEY, "-", "+"),
        ("XINFO", "STREAM", OTHER_KEY),
        ("CONFIG", "GET", "*"),
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("EVAL", "return 1", "0"),
        ("FUNCTION", "LIST"),
        ("ACL", "LIST"),
        ("ACL", "SETUSER", "me", "on"),
        ("CLIENT", "LIST"),
        ("CLIENT", "KILL", "TYPE", "normal"),
        ("MONITOR",),
        ("PUBLISH", "c", "x"),
        ("SUBSCRIBE", "c"),
        ("SHUTDOWN",),
        ("DEBUG", "SLEEP", "0"),
        ("INFO",),
        ("RANDOMKEY",),
        ("DBSIZE",),
        ("SELECT", "1"),
        ("REPLICAOF", "127.0.0.1", "1"),
        ("PING",),
    ],
    ids=" ".join,
)
def test_no_other_command_is_open_to_a_group(member: redis.Redis, command: tuple[str, ...]) -> None:
    with pytest.raises(redis.exceptions.ResponseError, match="no permissions|NOPERM|not allowed"):
        member.execute_command(*command)


def test_the_state_server_does_not_know_a_groups_user(state: redis.Redis, relay: redis.Redis, valkey_url: str) -> None:
    credential = credentials.read(state, credentials.issue(state, relay, MINE))
    transport_url = valkey_url.removesuffix("/0")
    with pytest.raises(WorkerLost, match="the relay server does not know group"):
        RedisTransport(transport_url, MINE, 0, (1,), credential=credential)
    with pytest.raises(redis.exceptions.AuthenticationError):
        redis.Redis.from_url(valkey_url, username=credential.username, password=credential.secret).ping()


def test_issuing_twice_gives_the_same_secret_and_teaches_a_restarted_relay(
    state: redis.Redis, relay: redis.Redis, own_valkey: ValkeyServer
) -> None:
    ref = credentials.issue(state, relay, MINE)
    assert ref == f"thaw:group-credential:{MINE}"
    first = credentials.read(state, ref)
    own_valkey.kill()
    own_valkey.start()
    assert credentials.issue(state, relay, MINE) == ref
    assert credentials.read(state, ref) == first
    with redis.Redis(port=own_valkey.port, username=first.username, password=first.secret) as client:
        assert client.get(credentials.key_prefix(MINE) + "x") is None


def test_secrets_are_long_differ_and_are_not_on_the_relay(state: redis.Redis, relay: redis.Redis) -> None:
    secrets = [credentials.read(state, credentials.issue(state, relay, group)).secret for group in (MINE, OTHER)]
    assert len(set(secrets)) == 2
    assert all(len(secret) >= 40 for secret in secrets)
    assert not any(secret in str(relay.execute_command("ACL", "LIST")) for secret in secrets)


def test_revoking_ends_connections_and_leaves_nothing(
    state: redis.Redis, relay: redis.Redis, own_valkey: ValkeyServer
) -> None:
    credential = credentials.read(state, credentials.issue(state, relay, MINE))
    stage = RedisTransport(own_valkey.url, MINE, 0, (1,), credential=credential)
    stage.send(1, HIDDEN, b"x", deadline_s=20)
    relay.set(f"thaw:relay:{OTHER}:alive", "x")
    credentials.revoke(state, relay, MINE)
    with pytest.raises(WorkerLost, match="does not know group"):
        stage.receive(deadline_s=20)
    with pytest.raises(WorkerLost):
        for _ in range(2):
            stage.send(1, HIDDEN, b"x", deadline_s=20)
    stage.close()
    assert list(relay.scan_iter("*")) == [f"thaw:relay:{OTHER}:alive".encode()]
    assert "thaw-group" not in str(relay.execute_command("ACL", "LIST"))
    with pytest.raises(WorkerLost, match="the group has ended"):
        credentials.read(state, f"thaw:group-credential:{MINE}")
    credentials.revoke(state, relay, MINE)


def test_a_group_that_was_never_issued_has_no_credential(state: redis.Redis) -> None:
    with pytest.raises(WorkerLost, match="is gone: the group has ended"):
        credentials.read(state, credentials.ref(GroupId(random_hex_id())))
