"""Start a program of this checkout as a process of its own, without the time that its imports take.

The first start of a module begins a process that imports it and does nothing else (``main`` below).  Each start forks
that process, and the fork does what ``python -m MODULE`` does after its imports: a gateway's start takes a fifth of the
processor's time.  A fork has a session, an environment, a log and random numbers of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT = Path(__file__).parents[1]
_FORK_S: Final = 60.0
_RUN_S: Final = 1500.0  # the longest measure the memory of every family on a busy machine
_NUMBER: Final = 4  # the bytes of a process's number, and of its status
_USED_LATER: Final = {"thaw.cli.main": ("requests", "rich.console", "rich.table", "typer._adapters")}
"""What a module imports when it is run."""


class Forked:
    """The part of ``subprocess.Popen`` that tests use, for a process that is no child of this one.

    ``stdin``, ``stdout`` and ``stderr`` are descriptors, which stay the caller's.
    """

    def __init__(
        self, module: str, *words: str, env: Mapping[str, str], stdin: int = -1, stdout: int = -1, stderr: int = -1
    ) -> None:
        self.returncode: int | None = None
        self._end, theirs = socket.socketpair()
        try:
            with theirs, Path(os.devnull).open("r+b") as nothing:
                given = [nothing.fileno() if fd < 0 else fd for fd in (stdin, stdout, stderr)]
                socket.send_fds(_importer(module, _interpreter(env))[0], [b"fork"], [theirs.fileno(), *given])
            self._end.sendall(json.dumps([words, dict(env), os.getcwd()]).encode() + b"\n")
            self._end.settimeout(_FORK_S)
            self.pid = self._number()
            self._end.settimeout(None)
        except BaseException:
            self._end.close()
            raise

    def _number(self) -> int:
        data = self._end.recv(_NUMBER)
        assert len(data) == _NUMBER, "the process that forks has ended"
        return int.from_bytes(data, "little")

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            ended = select.poll()  # select() takes no descriptor over 1023, and a process that runs tests has such ones
            ended.register(self._end, select.POLLIN)
            if not ended.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(self._number())
            self._end.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(module: str, *words: str, env: Mapping[str, str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run(..., text=True, capture_output=True, check=False)``."""
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        given.write(stdin)
        given.seek(0)
        process = Forked(module, *words, env=env, stdin=given.fileno(), stdout=out.fileno(), stderr=err.fileno())
        try:
            process.wait(_RUN_S)
        except BaseException:
            process.kill()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([module, *words], process.wait(), out.read(), err.read())


def _interpreter(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables that Python reads before it imports anything.  Programs with others have another importer."""
    return tuple(sorted((name, value) for name, value in env.items() if name.startswith(("PYTHON", "LC_", "LANG"))))


@functools.cache
def _importer(module: str, variables: tuple[tuple[str, str], ...]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Return the connection to the process that has imported the module, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {name: value for name, value in os.environ.items() if not _interpreter({name: value})} | dict(variables)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked"], cwd=ROOT, env=env, stdin=theirs, start_new_session=True
        )
    ours.send(module.encode())
    return ours, process


class _Forks:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._ends: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor that tells of a process's end

    def serve(self) -> bool:
        """Fork at each request.  Return True in a fork, and False when nobody can request another one."""
        while True:
            for fd in select.select([self._control.fileno(), *self._ends], [], [])[0]:
                if fd in self._ends:
                    self._tell_end(fd)
                    continue
                request, fds, _, _ = socket.recv_fds(self._control, 16, 4)
                if not request:
                    return False
                if self._fork(socket.socket(fileno=fds[0]), fds[1:]):
                    return True

    def _tell_end(self, fd: int) -> None:
        pid, asker = self._ends.pop(fd)
        status = os.waitpid(pid, 0)[1]
        os.close(fd)
        with asker:
            try:
                asker.send(status.to_bytes(_NUMBER, "little"))
            except BrokenPipeError:
                pass  # nobody waits for it

    def _fork(self, asker: socket.socket, fds: Sequence[int]) -> bool:
        if pid := os.fork():
            for fd in fds:
                os.close(fd)
            asker.send(pid.to_bytes(_NUMBER, "little"))
            self._ends[os.pidfd_open(pid)] = pid, asker
            return False
        end_with_parent()
        os.setsid()
        with asker, asker.makefile("rb") as request:
            words, environ, directory = json.loads(request.readline())
        os.chdir(directory)
        sys.argv[1:] = words
        os.environ.clear()
        os.environ.update(environ)
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        for fd, (_, other) in self._ends.items():
            os.close(fd)
            other.close()
        self._control.close()
        return True


_LIBC: Final = ctypes.CDLL(None)
_PR_SET_PDEATHSIG: Final = 1


def end_with_parent() -> None:
    """Tests that were killed leave no process behind: the one that forks ends with them, and its forks with it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    module = control.recv(1024).decode()
    program: Callable[[], None] = importlib.import_module(module).main
    for name in _USED_LATER.get(module, ()):
        importlib.import_module(name)
    gc.freeze()  # no collection in a fork touches, and so copies, what was imported
    if _Forks(control).serve():
        program()


if __name__ == "__main__":
    main()
