"""The process that runs user code.  It is forked before anything is known about the code, and belongs to one proxy.

It handles one init, then runs.  With a concurrency of 1, user code runs on the main thread, so signals and event loops
work as in a script.  Otherwise each run has its own thread, and all runs share the process's ``__OW_*`` variables,
which are those of the last run (so no such run gets a key).  An exception in user code is an application error.  If
user code exits, this process ends, and the proxy reports "command exited"; if a signal killed the process, the proxy
names the signal.
"""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import stat
import sys
import tempfile
import threading
import traceback
import types
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

from thaw_runtime.action.wire import INIT, MAX_MESSAGE_BYTES, Message, PeerGone, receive, send

_MODULE = "main__"
"""The name under which OpenWhisk's runtime imports an action."""
NO_BINARY = "The action failed to generate or locate a binary. See logs for details."
NOT_A_DICT = "The action did not return a dictionary or array."

Main = Callable[[Any], Any]


def serve(sock: socket.socket, layers: str = "") -> None:
    """Serve the proxy until it closes the socket.  ``layers``: the folder of the host's installed packages."""
    try:
        value = json.loads(receive(sock).body)
        main = _initialised(sock, value, layers)
        if main is not None:
            _run_all(sock, main, int(value.get("concurrency") or 1))
    except PeerGone:
        return


def _initialised(sock: socket.socket, value: Mapping[str, Any], layers: str) -> Main | None:
    try:
        main = load(value, layers)
    except (Exception, SystemExit) as e:  # noqa: BLE001  the user must be able to read every exception of the code that is loaded
        _complain(e)
        _flush()
        send(sock, INIT, _dumps({"error": NO_BINARY}), 502)
        return None
    _flush()
    send(sock, INIT, _dumps({"ok": True}), 200)
    return main


class InvalidAction(Exception):
    """The deployed code is not an action.  The message is all that the user needs to read."""


def _complain(error: Exception | SystemExit) -> None:
    """Print the frames of the user's code.  The frames of this file would not help the user."""
    if isinstance(error, SystemExit):
        said = f": {error.code}" if isinstance(error.code, str) else f" with status {error.code or 0}"
        error = InvalidAction(f"it exits while it is loaded{said}")
    if isinstance(error, InvalidAction):
        print(f"Invalid action: {error}", file=sys.stderr)
        return
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    traceback.print_exception(error.with_traceback(frames))


def load(value: Mapping[str, Any], layers: str = "") -> Main:
    """The action's function.  ``env`` is exported before any user code runs."""
    for name, setting in (value.get("env") or {}).items():
        os.environ[name] = setting if isinstance(setting, str) else str(setting)
    name = value.get("main") or "main"
    module = types.ModuleType(_MODULE)  # not __main__: what a file does as a program it does not do as an action
    sys.modules[_MODULE] = module  # pickle and inspect look up a function's module here
    sys.modules["__main__"] = module  # which would be the platform's
    if value.get("binary"):
        path = _unpacked(value["code"])
        _use_layer(layers, value.get("packages") or "")
    else:
        path = os.path.join(tempfile.mkdtemp(prefix="action-"), f"{_MODULE}.py")
        with open(path, "w", encoding="utf-8", newline="") as file:  # a traceback shows its lines
            file.write(value["code"].removeprefix("\ufeff"))
    module.__file__ = path
    with open(path, "rb") as code:
        source = code.read()  # in the encoding that it names itself
    exec(compile(source, path, "exec"), module.__dict__)  # noqa: S102  running user code is this process's purpose
    main = getattr(module, name, None)
    if not callable(main):
        raise InvalidAction(f"it has no function {name!r}")
    return main  # type: ignore[no-any-return]


def _unpacked(code: str) -> str:
    """The path of ``__main__.py`` of a base64 zip, which becomes the working directory."""
    directory = tempfile.mkdtemp(prefix="action-")
    try:
        with zipfile.ZipFile(io.BytesIO(base64.b64decode(code))) as archive:
            for member in archive.infolist():
                _extract(archive, member, directory)
    except (zipfile.BadZipFile, ValueError) as e:
        raise InvalidAction(f"its code is not a zip file that can be read: {e}") from e
    os.chdir(directory)
    sys.path.insert(0, directory)
    _use_virtualenv(directory)
    path = os.path.join(directory, "__main__.py")
    if not os.path.isfile(path):
        raise InvalidAction(f"the zip has no __main__.py at its top, only {_top(directory)}")
    return path


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, directory: str) -> None:
    """Write a file with the mode that it had when it was packed, and a link as a link.  Raises InvalidAction for a link
    that leads out of the zip."""
    path = archive.extract(member, directory)  # which removes .. and makes absolute paths relative
    mode = member.external_attr >> 16
    if stat.S_ISLNK(mode):
        target = archive.read(member).decode()
        os.unlink(path)
        os.symlink(target, path)
        top = os.path.realpath(directory)
        if os.path.commonpath([top, os.path.realpath(path)]) != top:
            raise InvalidAction(f"its zip has a link that leads out of it: {member.filename} to {target}")
    elif stat.S_ISREG(mode) or (mode & 0o777 and not member.is_dir()):
        os.chmod(path, mode & 0o777 | 0o600)


def _top(directory: str) -> str:
    names = sorted(os.listdir(directory))
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "") if names else "nothing"


def _use_virtualenv(directory: str) -> None:
    """OpenWhisk's zips may bring a ``virtualenv`` folder with packages."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = os.path.join(directory, "virtualenv", "lib", version, "site-packages")
    if os.path.isdir(packages):
        sys.path.insert(1, packages)


def _use_layer(layers: str, name: str) -> None:
    """Add the packages that the host has installed for the action to the path.  They are a plain folder: its ``.pth``
    files are not read."""
    if not name:
        return
    layer = os.path.join(layers, name)
    if not os.path.isdir(layer):
        raise InvalidAction("the packages of its requirements.txt are not on this host: deploy it again")
    sys.path.insert(1, layer)


def _run_all(sock: socket.socket, main: Main, concurrency: int) -> None:
    while True:
        request = receive(sock)
        if concurrency <= 1:
            _run(sock, main, request)
        else:
            threading.Thread(target=_run_threaded, args=(sock, main, request), daemon=True).start()


def _run_threaded(sock: socket.socket, main: Main, request: Message) -> None:
    try:
        _run(sock, main, request)
    except PeerGone:
        return
    except SystemExit:
        os._exit(1)  # the exception alone would end only this thread


_send_lock = threading.Lock()


def _run(sock: socket.socket, main: Main, request: Message) -> None:
    status, body = _answer(main, request.body)
    _flush()
    with _send_lock:
        send(sock, request.run_id, body, status)


def _answer(main: Main, body: bytes) -> tuple[int, bytes]:
    """Run the function; return a status and JSON.  The proxy has not examined ``body``."""
    try:
        request = json.loads(body)
    except ValueError as e:
        return 400, _dumps(refusal("BadRequest", f"Error unmarshaling request: {e}"))
    if not isinstance(request, dict):
        return 400, _dumps(refusal("BadRequest", "Error unmarshaling request: not a JSON object"))
    _export(request)
    try:
        result = main(request.get("value") or {})
    except Exception as e:  # noqa: BLE001  an exception of user code is its result
        traceback.print_exc()
        return 200, _dumps({"error": str(e)})
    finally:
        os.environ.pop("__OW_API_KEY", None)  # code that goes on after the run must not use the run's key
    if isinstance(result, dict | list):
        try:
            data = _dumps(result)
            if len(data) <= MAX_MESSAGE_BYTES:
                return 200, data
        except (TypeError, ValueError, RecursionError):  # the result holds a value that JSON cannot express
            pass
    return 502, _dumps({"error": NOT_A_DICT})


def refusal(code: str, error: str, hint: str = "") -> dict[str, Any]:
    """The body of an answer that does not come from the function."""
    return {"error": error, "info": {"code": code, "message": error, "hint": hint}}


def _dumps(value: object) -> bytes:
    return json.dumps(value).encode()


def _export(request: Mapping[str, Any]) -> None:
    for name in [n for n in os.environ if n.startswith("__OW_") and n not in _KEPT]:
        del os.environ[name]
    for key, setting in request.items():
        if key != "value":
            os.environ[f"__OW_{key.upper()}"] = setting if isinstance(setting, str) else str(setting)


_KEPT = frozenset({"__OW_API_HOST", "__OW_ALLOW_CONCURRENT"})


def _flush() -> None:
    """Flush the output, so that it is in the pipe before the answer is sent: the proxy puts the sentinel behind it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # user code closed or replaced the stream
