"""The zygote: a process that has imported the engine and forks a container (a stem cell) in milliseconds.

Run it with ``python -m thaw_runtime.start.zygote --socket PATH``.  Its socket carries control frames::

    invoker → zygote   Fork{instance_id, env, stdout, stderr, uid, netns}     zygote → invoker   Ready | Forked | Exited
                       Spawn{socket, log, env, netns}                                            Spawned

The zygote is single-threaded, because a fork copies only the calling thread.  It has run no parallel tensor operation,
has touched no GPU and holds no credential: a Fork brings everything that its container may know.
"""

from __future__ import annotations

import argparse
import gc
import os
import select
import signal
import socket
from typing import Any

from relay.clients.channel import Channel
from thaw import wire
from thaw.errors import ProtocolError
from thaw.logs import Log
from thaw_runtime.engine.registry import engine_of_process
from thaw_runtime.start.fork import (
    Exited,
    Fork,
    Forked,
    ForkFailed,
    Ready,
    Spawn,
    Spawned,
    fork_container,
    fork_zygote,
    kill_fork,
)

log = Log("zygote")


class Zygote:
    """One poll loop handles connections, fork orders, and SIGCHLD through a self-pipe."""

    def __init__(self, path: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._listener.listen(16)
        self._channels: dict[int, Channel] = {}
        self._children: dict[int, str] = {}
        self._wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._wake_write = wake_write
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, _exit)

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._listener.fileno():
                    channel = self._accept()
                    if channel is not None:
                        poll.register(channel.sock, select.POLLIN)
                elif fd == self._wake_read:
                    os.read(self._wake_read, 4096)
                    self._reap()
                elif not self._command(self._channels[fd]):
                    poll.unregister(fd)
                    self._channels.pop(fd).close()

    def _accept(self) -> Channel | None:
        """Accept a client.  Return None if the client has already closed the connection."""
        sock, _ = self._listener.accept()
        sock.settimeout(10.0)  # a client that stops in the middle of a frame must not delay the others
        channel = Channel(sock)
        if not _sent(channel, Ready("ready", os.getpid(), len(self._children))):
            channel.close()
            return None
        self._channels[sock.fileno()] = channel
        return channel

    def _command(self, channel: Channel) -> bool:
        """Carry out one order.  Return False if the client has closed the connection."""
        try:
            order = _order(channel.receive()[0])
        except (ProtocolError, OSError) as e:
            log.event("client_gone", reason=str(e))
            return False
        name = order.socket if isinstance(order, Spawn) else order.instance_id
        done: Forked | Spawned
        try:
            if isinstance(order, Spawn):
                pid = fork_zygote(order, self._in_child, serve)
                done = Spawned("spawned", name, pid)
            else:
                pid = fork_container(order, self._in_child)
                done = Forked("forked", name, pid)
        except OSError as e:
            return _sent(channel, ForkFailed("fork_failed", name, str(e)))
        self._children[pid] = name
        if _sent(channel, done):
            return True
        kill_fork(pid)  # no client knows of the child, so it would wait for ever
        return False

    def _in_child(self) -> None:
        """Close the zygote's sockets and undo its signal wakeup in a forked child."""
        signal.set_wakeup_fd(-1)
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)
        self._listener.close()
        for channel in self._channels.values():
            channel.sock.close()  # not Channel.close, whose shutdown would also close the invoker's end

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            instance_id = self._children.pop(pid, "")
            self._tell(Exited("exited", instance_id, pid, os.waitstatus_to_exitcode(status)))

    def _tell(self, event: Any) -> None:
        for channel in self._channels.values():
            _sent(channel, event)  # the poll loop notices a closed channel


def _sent(channel: Channel, message: Any) -> bool:
    try:
        channel.send(message)
    except OSError as e:
        log.event("client_gone", reason=str(e))
        return False
    return True


def _order(plain: Any) -> Fork | Spawn:
    spawn = isinstance(plain, dict) and plain.get("op") == "spawn"
    return wire.from_plain(Spawn, plain) if spawn else wire.from_plain(Fork, plain)


def serve(path: str) -> None:
    zygote = Zygote(path)
    log.event("ready", pid=os.getpid(), socket=path)
    zygote.serve()


def _exit(*_: object) -> None:
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Pre-imported engine that forks containers.")
    parser.add_argument("--socket", required=True, help="unix socket to listen on")
    args = parser.parse_args()
    log.event("importing")
    library = engine_of_process()
    library.prepare()
    library.warm_up()
    gc.collect()
    gc.freeze()  # garbage collections in the children then do not write to the shared pages
    serve(args.socket)


if __name__ == "__main__":
    main()
