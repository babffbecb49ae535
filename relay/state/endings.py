"""A namespace's calls in the order in which they ended, at any gateway, and the readers that wait for the next one.

::

    thaw:endings:NS    a stream: the id of each call's record, as it was written, and digests of its names
    thaw:ended:NS      a channel: "so many ids were written"

A cursor is a place in the stream: its entry's id, and how many entries there were up to it.  The second number tells
how many endings a reader missed because the stream no longer has them.  No quota counts the stream, so an entry has the
digests of its names: the names themselves may have kilobytes.

One thread of the process listens, with one connection, for all waiting readers, and only to their namespaces.  If
nobody waits, the platform pays for one command in a batch that is written anyway.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import redis

from relay.state import keys, redis_link
from relay.state.record_lists import names_of
from thaw.activation import Activation
from thaw.errors import BadRequest, PlatformError
from thaw.ids import ActivationId, Namespace, random_hex_id
from thaw.logs import Log
from thaw.process.bell import Bell
from thaw.process.lasting import LastingThread

KEPT: Final = 10_000
"""The most endings of a namespace that a reader can be behind."""
_KEPT_S: Final = 24 * 3600
_PAGE: Final = 250
_RETRY_S: Final = 0.2
_SEPARATOR: Final = "\n"
_CURSOR: Final = re.compile(r"\A([0-9]{1,19}-[0-9]{1,19})\.([0-9]{1,18})\Z", re.ASCII)
_TELL: Final = """
redis.call('XTRIM', KEYS[1], 'MAXLEN', '~', ARGV[1])  -- so that a full server takes the rest, too
local ids = {}
for i = 3, #ARGV, 2 do
    if redis.call('EXISTS', KEYS[3] .. ARGV[i]) == 1 then  -- else it had no room, and comes again with less
        redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'i', ARGV[i], 'n', ARGV[i + 1])
        ids[#ids + 1] = ARGV[i]
    end
end
if #ids == 0 then return end
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('PUBLISH', KEYS[2], table.concat(ids, '\\n'))
"""
_READ: Final = """
if redis.call('EXISTS', KEYS[1]) == 0 then return {0, 0, '', {}} end
local info, of = redis.call('XINFO', 'STREAM', KEYS[1]), {}
for i = 1, #info, 2 do of[info[i]] = info[i + 1] end
local found = {}
if ARGV[1] ~= '' then found = redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '+', 'COUNT', ARGV[2]) end
return {of['entries-added'], of['length'], of['last-generated-id'], found}
"""


@dataclass(frozen=True, slots=True)
class Cursor:
    entry: str  # its id in the stream
    n: int

    def __str__(self) -> str:
        return f"{self.entry}.{self.n}"


@dataclass(frozen=True, slots=True)
class Ending:
    cursor: Cursor
    activation_id: ActivationId
    names: tuple[str, ...]  # digests

    def is_named(self, name: str, namespace: Namespace) -> bool:
        """Whether a list of the namespace by this name has the record.  Two names practically never have the same
        digest."""
        return _digest(name) in self.names or _digest(name.removeprefix(f"{namespace}/")) in self.names


@dataclass(frozen=True, slots=True)
class Endings:
    """``cursor`` is the place where the next endings begin; ``n_missed`` earlier ones are no longer in the stream."""

    cursor: Cursor
    found: tuple[Ending, ...] = ()
    n_missed: int = 0
    has_more: bool = False


def cursor_of(text: str) -> Cursor:
    """Raises BadRequest."""
    match = _CURSOR.match(text)
    if match is None:
        raise BadRequest(f"'{text:.40}' is no cursor", hint="give back the cursor of an earlier answer")
    return Cursor(match[1], int(match[2]))


def _digest(name: str) -> str:
    return blake2b(name.encode(), digest_size=8).hexdigest()


def tell(pipe: Any, namespace: Namespace, records: Sequence[Activation]) -> None:
    """Let the pipeline announce the records of the namespace that it writes, as far as it has written them."""
    rows = [part for r in records for part in (r.activation_id, _SEPARATOR.join(map(_digest, names_of(r))))]
    told_by = (keys.endings(namespace), keys.ended(namespace), keys.activation(""))
    pipe.eval(_TELL, len(told_by), *told_by, KEPT, _KEPT_S, *rows)


def endings_after(client: redis.Redis, namespace: Namespace, after: Cursor | None) -> Endings:
    """The next ones after the cursor, the oldest first; None: those from now on.  Raises Unavailable."""
    with redis_link.translated("read what has ended"):
        reply: Any = client.eval(_READ, 1, keys.endings(namespace), "" if after is None else after.entry, str(_PAGE))
    added, length, last, rows = int(reply[0]), int(reply[1]), redis_link.text(reply[2]), reply[3]
    if after is None:
        return Endings(Cursor(last or "0-0", added))
    gone = added - length
    # a server that lost its newest writes, or the whole stream, counts anew
    n_missed = max(0, gone - after.n) if after.n <= added else 0
    before = after.n + n_missed if after.n <= added else max(gone, added - len(rows))
    found = tuple(_ending(row, before + i) for i, row in enumerate(rows, 1))
    return Endings(found[-1].cursor if found else Cursor(after.entry, before), found, n_missed, len(rows) == _PAGE)


def _ending(row: Any, n: int) -> Ending:
    entry, fields = row
    activation_id, names = (redis_link.text(fields[at]) for at in (1, 3))
    return Ending(Cursor(redis_link.text(entry), n), ActivationId(activation_id), tuple(names.split(_SEPARATOR)))


class _Listened:
    """A namespace to which somebody listens."""

    def __init__(self) -> None:
        self.bells: dict[ActivationId | None, tuple[Bell, int]] = {}  # None: of every record; with its listeners


class EndingsListener:
    """Thread-safe.  The thread alone uses its connection; others wake it with a message on a channel of its own."""

    def __init__(self, client: redis.Redis, url: str, log: Log) -> None:
        self._client, self._url, self._log = client, url, log
        self._own = keys.listener(random_hex_id())
        self._changed = threading.Condition()
        self._wanted: dict[Namespace, _Listened] = {}
        self._stopping = False
        self._thread = LastingThread(self._run, "endings")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """It may still be connected for a moment: its thread ends with the process."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    @contextmanager
    def listening(self, namespace: Namespace, activation_id: ActivationId | None = None) -> Iterator[Bell]:
        """Ring the bell when a record of the namespace was written, or only when that record was; also when a message
        about it may have been lost.  Raises Unavailable."""
        bell = self._join(namespace, activation_id)
        try:
            yield bell
        finally:
            self._leave(namespace, activation_id)

    def _join(self, namespace: Namespace, activation_id: ActivationId | None) -> Bell:
        with self._changed:
            is_new = namespace not in self._wanted
            bells = self._wanted.setdefault(namespace, _Listened()).bells
            bell, n = bells.get(activation_id, (Bell(), 0))
            bells[activation_id] = (bell, n + 1)
            self._changed.notify_all()
        if is_new:
            try:
                with redis_link.translated("listen for records"):
                    self._client.publish(self._own, b"")
            except PlatformError:
                self._leave(namespace, activation_id)
                raise
        return bell

    def _leave(self, namespace: Namespace, activation_id: ActivationId | None) -> None:
        with self._changed:
            bells = self._wanted[namespace].bells
            bell, n = bells.pop(activation_id)
            if n > 1:
                bells[activation_id] = (bell, n - 1)
            if not bells:
                del self._wanted[namespace]

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._stopping)
                if self._stopping:
                    return
            try:
                with redis_link.translated("listen for records"), self._connected() as channel:
                    self._listen(channel)
            except PlatformError as e:
                self._log.event("endings_lost", error=e.message)
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, _RETRY_S)

    @contextmanager
    def _connected(self) -> Iterator[redis.client.PubSub]:
        with redis_link.connect_listening(self._url) as client, client.pubsub() as channel:
            yield channel

    def _listen(self, channel: redis.client.PubSub) -> None:
        """Listen until nobody waits any more.  Raises RedisError."""
        subscribed: set[Namespace] = set()
        channel.subscribe(self._own)
        heard_s = time.monotonic()
        while True:
            message = channel.get_message(timeout=redis_link.CALL_TIMEOUT_S)
            now_s = time.monotonic()
            with self._changed:
                wanted = set(self._wanted)
                if not wanted or self._stopping:
                    return
            if new := wanted - subscribed:
                channel.subscribe(*map(keys.ended, new))
            if old := subscribed - wanted:
                channel.unsubscribe(*map(keys.ended, old))  # type: ignore[no-untyped-call]
            subscribed = wanted
            if message is not None:
                heard_s = now_s
                self._ring(message)
            elif now_s - heard_s > 2 * redis_link.CALL_TIMEOUT_S:
                raise redis.TimeoutError("it does not answer a ping")
            else:
                channel.ping()

    def _ring(self, message: dict[str, Any]) -> None:
        kind, namespace = (
            message["type"],
            Namespace(keys.namespace_of_ended(redis_link.text(message["channel"] or b""))),
        )
        if kind not in ("message", "subscribe"):
            return
        with self._changed:
            listened = self._wanted.get(namespace)
            if listened is None:
                return
            wanted = dict(listened.bells)
        if kind == "message" and wanted.keys() != {None}:
            ids = set(redis_link.text(message["data"]).split(_SEPARATOR))
            wanted = {one: found for one, found in wanted.items() if one is None or one in ids}
        for bell, _ in wanted.values():
            bell.ring()
