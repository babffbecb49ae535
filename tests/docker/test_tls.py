"""deploy/tls/nginx.conf in a real nginx: the data that it passes on, and when."""

from __future__ import annotations

import http.client
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.docker import standins
from tests.docker.engine import ROOT
from thaw.dev.watch import wait_for_line

WAIT_S = 20.0
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class Proxy:
    gateway: socket.socket  # a socket that listens where nginx expects the gateway
    port: int
    trusts: ssl.SSLContext

    def ask(self) -> http.client.HTTPSConnection:
        connection = http.client.HTTPSConnection("localhost", self.port, timeout=WAIT_S, context=self.trusts)
        connection.request("POST", "/v1/chat/completions", b'{"stream": true}', {"Authorization": "Basic x"})
        return connection


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost",
        "-keyout",
        f"{tmp_path}/tls.key",
        "-out",
        f"{tmp_path}/tls.crt",
    ]
    subprocess.run(command, check=True, capture_output=True)
    tmp_path.chmod(0o755)
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as gateway:
        gateway.settimeout(WAIT_S)
        conf = (ROOT / "deploy/tls/nginx.conf").read_text()
        for theirs, ours in (
            ("/tmp/", f"{tmp_path}/"),
            ("/etc/nginx/certs/", f"{tmp_path}/"),
            ("gateway:3233", f"127.0.0.1:{gateway.getsockname()[1]}"),
            ("listen 3443", f"listen 127.0.0.1:{port}"),
            ("error_log stderr warn", "error_log stderr notice"),
        ):
            assert theirs in conf
            conf = conf.replace(theirs, ours)
        (tmp_path / "nginx.conf").write_text(conf)
        log = tmp_path / "log"
        with log.open("wb") as out:
            running = subprocess.Popen(
                [standins.nginx(), "-c", tmp_path / "nginx.conf", "-g", "daemon off; user root;"], stderr=out
            )
        try:
            assert wait_for_line(log, "start worker process ", WAIT_S), log.read_text()
            yield Proxy(gateway, port, ssl.create_default_context(cafile=tmp_path / "tls.crt"))
        finally:
            running.terminate()
            running.wait(WAIT_S)


def head_of(connection: socket.socket) -> bytes:
    head = b""
    while b'"stream": true}' not in head:
        head += connection.recv(4096)
    return head


def test_a_token_arrives_before_the_next_one_is_made(proxy: Proxy) -> None:
    seen = threading.Event()
    heads: list[bytes] = []

    def serve() -> None:
        connection, _ = proxy.gateway.accept()
        with connection:
            heads.append(head_of(connection))
            connection.sendall(HEAD + b"5\r\nfirst\r\n")
            assert seen.wait(WAIT_S)
            connection.sendall(b"6\r\nsecond\r\n0\r\n\r\n")

    serving = threading.Thread(target=serve)
    serving.start()
    connection = proxy.ask()
    response = connection.getresponse()
    assert response.read(5) == b"first"
    seen.set()
    assert response.read() == b"second"
    connection.close()
    serving.join(WAIT_S)
    assert b"Authorization: Basic x" in heads[0]
    assert b"Host: localhost" in heads[0]


def test_a_client_that_hangs_up_is_seen_by_the_gateway(proxy: Proxy) -> None:
    ended: list[bytes] = []

    def serve() -> None:
        connection, _ = proxy.gateway.accept()
        with connection:
            connection.settimeout(WAIT_S)
            head_of(connection)
            connection.sendall(HEAD + b"5\r\nfirst\r\n")
            ended.append(connection.recv(1))

    serving = threading.Thread(target=serve)
    serving.start()
    connection = proxy.ask()
    response = connection.getresponse()
    assert response.read(5) == b"first"
    response.close()
    connection.close()
    serving.join(WAIT_S)
    assert ended == [b""]


def test_without_tls_nothing_reaches_the_gateway(proxy: Proxy) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=WAIT_S)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 400
    connection.close()
    proxy.gateway.setblocking(False)
    with pytest.raises(BlockingIOError):
        proxy.gateway.accept()
