"""A listening unix socket with one thread per conversation."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

from relay.clients.channel import Channel
from thaw.errors import PlatformError, ProtocolError
from thaw.logs import Log
from thaw.process.lasting import LastingThread

_MAX_PATH: Final = 107  # sun_path, less the terminating zero
_BACKLOG: Final = 64
_PAUSE_S: Final = 0.2


class UnixServer:
    """Calls ``serve(channel)`` on a new thread for each connection and closes the channel after it.

    It listens before its socket gets its name, so a client that sees the name can connect.

    A connection beyond ``most`` at once is closed: a container must not be able to use up our threads.
    """

    def __init__(self, path: str, mode: int, serve: Callable[[Channel], None], log: Log, *, most: int) -> None:
        if len(path.encode()) > _MAX_PATH:
            raise PlatformError(
                f"{path}: a unix socket's path has at most {_MAX_PATH} bytes", hint="use a shorter directory"
            )
        self.path = path
        self._serve, self._log, self._most = serve, log, most
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._closed = threading.Event()
        _remove_stale(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unnamed = os.path.join(os.path.dirname(path), f".{os.urandom(3).hex()}")
        try:
            self._listener.bind(unnamed)
            os.chmod(unnamed, mode)
            self._listener.listen(_BACKLOG)
            os.rename(unnamed, path)
        except OSError as e:
            self._listener.close()
            if os.path.exists(unnamed):
                os.unlink(unnamed)
            raise PlatformError(f"{path}: cannot listen: {e}", hint="check the directory and its permissions") from e
        self._thread = LastingThread(self._accept, "accept")
        self._thread.start()

    def close(self) -> None:
        """Accept no further connection and end the present ones."""
        with self._lock:
            self._closed.set()
            channels = list(self._channels)
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._thread.join(timeout=5)
        self._listener.close()
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        for channel in channels:
            _hang_up(channel)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as e:
                if self._closed.is_set():
                    return
                self._log.event("accept_failed", path=self.path, error=str(e))  # EMFILE, ENOMEM: clients stay queued
                self._closed.wait(_PAUSE_S)
                continue
            channel = Channel(sock, takes_fds=False)  # a peer that sends descriptors only wants to use up ours
            with self._lock:
                if self._closed.is_set():
                    channel.close()
                    return
                if len(self._channels) >= self._most:
                    channel.close()
                    continue
                self._channels.add(channel)
            threading.Thread(target=self._converse, args=(channel,), name="conversation", daemon=True).start()

    def _converse(self, channel: Channel) -> None:
        try:
            self._serve(channel)
        except (OSError, ProtocolError):
            pass  # the peer left, or does not speak our protocol: only its conversation ends
        except Exception as e:  # noqa: BLE001 - edge of a thread: a defect ends one conversation
            self._log.event("conversation_defect", path=self.path, error=f"{type(e).__name__}: {e}")
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()


def peer_pid(channel: Channel) -> int:
    """The pid of the process on the other side; 0 for a process of another pid namespace."""
    raw = channel.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[0])


def _hang_up(channel: Channel) -> None:
    """End a conversation that another thread reads; that thread closes the socket."""
    try:
        channel.sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def _remove_stale(path: str) -> None:
    """Remove the socket that a killed predecessor left.  Raises PlatformError while another process listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except (ConnectionRefusedError, TimeoutError):
            os.unlink(path)
            return
        except OSError as e:
            raise PlatformError(f"{path} is in the way: {e}", hint="remove it") from e
    raise PlatformError(f"another process listens on {path}", hint="stop it, or choose another THAW_FETCHD_SOCKET")
