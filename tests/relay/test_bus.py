"""Events and commands through a real state server."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from relay.protocol.messages import (
    ActionChanged,
    Command,
    HostChanged,
    InspectModel,
    InstanceChanged,
    Release,
    Start,
    from_plain,
    to_plain,
)
from relay.state import bus, keys, redis_link
from tests.conftest import ValkeyServer
from tests.relay.samples import INSTANCE, PLAN
from thaw.errors import ProtocolError
from thaw.ids import ActionName, CommandId, HostId, InstanceId
from thaw.logs import Log

LOG = Log("test")


class Inbox:
    """Collects the messages that a reader delivers.  It waits with a deadline and never sleeps."""

    def __init__(self) -> None:
        self.up: queue.Queue[None] = queue.Queue()
        self.messages: queue.Queue[Any] = queue.Queue()

    def on_up(self) -> None:
        self.up.put(None)

    def next(self) -> Any:
        return self.messages.get(timeout=60)


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def running() -> Iterator[Callable[[Any], None]]:
    started: list[Any] = []

    def start(reader: Any) -> None:
        started.append(reader)
        reader.start()

    yield start
    for reader in started:
        reader.stop()


def test_an_event_published_after_on_up_is_delivered(
    valkey_url: str, inbox: Inbox, running: Callable[[Any], None]
) -> None:
    client = redis_link.connect(valkey_url)
    bus.publish(client, HostChanged(HostId("before"), True))
    running(bus.EventReader(valkey_url, inbox.messages.put, inbox.on_up, LOG))
    inbox.up.get(timeout=60)
    bus.publish(client, HostChanged(HostId("after"), True))
    assert inbox.next() == HostChanged(HostId("after"), True)
    client.close()


def test_an_unreadable_entry_does_not_stop_those_behind_it(
    valkey_url: str, inbox: Inbox, running: Callable[[Any], None]
) -> None:
    client = redis_link.connect(valkey_url)
    running(bus.EventReader(valkey_url, inbox.messages.put, inbox.on_up, LOG))
    inbox.up.get(timeout=60)
    client.xadd(keys.EVENTS, {"f": b"not a frame"})
    bus.publish(client, ActionChanged(ActionName("guest/chat")))
    assert inbox.next() == ActionChanged(ActionName("guest/chat"))
    client.close()


def test_a_reader_survives_a_killed_server_and_reloads(
    own_valkey: ValkeyServer, inbox: Inbox, running: Callable[[Any], None]
) -> None:
    running(bus.EventReader(own_valkey.url, inbox.messages.put, inbox.on_up, LOG))
    inbox.up.get(timeout=60)
    own_valkey.kill()
    own_valkey.start()
    inbox.up.get(timeout=60)
    client = redis_link.connect(own_valkey.url)
    bus.publish(client, HostChanged(HostId("h"), False))
    assert inbox.next() == HostChanged(HostId("h"), False)
    client.close()


def test_a_command_that_was_not_finished_is_delivered_again(
    valkey_url: str, inbox: Inbox, running: Callable[[Any], None]
) -> None:
    client = redis_link.connect(valkey_url)
    host = HostId("host-0")
    first = Command(CommandId("1"), 1, 2, InspectModel("s3://m"))
    bus.send_command(client, host, first)
    client.xgroup_create(keys.commands(host), "host", id="0")
    client.xreadgroup("host", "invoker", {keys.commands(host): ">"})  # an invoker reads the command and dies
    bus.send_command(client, host, Command(CommandId("2"), 1, 2, Release(InstanceId("i"))))
    running(bus.CommandReader(valkey_url, host, inbox.messages.put, inbox.on_up, LOG))
    assert inbox.next() == first
    assert inbox.next().command_id == "2"
    client.close()


def test_a_command_is_acknowledged_when_it_was_carried_out_and_not_before(
    valkey_url: str, running: Callable[[Any], None]
) -> None:
    """An invoker that is killed while it carries out a command finds the command again."""
    host = HostId("host-0")
    seen: queue.Queue[tuple[str, int, list[str]]] = queue.Queue()
    with redis_link.connect(valkey_url) as client:

        def carry_out(command: Command) -> None:
            pending: Any = client.xpending_range(keys.commands(host), "host", "-", "+", 10)
            entries: Any = client.xrange(keys.commands(host))
            kept = [bus.unpack(fields[b"f"]).command_id for _, fields in entries]
            seen.put((command.command_id, len(pending), kept))

        running(bus.CommandReader(valkey_url, host, carry_out, lambda: None, LOG))
        for name in ("1", "2"):
            bus.send_command(client, host, Command(CommandId(name), 1, 2, InspectModel("s3://m")))
            assert seen.get(timeout=60) == (name, 1, [name])


def test_a_command_that_the_stream_let_go_before_it_was_finished_stops_none_behind_it(
    valkey_url: str, inbox: Inbox, running: Callable[[Any], None]
) -> None:
    client = redis_link.connect(valkey_url)
    host = HostId("host-0")
    bus.send_command(client, host, Command(CommandId("1"), 1, 2, InspectModel("s3://m")))
    client.xgroup_create(keys.commands(host), "host", id="0")
    client.xreadgroup("host", "invoker", {keys.commands(host): ">"})
    client.xtrim(keys.commands(host), maxlen=0, approximate=False)
    running(bus.CommandReader(valkey_url, host, inbox.messages.put, inbox.on_up, LOG))
    bus.send_command(client, host, Command(CommandId("2"), 1, 2, Release(InstanceId("i"))))
    assert inbox.next().command_id == "2"
    client.close()


@pytest.mark.parametrize(
    "message",
    [
        HostChanged(HostId("h"), True),
        Command(CommandId("c"), 7, 9, Start(PLAN, 0, InstanceId("i"))),
    ],
    ids=lambda m: type(m).__name__,
)
def test_messages_survive_their_frame(message: Any) -> None:
    assert bus.unpack(bus.pack(message)) == message


@pytest.mark.parametrize(
    "plain", [None, {}, {"t": "Nonsense"}, {"t": "Command", "body": {"t": "X"}}, {"t": "HostChanged"}]
)
def test_what_is_no_message_is_refused(plain: object) -> None:
    with pytest.raises(ProtocolError):
        from_plain(plain)


def test_every_message_type_is_tagged_by_its_name() -> None:
    assert to_plain(InstanceChanged(INSTANCE))["t"] == "InstanceChanged"


def test_no_client_connection_stays_blocked_after_stop(valkey_url: str, inbox: Inbox) -> None:
    reader = bus.EventReader(valkey_url, inbox.messages.put, inbox.on_up, LOG)
    reader.start()
    inbox.up.get(timeout=60)
    reader.stop()
    reader.join(60)
    with redis.Redis.from_url(valkey_url) as client:
        assert client.info("clients")["blocked_clients"] == 0
