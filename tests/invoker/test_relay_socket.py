"""Sockets to the relay server: across restarts of an invoker, and to a server that speaks TLS."""

from __future__ import annotations

import contextlib
import select
import socket
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from invoker.drivers.relay_socket import RelaySockets
from tests.conftest import ValkeyServer
from thaw.errors import PlatformError
from thaw.logs import Log

LOG = Log("invoker")


def test_a_relay_socket_survives_an_invoker_that_dies_before_it_has_opened_it_again(run_dir: Path) -> None:
    directory = run_dir / "relays"
    with closing(RelaySockets(directory, LOG)) as killed:
        urls = [killed.inside(f"redis://127.0.0.1:{port}", "/there") for port in (1, 2)]
        names = [Path(urlsplit(url).path).name for url in urls]
        RelaySockets(directory, LOG)  # this invoker dies before it opens the sockets again
        with closing(RelaySockets(directory, LOG)) as following:
            following.reopen()
            assert sorted(path.name for path in directory.iterdir()) == sorted(names)
    with closing(RelaySockets(directory, LOG)) as last:
        last.reopen()  # an invoker that ended normally leaves no socket
        assert list(directory.glob("*.sock")) == []


def certificate(directory: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that is its own authority, and its key."""
    made, key = directory / "relay.pem", directory / "relay.key"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=relay"]
    files = ("-addext", "subjectAltName=IP:127.0.0.1", "-out", made, "-keyout", key)
    subprocess.run(["openssl", "req", "-x509", *kind, *files], check=True, capture_output=True)
    return made, key


class TlsServer(socketserver.ThreadingTCPServer):
    """The end of TLS in front of a real relay server, as providers of Redis have it."""

    daemon_threads = True

    def __init__(self, relay_port: int, files: tuple[Path, Path]) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.relay_port = relay_port
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.load_cert_chain(*files)


class Passing(socketserver.BaseRequestHandler):
    server: TlsServer

    def handle(self) -> None:
        with (
            contextlib.suppress(OSError),  # the client does not trust the certificate, or has left
            self.server.context.wrap_socket(self.request, server_side=True) as client,
            socket.create_connection(("127.0.0.1", self.server.relay_port)) as relay,
        ):
            others = {client: relay, relay: client}
            while True:  # in one thread, because a TLS connection is not for two
                ready = [client] if client.pending() else select.select([client, relay], [], [])[0]
                for source in ready:
                    if not (data := source.recv(65536)):
                        return
                    others[source].sendall(data)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    directory = tmp_path_factory.mktemp("tls")
    valkey, files = ValkeyServer(directory, durable=False), certificate(directory)
    valkey.start()
    with TlsServer(valkey.port, files) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server.server_address[1], files[0]
        server.shutdown()
    valkey.kill()


def test_a_stage_reaches_a_relay_server_with_tls_through_its_hosts_socket(run_dir: Path, tls: tuple[int, Path]) -> None:
    port, authority = tls
    with closing(RelaySockets(run_dir / "relays", LOG)) as relays:
        url = relays.inside(f"rediss://127.0.0.1:{port}/3?ssl_ca_certs={authority}", str(run_dir / "relays"))
        assert url.startswith("unix://")
        assert url.endswith(".sock?db=3")
        payload = bytes(range(256)) * 20_000  # several reads each way
        with redis.Redis.from_url(url) as stage, redis.Redis.from_url(url) as other:
            stage.set("frame", payload)
            assert other.get("frame") == payload
        assert relays.inside(f"rediss://127.0.0.1:{port}/3?ssl_ca_certs={authority}", "/there").startswith("unix:///t")


def test_a_relay_server_whose_certificate_is_not_trusted_gets_nothing(run_dir: Path, tls: tuple[int, Path]) -> None:
    port, _ = tls
    with closing(RelaySockets(run_dir / "relays", LOG)) as relays:
        url = relays.inside(f"rediss://127.0.0.1:{port}/0", str(run_dir / "relays"))
        with redis.Redis.from_url(url) as stage, pytest.raises(redis.ConnectionError):
            stage.ping()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("rediss://h?ssl_cert_reqs=none", "the option ssl_cert_reqs"),
        ("https://h", "the scheme 'https'"),
        ("rediss:///0", "the scheme 'rediss'"),
    ],
)
def test_an_address_that_no_socket_can_lead_to_is_refused(run_dir: Path, address: str, said: str) -> None:
    with closing(RelaySockets(run_dir / "relays", LOG)) as relays, pytest.raises(PlatformError, match=said):
        relays.inside(address, "/there")


def test_an_authority_that_is_not_there_is_told_to_who_starts_a_group(run_dir: Path) -> None:
    no_way = pytest.raises(PlatformError, match="no way to the relay server h:1")
    with closing(RelaySockets(run_dir / "relays", LOG)) as relays, no_way:
        relays.inside("rediss://h:1?ssl_ca_certs=/no/such/file", "/there")
