"""Events and commands over Redis streams.

Every entry holds one frame (``f``) of kind control with one message.  All components read the event stream with a plain
XREAD.  An event is a hint to read the hashes (instances, demand, hosts), which are the truth.  So a reader that was
away, or for which events went before it had read them, starts from the hashes and goes on from the stream's end.
Commands are per host and stay until acknowledged.

Both kinds of streams have a limit in bytes (bounded_stream.py).  What an event says of an error is cut
(:func:`bounded_error`), because a tenant's code chooses its length.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import redis

from relay.protocol import messages
from relay.protocol.frames import FrameHeader, FrameKind, decode, encode
from relay.state import bounded_stream, keys, redis_link
from thaw.errors import ErrorInfo, PlatformError, ProtocolError, Unavailable
from thaw.ids import HostId
from thaw.logs import Log
from thaw.process.lasting import LastingThread

EVENTS_KEPT: Final = 20_000
EVENTS_BYTES: Final = 8 << 20
"""Half of it stays when it is reached: thousands of ordinary events, which have some hundred bytes each."""
COMMANDS_KEPT: Final = 5_000
COMMANDS_BYTES: Final = 8 << 20
"""The commands to one host take no more, whether it reads them or not."""
SENTENCE_BYTES: Final = 4 << 10
OUTPUT_BYTES: Final = 20 << 10
"""Each output stream of a failed start takes no more.  An invoker sends no more than 16 KiB, which have six times as
many bytes in JSON if all of them are control characters."""
_BLOCK_MS: Final = 30_000  # only bounds a silent wait; an entry wakes the reader at once
_RETRY_S: Final = 0.2
_COMMAND_GROUP: Final = "host"


def pack(message: Any) -> bytes:
    """The message in a frame, with what it says of an error cut."""
    plain = messages.to_plain(_bounded(message))
    return encode(FrameHeader(FrameKind.CONTROL), json.dumps(plain, separators=(",", ":")).encode())


def unpack(data: bytes) -> Any:
    """The message in a frame.  Raises ProtocolError."""
    frame = decode(data)
    try:
        return messages.from_plain(json.loads(bytes(frame.payload)))
    except ValueError as e:
        raise ProtocolError(f"control frame is not JSON: {e}") from e


def publish(client: redis.Redis, message: Any) -> None:
    """Append an event.  Raises Unavailable."""
    with redis_link.translated("publish an event"):
        append(client, message)


def append(client: Any, message: Any) -> None:
    """As :func:`publish`, for a pipeline that writes the event and the change that it reports as one step."""
    bounded_stream.append(client, keys.EVENTS, pack(message), EVENTS_KEPT, EVENTS_BYTES)


TELL: Final = (
    bounded_stream.APPEND
    + f"""
local function tell(events, frame) return append(events, frame, {EVENTS_KEPT}, {EVENTS_BYTES}) end
"""
)
"""Lua: publish an event in the script that makes the change.  A full server takes it, and all that the script writes
after it."""


def send_command(client: redis.Redis, host_id: HostId, command: messages.Command) -> None:
    with redis_link.translated("send a command"):
        bounded_stream.append(client, keys.commands(host_id), pack(command), COMMANDS_KEPT, COMMANDS_BYTES)


def bounded_error(error: ErrorInfo) -> ErrorInfo:
    """The error as an event or a row carries it: the beginnings of its sentences, and the ends of what was printed."""
    return replace(
        error,
        message=_beginning(error.message, SENTENCE_BYTES),
        hint=_beginning(error.hint, SENTENCE_BYTES),
        printed=_beginning(error.printed[::-1], OUTPUT_BYTES)[::-1],
        printed_out=_beginning(error.printed_out[::-1], OUTPUT_BYTES)[::-1],
    )


def short_error(error: ErrorInfo) -> ErrorInfo:
    """As :func:`bounded_error`, without what was printed: for rows that stay."""
    return bounded_error(replace(error, printed="", printed_out=""))


def _bounded(message: Any) -> Any:
    if isinstance(message, messages.InstanceChanged):
        return replace(message, instance=_bounded(message.instance))
    error = getattr(message, "error", None)
    return replace(message, error=bounded_error(error)) if isinstance(error, ErrorInfo) else message


def _beginning(text: str, n_bytes: int) -> str:
    """A beginning of the text that has at most so many bytes in JSON."""
    part = text[:n_bytes]
    while (n := len(json.dumps(part)) - len('""')) > n_bytes:
        part = part[: len(part) * n_bytes // n]
    return part


class _StreamThread:
    """A thread that blocks in a stream read and hands each message on.

    ``on_up`` runs after every (re)connection, before the first entry is read: the owner reloads its view there.
    """

    def __init__(self, url: str, name: str, on_message: Callable[[Any], None], on_up: Callable[[], None], log: Log):
        self._url = url
        self._on_message, self._on_up, self._log = on_message, on_up, log
        self._stop = threading.Event()
        self._client_id: int | None = None
        self._thread = LastingThread(self._run, name)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread.  A blocked read is woken by CLIENT UNBLOCK: closing its socket under it would not be safe."""
        self._stop.set()
        if self._client_id is None:
            return
        # no server: the read has ended already
        with contextlib.suppress(redis.RedisError), redis_link.connect(self._url) as waker:
            waker.client_unblock(self._client_id)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with redis_link.translated("read the stream"), redis_link.connect_blocking(self._url) as client:
                    self._client_id = int(client.client_id())
                    self._read_all(client)
            except PlatformError as e:
                if not self._stop.is_set():
                    self._log.event("stream_lost", error=e.message)
                    self._stop.wait(_RETRY_S)

    def _read_all(self, client: redis.Redis) -> None:
        raise NotImplementedError

    def _deliver(self, *entries: bytes) -> None:
        """Hand on together the entries that were read together.

        All of them are unpacked first, so that the owner does not begin with one before it can get the others.
        """
        messages: list[Any] = []
        for data in entries:
            try:
                messages.append(unpack(data))
            except ProtocolError as e:  # an entry we cannot read must not stop those behind it
                self._log.event("stream_entry_refused", error=e.message)
        for message in messages:
            self._on_message(message)


class EventReader(_StreamThread):
    """Reads every event after the moment of (re)connection; in ``on_up`` the owner reloads from the hashes."""

    def __init__(self, url: str, on_message: Callable[[Any], None], on_up: Callable[[], None], log: Log) -> None:
        super().__init__(url, "event-reader", on_message, on_up, log)

    def _read_all(self, client: redis.Redis) -> None:
        last: Any = client.xrevrange(keys.EVENTS, count=1)
        position, upto = (last[0][0], bounded_stream.upto(last[0][1])) if last else ("0-0", None)
        self._on_up()
        while not self._stop.is_set():
            reply: Any = client.xread({keys.EVENTS: position}, count=500, block=_BLOCK_MS)
            for _, entries in reply or []:
                position = entries[-1][0]
                for _, fields in entries:
                    if not bounded_stream.is_next(fields, upto):
                        raise Unavailable("events were trimmed before they were read")
                    upto = bounded_stream.upto(fields) or upto
                self._deliver(*(fields[b"f"] for _, fields in entries))


class CommandReader(_StreamThread):
    """Reads this host's commands.  Each is acknowledged and deleted after ``on_message`` returned, so a killed invoker
    sees it again; commands are idempotent."""

    def __init__(
        self, url: str, host_id: HostId, on_message: Callable[[Any], None], on_up: Callable[[], None], log: Log
    ) -> None:
        super().__init__(url, "command-reader", on_message, on_up, log)
        self._key = keys.commands(host_id)

    def _read_all(self, client: redis.Redis) -> None:
        bounded_stream.create_group(client, self._key, _COMMAND_GROUP)
        self._on_up()
        position = "0"  # first the entries that were delivered before and never acknowledged, then new ones
        while not self._stop.is_set():
            reply: Any = client.xreadgroup(_COMMAND_GROUP, "invoker", {self._key: position}, count=50, block=_BLOCK_MS)
            entries = reply[0][1] if reply else []
            if position == "0" and not entries:
                position = ">"
            for entry_id, fields in entries:
                if fields:  # else the stream was trimmed after this entry was delivered
                    self._deliver(fields[b"f"])
                client.xack(self._key, _COMMAND_GROUP, entry_id)
                client.xdel(self._key, entry_id)
