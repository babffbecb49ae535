"""gunicorn's gthread worker, in which a connection that ends delays no other.

After its last answer a connection is half-closed and read to its end (RFC 9112 section 9.6), so that no reset cuts the
answer off.  gunicorn waits for that end on the thread that accepts and dispatches, up to two seconds for each client
that does not close: a few of them stop the gateway.  Here the worker's selector waits.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from gunicorn.workers.gthread import TConn, ThreadWorker

LINGER_S: Final = 2.0
_READ_BYTES: Final = 64 * 1024
"""Data that a client still sends is thrown away in pieces of this size."""


class Worker(ThreadWorker):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ending: deque[TConn] = deque()  # in the order of their deadlines (``timeout``)

    def finish_request(self, conn: TConn, fs: Future[object]) -> None:
        """Called on the worker's main thread.  A false result means that the connection ends with its answer."""
        if fs.cancelled() or (fs.exception() is None and not fs.result()):
            self._half_close(conn)
        else:
            super().finish_request(conn, fs)

    def murder_pending(self) -> None:
        """Called at least once a second."""
        super().murder_pending()
        now = time.monotonic()
        while self._ending and self._ending[0].timeout <= now:
            self._close(self._ending[0])

    def _half_close(self, conn: TConn) -> None:
        conn.timeout = time.monotonic() + LINGER_S
        self._ending.append(conn)
        try:
            conn.sock.setblocking(False)
            conn.sock.shutdown(socket.SHUT_WR)
            self.poller.register(conn.sock, selectors.EVENT_READ, partial(self._read_on, conn))
        except (OSError, ValueError):  # the client has reset it, or a handler has closed it
            self._close(conn)

    def _read_on(self, conn: TConn, sock: socket.socket) -> None:
        try:
            if sock.recv(_READ_BYTES):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._close(conn)

    def _close(self, conn: TConn) -> None:
        self._ending.remove(conn)
        try:
            self.poller.unregister(conn.sock)
        except (OSError, KeyError, ValueError):
            pass  # it was never registered
        self.nr_conns -= 1
        conn.close()
