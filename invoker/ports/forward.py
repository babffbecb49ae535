"""Forward one run: the gateway's connection is on one side, the container's unix socket on the other.

This file buffers nothing, and decodes only the response's framing.  It watches both sockets while the container works.
When the gateway hangs up, it closes the container's connection at once, and an engine or an image's HTTP server then
aborts the request.  When the container dies, the gateway's connection is closed before the last chunk.  A function
cannot abort one of several runs: such a run goes on, and keeps its slot, while others run beside it.  When no caller
waits any more, a function's container ends by itself, so the host is told of a run that is given up before the
container is: the host would else take this end for a loss.
"""

from __future__ import annotations

import enum
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from invoker.containers.live import Live
from relay.clients.http_unix import UnixConnection
from relay.protocol.http1 import ResponseParser
from thaw.errors import ProtocolError

_READ_BYTES: Final = 1 << 16
_CONNECT_S: Final = 5.0
_WRITE_S: Final = 30.0
"""A container that takes no byte for this long counts as lost.  For the caller, the connection's own longer limit
holds.
"""


class Ending(enum.StrEnum):
    DONE = "done"
    CALLER_GONE = "caller_gone"
    UNREAD = "unread"  # the caller hung up, and the container answered in full
    CONTAINER_LOST = "container_lost"
    NOBODY = "nobody"  # no process listens in the container any more, so nothing ran
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Forwarded:
    ending: Ending
    started: bool  # the caller got bytes of a response


def forward(
    live: Live,
    path: str,
    head: bytes,
    body: bytes,
    caller: socket.socket,
    deadline: float,
    on_answered: Callable[[], None],
    on_given_up: Callable[[Forwarded], None],
    on_status: Callable[[int], None] | None = None,
) -> Forwarded:
    """Send a request to ``live``'s container and its answer to ``caller``.  ``deadline`` is monotonic.  ``on_status``
    gets the answer's status before the caller gets any of it.  ``on_answered`` is called when the container has
    answered in full, before the caller gets the last bytes: the caller may send the next run at once, over the same
    connection to the container.  ``on_given_up`` is called when the caller has gone or the deadline has passed, before
    the connection to the container is closed."""
    connection = _connection(live, path)
    if connection is None or connection.sock is None:
        return Forwarded(Ending.NOBODY, False)
    container = connection.sock
    parser = ResponseParser()

    def answered() -> None:
        if parser.keep_alive:
            live.keep_connection(connection)
        on_answered()

    try:
        container.settimeout(_WRITE_S)
        container.sendall(head + body)
        result = _pass_on(container, caller, parser, deadline, answered, on_status)
        if result.ending is Ending.CALLER_GONE and not live.aborts_runs:
            with live.unwanted_run() as shared:
                result = _let_it_end(container, parser, deadline, answered) if shared else result
    except (OSError, ProtocolError):
        result = Forwarded(Ending.CONTAINER_LOST, parser.status != 0)
    if result.ending in (Ending.CALLER_GONE, Ending.TIMEOUT):
        on_given_up(result)
    if not (parser.done and parser.keep_alive):
        connection.close()
    return result


def _pass_on(
    container: socket.socket,
    caller: socket.socket,
    parser: ResponseParser,
    deadline: float,
    answered: Callable[[], None],
    on_status: Callable[[int], None] | None,
) -> Forwarded:
    poll = select.poll()
    poll.register(container, select.POLLIN)
    poll.register(caller, select.POLLRDHUP)
    started = False
    while not parser.done:
        ready = {fd for fd, _ in poll.poll(max(0.0, 1000 * (deadline - time.monotonic())))}
        if caller.fileno() in ready:
            return Forwarded(Ending.CALLER_GONE, started)
        if not ready:
            return Forwarded(Ending.TIMEOUT, started)
        data = container.recv(_READ_BYTES)
        if not data:
            return Forwarded(Ending.CONTAINER_LOST, started)
        whole = parser.feed(data)
        if on_status is not None and parser.status:
            on_status(parser.status)
            on_status = None
        if parser.done:
            answered()
        try:
            caller.sendall(whole)
        except OSError:
            return Forwarded(Ending.UNREAD if parser.done else Ending.CALLER_GONE, started)
        started = started or bool(whole)
    return Forwarded(Ending.DONE, started)


def _let_it_end(
    container: socket.socket, parser: ResponseParser, deadline: float, answered: Callable[[], None]
) -> Forwarded:
    """Read the rest of the answer and discard it."""
    poll = select.poll()
    poll.register(container, select.POLLIN)
    while not parser.done:
        if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            return Forwarded(Ending.TIMEOUT, True)
        data = container.recv(_READ_BYTES)
        if not data:
            return Forwarded(Ending.CONTAINER_LOST, True)
        parser.feed(data)
    answered()
    return Forwarded(Ending.UNREAD, True)


def _connection(live: Live, path: str) -> UnixConnection | None:
    """A kept connection that is still open, or a new one; None when the container does not listen."""
    while (kept := live.take_connection()) is not None:
        if kept.sock is not None and not _closed(kept.sock):
            return kept
        kept.close()
    connection = UnixConnection(path, _CONNECT_S)
    try:
        connection.connect()
    except OSError:
        return None
    return connection


def _closed(sock: socket.socket) -> bool:
    """True if there is something to read: on an idle connection, this can only be its end."""
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLRDHUP)
    return bool(poll.poll(0))
