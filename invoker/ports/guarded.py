"""A TCP server whose threads nobody can use up without a credential."""

from __future__ import annotations

import socket
import socketserver
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any, Final

from thaw.logs import Log
from thaw.process.lasting import LastingThread

STRANGERS: Final = 256
"""Connections on which nobody has shown a credential yet.  Each has a thread, so beyond them the oldest is cut; a
client shows its credential with its first request."""


class GuardedServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves each connection on a thread of its own.  A handler calls :meth:`knows` once a client has a credential."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024

    def __init__(self, bind: str, handler: type[socketserver.BaseRequestHandler], name: str, log: Log) -> None:
        """``name``: of the thread, and in the log."""
        self._strangers: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._name, self._log = name, log
        host, _, port = bind.rpartition(":")
        super().__init__((host, int(port)), handler)
        self._thread = LastingThread(self.serve_forever, name)

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        return f"{host!s}:{port}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for connections
        self.shutdown()
        self.server_close()
        self._thread.join(5)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._strangers[request] = None
            oldest = next(iter(self._strangers)) if len(self._strangers) > STRANGERS else None
            if oldest is not None:
                del self._strangers[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end
        super().process_request(request, client_address)

    def knows(self, connection: Any) -> None:
        """The connection's client has shown a credential, or the connection ends."""
        if connection in self._strangers:
            with self._lock:
                self._strangers.pop(connection, None)

    def shutdown_request(self, request: Any) -> None:
        self.knows(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log any error but OSError: a broken connection is expected, and every other error is a bug."""
        if not isinstance(sys.exception(), OSError):
            self._log.event(f"{self._name.replace('-', '_')}_failed", traceback=traceback.format_exc())
