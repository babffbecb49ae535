"""Fork a container from a process that has imported everything: two forks, each of which cleans up its child."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from relay.clients.channel import Channel
from thaw.logs import flush_output, print_traceback
from thaw_runtime.engine import main as engine_main
from thaw_runtime.engine.library import EngineLibrary
from thaw_runtime.engine.registry import VARIABLE, engine_of_process
from thaw_runtime.llm import proxy

KEPT_ENVIRONMENT = (
    "PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "HOME",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "TMPDIR",
    "OMP_NUM_THREADS",
    VARIABLE,
)


@dataclass(frozen=True, slots=True)
class Fork:
    """An order to fork a container.  ``netns`` is the path of the network namespace to enter; ``uid`` is the user, and
    the group, that the container runs as.
    """

    op: str
    instance_id: str
    env: Mapping[str, str]
    stdout: str
    stderr: str
    uid: int | None = None
    netns: str | None = None


@dataclass(frozen=True, slots=True)
class Spawn:
    """An order to fork another host's zygote, so that the hosts on one machine do the imports, and hold their memory,
    only once.
    """

    op: str
    socket: str
    log: str
    env: Mapping[str, str]
    netns: str | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    op: str
    pid: int
    children: int


@dataclass(frozen=True, slots=True)
class Forked:
    op: str
    instance_id: str
    pid: int


@dataclass(frozen=True, slots=True)
class Spawned:
    op: str
    socket: str
    pid: int


@dataclass(frozen=True, slots=True)
class ForkFailed:
    op: str
    instance_id: str
    error: str


@dataclass(frozen=True, slots=True)
class Exited:
    """``status`` is the exit status, or minus the number of the signal that killed the process."""

    op: str
    instance_id: str
    pid: int
    status: int
    extra: Mapping[str, object] = field(default_factory=dict)


def fork_container(order: Fork, in_child: Callable[[], None]) -> int:
    """Fork a container, which leads its own session, and return its pid.  ``in_child`` closes the parent's files."""
    return _fork(lambda: _container(order, in_child))


def fork_zygote(order: Spawn, in_child: Callable[[], None], serve: Callable[[str], None]) -> int:
    """Fork another zygote, which ``serve``s on its own socket and leads its own session, and return its pid."""
    return _fork(lambda: _zygote(order, in_child, serve))


def kill_fork(pid: int) -> None:
    """Kill a child that was not reaped yet, and all processes that it started, even if it leads no session yet."""
    os.kill(pid, signal.SIGKILL)  # this comes first: afterwards the child can no longer become a session leader
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _fork(run: Callable[[], None]) -> int:
    flush_output()
    pid = os.fork()
    if pid:
        return pid
    _become(run)


def _become(run: Callable[[], None]) -> NoReturn:
    """Run the child's code and exit: a forked child must never return into its parent's code."""
    try:
        run()
        os._exit(0)
    except BaseException:  # noqa: BLE001  the edge of a process
        print_traceback()
        flush_output()
        os._exit(70)


def _container(order: Fork, in_child: Callable[[], None]) -> None:
    in_child()
    os.setsid()
    _redirect(order.stdout, 1)
    _redirect(order.stderr, 2)
    if order.netns is not None:
        _enter(order.netns)
    if order.uid is not None:
        os.setgroups([])
        os.setgid(order.uid)
        os.setuid(order.uid)
    library = engine_of_process()
    kept = {k: os.environ[k] for k in (*KEPT_ENVIRONMENT, *library.environment) if k in os.environ}
    os.environ.clear()
    os.environ.update(kept)
    os.environ.update(order.env)
    ours, theirs = socket.socketpair()
    engine = os.fork()
    if engine == 0:
        ours.close()
        _become(lambda: _engine(theirs, library))
    theirs.close()
    reseed()
    proxy.serve(order.env["THAW_SOCKET"], order.env.get("THAW_DOOR", ""), Channel(ours), engine)


def _zygote(order: Spawn, in_child: Callable[[], None], serve: Callable[[str], None]) -> None:
    in_child()
    os.setsid()
    _redirect(order.log, 1)
    _redirect(order.log, 2)
    if order.netns is not None:
        _enter(order.netns)
    os.environ.update(order.env)
    os.chdir(os.path.dirname(order.socket))  # the files of its host; it may be found by them when nobody else knows it
    serve(order.socket)


def _engine(sock: socket.socket, library: EngineLibrary) -> None:
    reseed()
    status = engine_main.serve(Channel(sock), lambda: engine_main.load_cold(library))
    flush_output()
    os._exit(status)


def _redirect(path: str, fd: int) -> None:
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    os.dup2(opened, fd)
    os.close(opened)


def _enter(netns: str) -> None:
    if os.stat(netns).st_ino == os.stat("/proc/self/ns/net").st_ino:
        return  # entering the current namespace again would need a privilege
    setns = getattr(os, "setns", None)  # Python 3.12
    fd = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if setns is not None:
            setns(fd, 0)
        else:
            import ctypes

            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(fd, 0) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), netns)
    finally:
        os.close(fd)


def reseed() -> None:
    """Seed the random generators again, because two forks must not draw the same numbers.  (uuid4 and secrets ask the
    kernel each time.)
    """
    random.seed()
    ssl.RAND_add(os.urandom(32), 32.0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
