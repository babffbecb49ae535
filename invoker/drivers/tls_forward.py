"""Forwards a unix socket to a relay server that speaks TLS: the stages behind the socket do not (relay_socket.py).

Stages hand lists of buffers to the kernel and wait for descriptors, which TLS in their process would not allow.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Final

from relay.state.relay_tls import RelayEndpoint
from thaw.logs import Log

_CONNECT_S: Final = 5.0
_READ_BYTES: Final = 256 * 1024


class TlsForward:
    """Accepts on ``listener`` and forwards until the process ends, at most ``most_connections`` at once."""

    def __init__(self, listener: socket.socket, relay: RelayEndpoint, most_connections: int, log: Log) -> None:
        self._listener, self._relay, self._log = listener, relay, log
        self._n_left = most_connections
        self._context = relay.context()

    async def serve(self) -> None:
        server = await asyncio.start_unix_server(self._join, sock=self._listener, limit=_READ_BYTES)
        await server.serve_forever()

    async def _join(self, inside: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        if not self._n_left:
            back.close()
            return
        self._n_left -= 1
        try:
            async with asyncio.timeout(_CONNECT_S):
                outside, out = await asyncio.open_connection(
                    self._relay.host, self._relay.port, ssl=self._context, limit=_READ_BYTES
                )
            out.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await _both(_pump(inside, out), _pump(outside, back))
            out.close()
        except (OSError, TimeoutError) as e:  # an untrusted certificate among them; the container sees the end
            self._log.event("relay_not_reached", host=self._relay.host, port=self._relay.port, error=str(e) or repr(e))
        finally:
            self._n_left += 1
            back.close()


async def _both(*pumps: object) -> None:
    """Run until one of them ends, then end the others."""
    tasks = [asyncio.ensure_future(pump) for pump in pumps]  # type: ignore[call-overload]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await task


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Forward one direction.  ``drain`` waits while the sink does not take the written bytes."""
    while data := await source.read(_READ_BYTES):
        sink.write(data)
        await sink.drain()
