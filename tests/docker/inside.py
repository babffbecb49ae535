"""Run Python inside a function's container, in the same way as an action, and return its result."""

from __future__ import annotations

import json
from typing import Any

from invoker.drivers.base import Driver, Handle, Spec
from relay.clients.http_unix import UnixConnection
from thaw.action import KIND_PYTHON

WAIT_S = 30.0

PROBES = '''
import json, os, socket

def attempt(call):
    """What came of it: "reached …" or the error's name."""
    try:
        return f"reached {call()}"
    except OSError as e:
        return type(e).__name__ + " " + os.strerror(e.errno or 0)

def tcp(host, port):
    def call():
        with socket.create_connection((host, port), timeout=1) as sock:
            return sock.recv(16)
    return attempt(call)

def udp(host, port):
    def call():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(1)
            sock.sendto(b"ping", (host, port))
            return sock.recv(16)
    return attempt(call)

def unix(path):
    def call():
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            return "connected"
    return attempt(call)
'''


def up(driver: Driver, container_id: str, **spec: Any) -> Handle:
    wanted = Spec(container_id, KIND_PYTHON, **spec)
    handle = driver.start(driver.create(wanted), wanted)
    driver.connect(handle, deadline_s=WAIT_S)
    return handle


def post(handle: Handle, path: str, value: Any, *, deadline_s: float = WAIT_S) -> tuple[int, Any]:
    connection = UnixConnection(handle.socket_path, deadline_s)
    try:
        connection.request("POST", path, json.dumps({"value": value}).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def load(handle: Handle, code: str) -> None:
    status, reply = post(handle, "/init", {"name": "t", "main": "main", "code": PROBES + code, "binary": False})
    assert status == 200, reply


def ask(handle: Handle, **arguments: Any) -> Any:
    status, reply = post(handle, "/run", arguments)
    assert status == 200, reply
    return reply
