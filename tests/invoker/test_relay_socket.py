"""Sockets to the relay server: across restarts of an invoker, and to a server that speaks TLS."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from invoker.drivers.relay_socket import RelaySockets
from tests.conftest import ValkeyServer
from thaw.errors import PlatformError
from thaw.logs import Log

LOG = Log("invoker")


def test_a_relay_socket_survives_an_invoker_that_dies_before_it_has_opened_it_again(run_dir: Path) -> None:
    directory = run_dir / "relays"
    with closing(RelaySockets(directory, LOG)) as killed:
        names = [
            killed.inside(f"redis://127.0.0.1:{port}", "/there").partition("?")[0].rpartition("/")[2] for port in (1, 2)
        ]
        RelaySockets(directory, LOG)  # this invoker dies before it opens the sockets again
        with closing(RelaySockets(directory, LOG)) as following:
            following.reopen()
            assert sorted(path.name for path in directory.iterdir()) == sorted(names)
    with closing(RelaySockets(directory, LOG)) as last:
        last.reopen()  # an invoker that ended normally leaves no socket
        assert list(directory.glob("*.sock")) == []


def certificate(directory: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that is its own authority, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "relay")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))
        .not_valid_after(datetime.now(UTC) + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(True, None), True)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = directory / "relay.pem", directory / "relay.key"
    certificate_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate_file, key_file


class TlsServer:
    """A real relay server behind the end of TLS, as providers of Redis have it."""

    def __init__(self, relay_port: int, files: tuple[Path, Path]) -> None:
        self._relay_port = relay_port
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(*files)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._join, "127.0.0.1", 0, ssl=self._context)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inside, out = await asyncio.open_connection("127.0.0.1", self._relay_port)
        there, back = asyncio.create_task(_copy(reader, out)), asyncio.create_task(_copy(inside, writer))
        try:
            await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
            out.close()
            writer.close()
            await asyncio.gather(there, back, return_exceptions=True)
        finally:  # close() may end this server while a client is connected
            out.transport.abort()
            writer.transport.abort()

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    directory = tmp_path_factory.mktemp("tls")
    valkey, files = ValkeyServer(directory, durable=False), certificate(directory)
    valkey.start()
    with closing(TlsServer(valkey.port, files)) as server:
        yield server.port, files[0]
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
