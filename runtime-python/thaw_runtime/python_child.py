"""The process that runs user code.  It is forked before anything is known of the code, and belongs to one proxy.

One init, then runs.  With a concurrency of 1 user code runs on the main thread (signals and event loops work as in a
script); else each run has a thread, and ``__OW_*`` is the process's: the last run's.  An exception of user code is an
application error; an exit is the end of this process, which the proxy reports as "command exited".
"""

from __future__ import annotations

import base64
import io
import os
import socket
import sys
import tempfile
import threading
import traceback
import types
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

from thaw_runtime.python_wire import SENTINEL, PeerGone, receive, send

NO_BINARY = "The action failed to generate or locate a binary. See logs for details."
NOT_A_DICT = "The action did not return a dictionary or array."

Main = Callable[[Any], Any]


def serve(sock: socket.socket) -> None:
    """Until the proxy closes."""
    try:
        value = receive(sock)
        main = _initialised(sock, value)
        if main is not None:
            _run_all(sock, main, int(value.get("concurrency") or 1))
    except PeerGone:
        return


def _initialised(sock: socket.socket, value: Mapping[str, Any]) -> Main | None:
    try:
        main = load(value)
    except Exception:  # noqa: BLE001  whatever user code raises while it is loaded is the user's to read
        traceback.print_exc()
        _flush()
        send(sock, {"status": 502, "body": {"error": NO_BINARY}})
        return None
    _flush()
    send(sock, {"status": 200, "body": {"ok": True}})
    return main


def load(value: Mapping[str, Any]) -> Main:
    """The action's function.  ``env`` is exported before any user code runs."""
    for name, setting in (value.get("env") or {}).items():
        os.environ[name] = setting if isinstance(setting, str) else str(setting)
    name = value.get("main") or "main"
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # pickle and inspect look a function's module up
    if value.get("binary"):
        source, path = _unpacked(value["code"])
    else:
        source, path = value["code"], "__main__.py"
    module.__file__ = path
    exec(compile(source, path, "exec"), module.__dict__)  # noqa: S102  running user code is this process's purpose
    main = getattr(module, name, None)
    if not callable(main):
        raise TypeError(f"Invalid action: it has no function {name!r}")
    return main  # type: ignore[no-any-return]


def _unpacked(code: str) -> tuple[str, str]:
    """Source and path of ``__main__.py`` of a base64 zip, which becomes the working directory."""
    directory = tempfile.mkdtemp(prefix="action-")
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(code))) as archive:
        archive.extractall(directory)  # zipfile drops .. and absolute paths
    os.chdir(directory)
    sys.path.insert(0, directory)
    _use_virtualenv(directory)
    path = os.path.join(directory, "__main__.py")
    with open(path, encoding="utf-8") as file:
        return file.read(), path


def _use_virtualenv(directory: str) -> None:
    """OpenWhisk's zips may bring a ``virtualenv`` folder with packages."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = os.path.join(directory, "virtualenv", "lib", version, "site-packages")
    if os.path.isdir(packages):
        sys.path.insert(1, packages)


def _run_all(sock: socket.socket, main: Main, concurrency: int) -> None:
    while True:
        request = receive(sock)
        if concurrency <= 1:
            _run(sock, main, request)
        else:
            threading.Thread(target=_run_threaded, args=(sock, main, request), daemon=True).start()


def _run_threaded(sock: socket.socket, main: Main, request: Mapping[str, Any]) -> None:
    try:
        _run(sock, main, request)
    except PeerGone:
        return
    except SystemExit:
        os._exit(1)  # in a thread it would only end the thread


_send_lock = threading.Lock()


def _run(sock: socket.socket, main: Main, request: Mapping[str, Any]) -> None:
    _export(request)
    try:
        result = main(request.get("value") or {})
        status, body = (200, result) if isinstance(result, dict | list) else (502, {"error": NOT_A_DICT})
    except Exception as e:  # noqa: BLE001  an exception of user code is its result
        traceback.print_exc()
        status, body = 200, {"error": str(e)}
    end_streams()
    with _send_lock:
        _answer(sock, request["id"], status, body)


def _answer(sock: socket.socket, run_id: int, status: int, body: Any) -> None:
    try:
        send(sock, {"id": run_id, "status": status, "body": body})
    except (TypeError, ValueError):  # the result holds what JSON cannot say
        send(sock, {"id": run_id, "status": 502, "body": {"error": NOT_A_DICT}})


def _export(request: Mapping[str, Any]) -> None:
    for name in [n for n in os.environ if n.startswith("__OW_") and n not in _KEPT]:
        del os.environ[name]
    for key, setting in request.items():
        if key not in ("value", "id"):
            os.environ[f"__OW_{key.upper()}"] = setting if isinstance(setting, str) else str(setting)


_KEPT = frozenset({"__OW_API_HOST", "__OW_ALLOW_CONCURRENT"})


def end_streams() -> None:
    """The sentinel on both streams, behind everything that was printed, on a line of its own."""
    for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # user code closed or replaced it; the sentinel goes to the descriptor itself
        _write_all(fd, f"{SENTINEL}\n".encode())


def _write_all(fd: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return  # user code closed the descriptor: it has no logs then


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
