"""A container's output, copied from the engine's log into the two files that the rest of the invoker reads.

Each container has one follower.  The engine sends frames ``[stream, 0, 0, 0, u32 length][time stamp, blank, text]``;
after the engine was away, a new connection goes on at the last stamp.  The engine bounds the output that it keeps
(spec.py) and a follower the output that it writes, so that a container that prints without end costs a bounded part of
a disk.
"""

from __future__ import annotations

import calendar
import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from typing import Final

from invoker.drivers import log_files
from invoker.drivers.base import Handle
from invoker.drivers.docker.client import OLDEST_API
from relay.clients.http_unix import UnixConnection
from thaw.errors import ThawError

_FRAME: Final = struct.Struct(">BxxxI")
_STDERR: Final = 2
_CONNECT_S: Final = 10.0
_LONGEST_FRAME: Final = 1 << 20  # the engine cuts lines at 16 KiB


class LogFollower:
    """``runs`` says whether the container still runs (it may raise).  ``back`` waits for the engine to come back, or
    until its argument says that the wait is given up; ``look_up`` makes it check that again."""

    def __init__(
        self,
        engine_socket: str,
        name: str,
        handle: Handle,
        runs: Callable[[], bool],
        back: Callable[[Callable[[], bool]], bool],
        look_up: Callable[[], None],
        *,
        since: float,
    ) -> None:
        self._engine, self._name, self._handle = engine_socket, name, handle
        self._runs, self._back, self._look_up = runs, back, look_up
        self._since = f"{since:.9f}"
        self._repeats = Repeats()
        self._grown = threading.Condition()
        self._connection: UnixConnection | None = None
        self._closing = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="container-logs", daemon=True)
        self._thread.start()

    def wait_ended(self, deadline_s: float) -> None:
        """Wait until the last line of an ended container is in the files."""
        self._thread.join(deadline_s)

    def wait_grown(self, cursors: tuple[int, int], deadline_s: float) -> bool:
        """Whether there is more than ``cursors`` (stdout, stderr); waits for it while the container runs."""
        with self._grown:
            self._grown.wait_for(lambda: self._ended or log_files.more_than(self._handle, cursors), deadline_s)
            return log_files.more_than(self._handle, cursors)

    def close(self) -> None:
        self._closing = True
        self._hang_up()
        self._look_up()
        self._thread.join(_CONNECT_S)

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._follow()
                except (OSError, http.client.HTTPException):
                    pass  # the engine went away in the middle
                if self._closing or not self._goes_on():
                    return
        finally:
            with self._grown:
                self._ended = True
                self._grown.notify_all()

    def _goes_on(self) -> bool:
        """Whether to connect again: the stream ended because the container ended, or because the engine did."""
        try:
            return self._runs()
        except ThawError:
            return self._back(lambda: self._closing)

    def _follow(self) -> None:
        self._connection = connection = UnixConnection(self._engine, _CONNECT_S)
        try:
            path = f"/v{OLDEST_API}/containers/{self._name}/logs?follow=1&stdout=1&stderr=1&timestamps=1"
            connection.request("GET", f"{path}&since={self._since}")
            response = connection.getresponse()
            if response.status != 200:
                return
            connection.sock.settimeout(None)
            stdout, stderr = self._handle.stdout, self._handle.stderr
            with response, stdout.open("ab", buffering=0) as out, stderr.open("ab", buffering=0) as err:
                for stream, data in _frames(response):
                    self._write(stream, err if stream == _STDERR else out, data)
        finally:
            self._connection = None
            connection.close()

    def _write(self, stream: int, file: FileIO, frame: bytes) -> None:
        stamp, _, text = frame.partition(b" ")
        since = _next_after(stamp.decode("ascii", "replace"))
        if since:
            if self._repeats.has(stream, since, text, now=f"{time.time():.9f}"):
                return
            self._since = since
        log_files.append(file, text)
        with self._grown:
            self._grown.notify_all()

    def _hang_up(self) -> None:
        connection = self._connection
        if connection is not None and connection.sock is not None:
            try:
                connection.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it has just ended


@dataclass(slots=True)
class _Newest:
    """The newest frame of one stream."""

    since: str = ""
    is_line_end: bool = True
    is_repeating: bool = False


class Repeats:
    """Recognises the frames that the engine has sent before.

    An engine that rotates its file while a follower lags behind sends a part of it again, with the old time stamps.
    A sentinel that is read twice would give every later run the lines of the run before it.  The stamps of a stream
    grow, except that the pieces of one long line share one, and that the clock may be set back.
    """

    def __init__(self) -> None:
        self._newest: dict[int, _Newest] = {}

    def has(self, stream: int, since: str, text: bytes, *, now: str) -> bool:
        """Whether the frame came before; notes it.  ``since`` and ``now``: seconds of the wall clock with nine digits
        behind the point, which compare as text."""
        newest = self._newest.setdefault(stream, _Newest())
        is_older = since < newest.since or (since == newest.since and (newest.is_line_end or newest.is_repeating))
        if is_older and now >= newest.since:
            newest.is_repeating = True
            return True
        newest.since, newest.is_line_end, newest.is_repeating = since, text.endswith(b"\n"), False
        return False


def _frames(response: http.client.HTTPResponse) -> Iterator[tuple[int, bytes]]:
    while len(header := response.read(_FRAME.size)) == _FRAME.size:
        stream, length = _FRAME.unpack(header)
        if length > _LONGEST_FRAME:
            raise http.client.HTTPException(f"a log frame of {length} bytes")
        data = response.read(length)
        if len(data) < length:
            return
        yield stream, data


def _next_after(stamp: str) -> str:
    """``2026-01-02T03:04:05.123456789Z`` → ``since`` a nanosecond later; empty for a stamp that is no time."""
    whole, _, fraction = stamp.removesuffix("Z").partition(".")
    try:
        seconds = calendar.timegm(time.strptime(whole, "%Y-%m-%dT%H:%M:%S"))
        nanos = int((fraction + "000000000")[:9]) + 1
    except ValueError:
        return ""
    return f"{seconds + nanos // 10**9}.{nanos % 10**9:09d}"
