"""OpenWhisk's action proxy for python:3.11 on the unix socket THAW_SOCKET: POST /init, POST /run, GET /health.

::

    invoker ──HTTP──▶ this process ──socket pair──▶ child (user code)
                          └───◀── pipes (stdout, stderr), bounded ───┘

The child is forked at once, so a container that waits for its action (a stem cell) has its interpreter ready.  Status
codes and sentences are OpenWhisk's (openwhisk-runtime-go, initHandler.go and runHandler.go), except for a child that
was killed by a signal: OpenWhisk calls that a developer error, too.  This process ends when its initialised child has
ended, because a container without its function is useless.
"""

from __future__ import annotations

import json
import os
import socket
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from thaw_runtime.action import child as python_child
from thaw_runtime.action.child import NO_BINARY, refusal
from thaw_runtime.action.child_host import CallerGone, Child, CommandExited, ExitedBefore
from thaw_runtime.action.function_imports import confine
from thaw_runtime.action.lean_http import LeanHandler
from thaw_runtime.action.memory_limit import MemoryLimit
from thaw_runtime.action.wire import INIT, MAX_MESSAGE_BYTES, Message
from thaw_runtime.process.signals import exit_on_sigterm

EXIT_CHILD_LOST: Final = 70
EXIT_KILLED: Final = 128
"""Like in a shell, a container's exit status is this number plus the number of the signal that killed its function."""
EXIT_ABANDONED: Final = 71  # runs that no caller waits for can be stopped only by ending the process
_PR_SET_DUMPABLE: Final = 4
TELL_DEADLINE_S: Final = 2.0
"""How long the end of this process waits for answers that are being sent."""


class Refused(Exception):
    """An answer that comes from the proxy and not from the function."""

    def __init__(self, status: int, error: str, code: str = "DeveloperError", hint: str = "") -> None:
        super().__init__(error)
        self.status, self.error, self.code, self.hint = status, error, code, hint
        self.printed: dict[str, str] = {}


class Killed(Refused):
    """A signal killed the function's process.  An idempotent action is run again elsewhere; for other actions the
    caller gets this error, which names the signal.
    """

    def __init__(self, signal_name: str, while_it: str) -> None:
        super().__init__(
            500,
            f"The function's process was killed by {signal_name} while it {while_it}.",
            "WorkerLost",
            "it used more memory than its limit, crashed, or was killed from outside",
        )


class OutOfMemory(Refused):
    """The kernel killed the function's process for the container's limit.  Another run would end in the same way."""

    def __init__(self, limit_mib: int) -> None:
        super().__init__(
            502,
            f"The action used more memory than its limit of {limit_mib} MiB (limits.memory).",
            "MemoryTooSmall",
            "raise limits.memory, or keep less in memory",
        )


class Proxy(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, path: str, child: Child) -> None:
        self.child = child
        self.memory = MemoryLimit()
        self.lock = threading.Lock()
        self.state = "new"
        self.inflight = 0
        self._told = threading.Condition(self.lock)
        self._owed = 0
        self._ending = False
        super().__init__(path, Handler, bind_and_activate=False)
        bind_ready(self, path)
        child.listen(self._child_exited)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While the block runs, a caller waits for its answer, and the process must not end."""
        with self.lock:
            self._owed += 1
        try:
            yield
        finally:
            with self.lock:
                self._owed -= 1
                self._told.notify_all()

    def end(self, status: int) -> None:
        """End this process after the answers in progress were given to the kernel.  Later calls do nothing."""
        with self.lock:
            if self._ending:
                return
            self._ending = True
        self.child.kill()
        self._wait_told()
        self.child.end_logs()
        os._exit(status)

    def _child_exited(self) -> None:
        """End this process, unless the init failed: then the invoker, which sent the init, ends the container after it
        has read the reason.
        """
        self._wait_told()
        if self.state != "failed":
            exit_code = self.child.exit_code
            self.end(EXIT_KILLED - exit_code if exit_code < 0 else EXIT_CHILD_LOST)

    def _wait_told(self) -> None:
        with self.lock:
            self._told.wait_for(lambda: self._owed == 0, TELL_DEADLINE_S)


class Handler(LeanHandler):
    server: Proxy

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply(200, _dumps({"state": self.server.state, "inflight": self.server.inflight}))
        else:
            self._reply(404, _dumps({"error": f"no {self.path}"}))

    def do_POST(self) -> None:
        try:
            with self.server.answering():
                self._reply(*self._post())
        except CallerGone:
            self.server.end(EXIT_ABANDONED)

    def _post(self) -> tuple[int, bytes]:
        try:
            body = self._body()
            if self.path == "/init":
                return self._init(body)
            if self.path == "/run":
                return self._run(body)
            raise Refused(404, f"no {self.path}", "NotFound")
        except Refused as e:
            plain = refusal(e.code, e.error, e.hint)
            plain["info"].update(e.printed)
            return e.status, _dumps(plain)

    def _body(self) -> bytes:
        length = int(self.headers.get("content-length") or 0)
        if not 0 <= length <= MAX_MESSAGE_BYTES:
            self.close_connection = True
            raise Refused(413, f"Request larger than allowed: {length} > {MAX_MESSAGE_BYTES} bytes.", "TooLarge")
        return self.rfile.read(length)

    def _init(self, body: bytes) -> tuple[int, bytes]:
        value = _object(body).get("value")
        if not isinstance(value, dict) or not value.get("code"):
            raise Refused(403, "Missing main/no code to execute.", "InitFailed")
        with self.server.lock:
            if self.server.state != "new":
                raise Refused(403, "Cannot initialize the action more than once.", "Conflict")
            self.server.state = "starting"
        child = self.server.child
        try:
            reply = child.init(_dumps(value))
            printed = child.printed_so_far()
        except CommandExited as e:
            printed = child.last_words()
            if e.killed_by:
                self.server.state = "failed"
                killed = self._killed(e.killed_by, "was loaded")
                killed.printed = printed
                raise killed from None
            reply = Message(INIT, 502, _dumps({"error": NO_BINARY}))
        child.keep_no_more()
        if reply.status == 200:
            self.server.state = "ready"
            return 200, reply.body
        self.server.state = "failed"
        error = json.loads(reply.body)["error"]
        info = {"code": "InitFailed", "message": error, "hint": "see the action's stderr", **printed}
        return reply.status, _dumps({"error": error, "info": info})

    def _run(self, body: bytes) -> tuple[int, bytes]:
        """Pass the body to the child and return the child's answer, both unchanged."""
        if self.server.state != "ready":
            raise Refused(500, "no action defined yet", "PlatformError")
        self._count(1)
        try:
            answer = self.server.child.run(body, self.connection)
        except ExitedBefore:
            raise Refused(500, "command exited", "InstanceGone") from None
        except CommandExited as e:
            if e.killed_by:
                raise self._killed(e.killed_by, "ran") from None
            raise Refused(400, "command exited") from None
        finally:
            self._count(-1)
        return answer.status, answer.body

    def _killed(self, signal_name: str, while_it: str) -> Refused:
        limit_mib = self.server.memory.exceeded_mib() if signal_name == "SIGKILL" else 0
        return OutOfMemory(limit_mib) if limit_mib else Killed(signal_name, while_it)

    def _count(self, n: int) -> None:
        with self.server.lock:
            self.server.inflight += n

    def _reply(self, status: int, data: bytes) -> None:
        try:
            self.reply(status, data)
        except OSError:
            self.close_connection = True  # the caller has closed the connection and cannot be told


def _object(body: bytes) -> dict[str, Any]:
    try:
        plain = json.loads(body)
    except ValueError as e:
        raise Refused(400, f"Error unmarshaling request: {e}", "BadRequest") from e
    if not isinstance(plain, dict):
        raise Refused(400, "Error unmarshaling request: not a JSON object", "BadRequest")
    return plain


def _dumps(value: object) -> bytes:
    return json.dumps(value).encode()


def bind_ready(server: socketserver.UnixStreamServer, path: str) -> None:
    """Bind the socket so that its path appears only when it accepts connections.  A client that waits for the file then
    need not retry.
    """
    hidden = f"{path}.new"
    for name in (path, hidden):
        try:
            os.unlink(name)
        except FileNotFoundError:
            pass
    server.server_address = hidden
    server.server_bind()
    server.server_activate()
    os.rename(hidden, path)


def _close_memory() -> None:
    """Protect this process's memory from user code, which has the same uid: the platform trusts the answers of this
    process.  The child was forked before and is not affected.  ctypes is imported late, while the init is on its way.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def fork_child() -> Child:
    """Fork the child.  This must be called before any thread exists, because a fork copies only the calling thread."""
    ours, theirs = socket.socketpair()
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        for fd in (out_read, err_read):
            os.close(fd)
        ours.close()
        _become_child(theirs, out_write, err_write)
    theirs.close()
    os.close(out_write)
    os.close(err_write)
    return Child(pid, ours, out_read, err_read)


def _become_child(sock: socket.socket, out: int, err: int) -> None:
    status = 0
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        confine(os.environ)
        layers = os.environ.get("THAW_LAYERS", "")
        for name in [n for n in os.environ if n.startswith("THAW_")]:
            del os.environ[name]
        python_child.serve(sock, layers)
        sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else 1
    finally:
        os._exit(status)  # the child must never return into the proxy's code


def main() -> None:
    path = os.environ["THAW_SOCKET"]
    child = fork_child()
    exit_on_sigterm()
    with Proxy(path, child) as proxy:
        if os.getpid() == 1:  # in a confined container; elsewhere the platform must find its processes in /proc
            _close_memory()
        proxy.serve_forever(poll_interval=3600)  # polling for a shutdown(), which never comes, would wake the process


if __name__ == "__main__":
    main()
