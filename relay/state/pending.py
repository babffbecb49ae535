"""The stream of 202s, as a consumer group of gateways.

An entry belongs to the gateway that read it until it is acknowledged with its record.  A gateway whose lease has
ended is dead, and another gateway claims its entries.  The time since delivery is no sign of death: a cold start takes
minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import redis

from relay.state import bounded_stream, keys, redis_link
from relay.state.bus import _StreamThread
from relay.state.records import Pending
from thaw import wire
from thaw.errors import ProtocolError
from thaw.ids import ActivationId, GatewayId
from thaw.logs import Log

_BLOCK_MS: Final = 30_000
_CLAIM_IDLE_MS: Final = 1_000
"""When two gateways see the same death, the second finds the entry claimed a moment ago and does not get it."""
_READ_AT_ONCE: Final = 32
"""Entries of one answer, whose arguments may have megabytes each."""

_DROP_EMPTY: Final = """
local left = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2])
if #left == 0 then return redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2]) end
return -1
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """``owner``: the gateway that had it running before it was written (a blocking call that became a 202)."""

    entry_id: bytes
    pending: Pending
    owner: str


class PendingReader(_StreamThread):
    """Hands on new entries, as many as ``room()`` says; room() may block to hold the reader back.  After a
    reconnection an entry that has not ended comes again."""

    def __init__(
        self, url: str, gateway: GatewayId, on_entry: Callable[[Entry], None], room: Callable[[], int], log: Log
    ) -> None:
        super().__init__(url, "pending-reader", on_entry, lambda: None, log)
        self._gateway, self._room = gateway, room

    def _read_all(self, client: redis.Redis) -> None:
        create_group(client)
        position: Any = "0"  # first our own entries, whose delivery may have failed with a connection, then new ones
        while not self._stop.is_set():
            count = min(self._room(), _READ_AT_ONCE)
            if count == 0:
                return  # stopping
            reply: Any = client.xreadgroup(
                keys.PENDING_GROUP, self._gateway, {keys.PENDING: position}, count=count, block=_BLOCK_MS
            )
            entries = reply[0][1] if reply else []
            if position != ">":
                position = entries[-1][0] if entries else ">"
            for entry in parse(entries):
                self._on_message(entry)


class PendingClaims:
    """Takes over or hands over entries between gateways."""

    def __init__(self, client: redis.Redis, gateway: GatewayId) -> None:
        self._redis, self._gateway = client, gateway

    def consumers(self) -> list[GatewayId]:
        """Every gateway in the consumer group except this one."""
        with redis_link.translated("list consumers"):
            create_group(self._redis)
            rows: Any = self._redis.xinfo_consumers(keys.PENDING, keys.PENDING_GROUP)
        names = [redis_link.text(row["name"]) for row in rows]
        return [GatewayId(name) for name in names if name != self._gateway]

    def claim(self, dead: GatewayId) -> list[Entry]:
        """Take over a batch of a dead gateway's entries.  When none is left, remove it from the group."""
        with redis_link.translated("claim a dead gateway's work"):
            rows: Any = self._redis.xpending_range(
                keys.PENDING, keys.PENDING_GROUP, "-", "+", _READ_AT_ONCE, consumername=dead
            )
            if not rows:
                self._redis.eval(_DROP_EMPTY, 1, keys.PENDING, keys.PENDING_GROUP, dead)
                return []
            claimed: Any = self._redis.xclaim(
                keys.PENDING, keys.PENDING_GROUP, self._gateway, _CLAIM_IDLE_MS, [r["message_id"] for r in rows]
            )
        return list(parse(claimed))

    def entry(self, entry_id: bytes) -> Entry | None:
        """Read an entry again.  None: it has ended."""
        with redis_link.translated("read an entry again"):
            rows: Any = self._redis.xrange(keys.PENDING, entry_id, entry_id)
        return next(iter(parse(rows)), None)

    def starter(self, activation_id: ActivationId) -> GatewayId | None:
        """The gateway that has marked the activation's one run (Records.mark_started)."""
        with redis_link.translated("read who started a run"):
            found: Any = self._redis.get(keys.started(activation_id))
        return None if found is None else GatewayId(redis_link.text(found))

    def hand_to(self, owner: GatewayId, entry_id: bytes) -> None:
        """Give an entry to ``owner``, the gateway that runs it."""
        with redis_link.translated("hand an entry over"):
            self._redis.xclaim(keys.PENDING, keys.PENDING_GROUP, owner, 0, [entry_id], justid=True)


def create_group(client: redis.Redis) -> None:
    bounded_stream.create_group(client, keys.PENDING, keys.PENDING_GROUP)


def parse(entries: Iterable[Any]) -> Iterable[Entry]:
    for entry_id, fields in entries:
        if not fields:
            continue  # deleted meanwhile
        try:
            pending = wire.loads(Pending, fields[b"p"])
        except ProtocolError:
            continue  # written by a newer version: a newer gateway claims it once this one is gone
        yield Entry(entry_id, pending, redis_link.text(fields.get(b"o", b"")))
