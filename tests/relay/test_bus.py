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
    Release,
    Start,
    from_plain,
    to_plain,
)
from relay.state import bus, keys, redis_link
from tests.conftest import ValkeyServer
from tests.relay.samples import PLAN
from thaw.errors import ProtocolError
from thaw.ids import ActionName, CommandId, HostId, InstanceId
from thaw.logs import Log

LOG = Log("test")
HOST = HostId("host-0")
FIRST = Command(CommandId("1"), 1, 2, InspectModel("s3://m/x"))
SECOND = Command(CommandId("2"), 1, 2, Release(InstanceId("i")))


class Inbox:
    """Collects the messages that its readers deliver.  It waits with a deadline and never sleeps."""

    def __init__(self) -> None:
        self.up: queue.Queue[None] = queue.Queue()
        self.messages: queue.Queue[Any] = queue.Queue()
        self.readers: list[bus.EventReader | bus.CommandReader] = []

    def read_events(self, url: str) -> None:
        """Read events from now on.  The connection is up."""
        self._begin(bus.EventReader(url, self.messages.put, lambda: self.up.put(None), LOG))
        self.up.get(timeout=60)

    def read_commands(self, url: str, carry_out: Callable[[Command], None] | None = None) -> None:
        self._begin(bus.CommandReader(url, HOST, carry_out or self.messages.put, lambda: None, LOG))

    def _begin(self, reader: bus.EventReader | bus.CommandReader) -> None:
        self.readers.append(reader)
        reader.start()

    def next(self) -> Any:
        return self.messages.get(timeout=60)


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox()
    yield made
    for reader in made.readers:
        reader.stop()
        reader.join(60)  # a reader that still waits would be one of the next test's blocked clients


def test_an_event_published_after_on_up_is_delivered(client: redis.Redis, valkey_url: str, inbox: Inbox) -> None:
    bus.publish(client, HostChanged(HostId("before"), True))
    inbox.read_events(valkey_url)
    bus.publish(client, HostChanged(HostId("after"), True))
    assert inbox.next() == HostChanged(HostId("after"), True)


def test_an_unreadable_entry_does_not_stop_those_behind_it(client: redis.Redis, valkey_url: str, inbox: Inbox) -> None:
    inbox.read_events(valkey_url)
    client.xadd(keys.EVENTS, {"f": b"not a frame"})
    bus.publish(client, ActionChanged(ActionName("guest/chat")))
    assert inbox.next() == ActionChanged(ActionName("guest/chat"))


def test_a_reader_survives_a_killed_server_and_reloads(own_valkey: ValkeyServer, inbox: Inbox) -> None:
    inbox.read_events(own_valkey.url)
    own_valkey.kill()
    own_valkey.start()
    inbox.up.get(timeout=60)
    with redis_link.connect(own_valkey.url) as client:
        bus.publish(client, HostChanged(HostId("h"), False))
    assert inbox.next() == HostChanged(HostId("h"), False)


def lose(client: redis.Redis, command: Command) -> None:
    """Send a command that an invoker reads.  Then the invoker dies."""
    bus.send_command(client, HOST, command)
    client.xgroup_create(keys.commands(HOST), "host", id="0")
    client.xreadgroup("host", "invoker", {keys.commands(HOST): ">"})


def test_a_command_that_was_not_finished_is_delivered_again(client: redis.Redis, valkey_url: str, inbox: Inbox) -> None:
    lose(client, FIRST)
    bus.send_command(client, HOST, SECOND)
    inbox.read_commands(valkey_url)
    assert [inbox.next(), inbox.next()] == [FIRST, SECOND]


def test_a_command_is_acknowledged_when_it_was_carried_out_and_not_before(
    client: redis.Redis, valkey_url: str, inbox: Inbox
) -> None:
    """An invoker that is killed while it carries out a command finds the command again."""
    seen: queue.Queue[tuple[str, int, list[str]]] = queue.Queue()

    def carry_out(command: Command) -> None:
        unfinished: Any = client.xpending_range(keys.commands(HOST), "host", "-", "+", 10)
        entries: Any = client.xrange(keys.commands(HOST))
        kept = [bus.unpack(fields[b"f"]).command_id for _, fields in entries]
        seen.put((command.command_id, len(unfinished), kept))

    inbox.read_commands(valkey_url, carry_out)
    for command in (FIRST, SECOND):
        bus.send_command(client, HOST, command)
        assert seen.get(timeout=60) == (command.command_id, 1, [command.command_id])


def test_a_command_that_the_stream_let_go_before_it_was_finished_stops_none_behind_it(
    client: redis.Redis, valkey_url: str, inbox: Inbox
) -> None:
    lose(client, FIRST)
    client.xtrim(keys.commands(HOST), maxlen=0, approximate=False)
    inbox.read_commands(valkey_url)
    bus.send_command(client, HOST, SECOND)
    assert inbox.next() == SECOND


@pytest.mark.parametrize(
    "message",
    [HostChanged(HostId("h"), True), Command(CommandId("c"), 7, 9, Start(PLAN, 0, InstanceId("i")))],
    ids=lambda m: type(m).__name__,
)
def test_messages_survive_their_frame_and_are_tagged_by_their_name(message: Any) -> None:
    assert bus.unpack(bus.pack(message)) == message
    assert to_plain(message)["t"] == type(message).__name__


@pytest.mark.parametrize(
    "plain", [None, {}, {"t": "Nonsense"}, {"t": "Command", "body": {"t": "X"}}, {"t": "HostChanged"}]
)
def test_what_is_no_message_is_refused(plain: object) -> None:
    with pytest.raises(ProtocolError):
        from_plain(plain)


def test_no_client_connection_stays_blocked_after_stop(client: redis.Redis, valkey_url: str, inbox: Inbox) -> None:
    inbox.read_events(valkey_url)
    (reader,) = inbox.readers
    reader.stop()
    reader.join(60)
    assert client.info("clients")["blocked_clients"] == 0
