"""Clients that take their time: plain sockets, on which a test says which byte is sent when."""

from __future__ import annotations

import base64
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import redis
import requests

from tests.gateway.conftest import KEY, GatewayProcess, add_key

WAIT_S = 30.0
NAMESPACES = "/api/v1/namespaces"
ACTIONS = f"{NAMESPACES}/_/actions"
PYTHON = "python:3.11"
Start = Callable[..., GatewayProcess]
AUTH = f"Authorization: Basic {base64.b64encode(KEY.encode()).decode()}\r\n"


def connect(gateway: GatewayProcess, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.port), WAIT_S, source_address=(source, 0))


def head(method: str, path: str, *lines: str, auth: str = AUTH) -> bytes:
    text = "".join(f"{one}\r\n" for one in lines)
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{auth}{text}\r\n".encode()


def assert_serves(gateway: GatewayProcess) -> None:
    assert requests.get(f"{gateway.url}/health", timeout=WAIT_S).status_code == 200


def credentials(key: str) -> tuple[str, str]:
    user, _, password = key.partition(":")
    return user, password


def put_code(gateway: GatewayProcess, code: str, name: str = "long", key: str = KEY, **more: Any) -> dict[str, Any]:
    """Make an action of this code; the answer."""
    body = {"exec": {"kind": PYTHON, "code": code}, **more}
    reply = gateway.call("PUT", f"{ACTIONS}/{name}", json=body, auth=credentials(key))
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def put_large(gateway: GatewayProcess, n_bytes: int, name: str = "large", key: str = KEY) -> None:
    """Make an action whose answer is whole, and not made as it is read."""
    parameters = [{"key": "a", "value": "#" * n_bytes}]
    put_code(gateway, "def main(args):\n    return args\n", name, key, parameters=parameters)


def read_to_end(sock: socket.socket) -> bytes:
    """Return the bytes that the gateway sends until it closes or resets the connection."""
    data = b""
    try:
        while piece := sock.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def read_answer(sock: socket.socket) -> tuple[int, bytes]:
    """One answer whose body has a length."""
    with sock.makefile("rb") as file:
        return answer_of(file)


def answer_of(file: BufferedReader) -> tuple[int, bytes]:
    status = int(file.readline().split()[1])
    n_bytes = 0
    while (line := file.readline()) != b"\r\n":
        if line.lower().startswith(b"content-length:"):
            n_bytes = int(line.split(b":")[1])
    return status, file.read(n_bytes)


@contextmanager
def crowd(gateway: GatewayProcess, n: int, data: bytes, sources: tuple[str, ...] = ("127.0.0.2",)) -> Iterator[None]:
    """``n`` connections that have sent ``data`` and stay.  They take no port of 127.0.0.1, where servers listen."""
    with ExitStack() as stack:
        for i in range(n):
            sock = stack.enter_context(connect(gateway, sources[i % len(sources)]))
            sock.sendall(data)
        yield


def status_of(pid: int, name: str) -> int:
    """A number of /proc/PID/status: ``Threads``, or ``VmRSS`` in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def worker_pid(gateway: GatewayProcess) -> int:
    """gunicorn's master has one child, which serves."""
    pid = gateway.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@contextmanager
def memory_bounded(gateway: GatewayProcess, most_mib: int) -> Iterator[int]:
    """Check that the gateway's worker takes at most so many MiB more meanwhile.  It yields the worker's process id."""
    assert gateway.call("GET", NAMESPACES).status_code == 200
    pid = worker_pid(gateway)
    before = status_of(pid, "VmHWM")
    yield pid
    assert status_of(pid, "VmHWM") < before + most_mib * 1024


@contextmanager
def module_gateway(url: str, **environ: str) -> Iterator[GatewayProcess]:
    """A gateway with an empty state server, for all tests of a module."""
    with redis.Redis.from_url(url) as client:
        client.flushall()
    add_key(url, KEY, "guest")
    gateway = GatewayProcess(url, **environ)
    try:
        yield gateway
    finally:
        gateway.end()
