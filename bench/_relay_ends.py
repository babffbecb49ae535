"""The two processes of bench/hops.py, and the servers between them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import hiredis

from bench._common import Program, die_with_parent, start
from relay.protocol.frames import FrameHeader, FrameKind
from relay.protocol.messages import GroupCredential, GroupLink
from relay.transports.connect import connect
from thaw.dev.components import _valkey_server
from thaw.dev.ports import free_ports
from thaw.ids import GroupId, random_hex_id
from thaw.plan import TransportKind

_HEADER = FrameHeader(FrameKind.HIDDEN_STATES)
_WARM_UP = 20


@dataclass(frozen=True, slots=True)
class Sample:
    one_way_us: tuple[float, ...]
    mb_s: float = 0.0

    def __repr__(self) -> str:
        return f"{sorted(self.one_way_us)[len(self.one_way_us) // 2]:.1f} µs"


class End(Protocol):
    def send(self, payload: bytes) -> None: ...
    def receive(self, n_bytes: int) -> object: ...
    def close(self) -> None: ...


class RawRedis:
    """hiredis on a bare socket.  ``stream`` uses XADD and XREAD instead of RPUSH and BLPOP."""

    def __init__(self, port: int, group: str, me: int, *, stream: bool) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()
        self._stream = stream
        self._mine, self._other = (f"raw:{group}:{k}".encode() for k in (me, 1 - me))
        self._at = b"0"

    def send(self, payload: bytes) -> None:
        if self._stream:
            self._call(b"XADD", self._other, b"*", b"f", payload)
        else:
            self._call(b"RPUSH", self._other, payload)

    def receive(self, n_bytes: int) -> object:
        if not self._stream:
            return self._call(b"BLPOP", self._mine, b"0")
        reply = self._call(b"XREAD", b"COUNT", b"1", b"BLOCK", b"0", b"STREAMS", self._mine, self._at)
        self._at = reply[0][1][-1][0]
        return reply

    def close(self) -> None:
        self._call(b"UNLINK", self._mine)
        self._sock.close()

    def _call(self, *arguments: bytes) -> Any:
        self._sock.sendall(hiredis.pack_command(arguments))  # type: ignore[arg-type]  # its stub allows one argument
        while (reply := self._reader.gets()) is False:
            self._reader.feed(self._sock.recv(256 * 1024))
        return reply


class RawTcp:
    """Two blocking sockets.  Both ends know the length of a message."""

    def __init__(self, directory: Path, me: int) -> None:
        place = directory / "raw-tcp-port"
        if me == 0:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                made = place.with_suffix(".made")
                made.write_text(str(listener.getsockname()[1]))
                made.rename(place)
                self._sock, _ = listener.accept()
            place.unlink()
        else:
            port = _wait_for_text(place)
            self._sock = socket.create_connection(("127.0.0.1", int(port)))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(0)

    def send(self, payload: bytes) -> None:
        self._sock.sendall(payload)

    def receive(self, n_bytes: int) -> object:
        if len(self._buffer) != n_bytes:
            self._buffer = bytearray(n_bytes)
        if self._sock.recv_into(self._buffer, n_bytes, socket.MSG_WAITALL) != n_bytes:
            raise ConnectionResetError
        return self._buffer

    def close(self) -> None:
        self._sock.close()


class Ours:
    def __init__(self, link: GroupLink, group_id: GroupId, me: int) -> None:
        self._transport, self._peer = connect(link, group_id, me, 2), 1 - me

    def send(self, payload: bytes) -> None:
        self._transport.send(self._peer, _HEADER, payload, deadline_s=120)

    def receive(self, n_bytes: int) -> object:
        return self._transport.receive(deadline_s=120)

    def close(self) -> None:
        self._transport.close()


class Servers:
    """A relay server without persistence, a shared directory, and an S3 server if requested."""

    def __init__(self, work: Path, *, s3: bool) -> None:
        self._work, self._s3 = work, s3
        self.stores = ("dir", "s3") if s3 else ("dir",)
        self._programs: list[Program] = []
        self._left_behind: list[Path] = []
        (self._port,) = free_ports(1)

    def __enter__(self) -> Servers:
        command = [
            str(_valkey_server()),
            "--port",
            str(self._port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            str(self._work),
        ]
        self._programs.append(start(command, self._work / "relay.log", "Ready to accept connections"))
        (self._work / "shared").mkdir()
        if self._s3:
            self._start_s3()
        return self

    def __exit__(self, *_: object) -> None:
        for program in self._programs:
            program.stop(signal.SIGKILL)
        for left in self._left_behind:
            left.unlink(missing_ok=True)

    def ping_pong(self, name: str, payload: bytes, n_messages: int) -> Sample:
        def there(end: End) -> list[float]:
            found = []
            for _ in range(_warm(n_messages) + n_messages):
                began = time.perf_counter()
                end.send(payload)
                end.receive(len(payload))
                found.append((time.perf_counter() - began) / 2 * 1e6)
            return found

        def back(end: End) -> None:
            for _ in range(_warm(n_messages) + n_messages):
                end.receive(len(payload))
                end.send(payload)

        return Sample(tuple(self._both(name, there, back)[_warm(n_messages) :]))

    def one_way(self, name: str, payload: bytes, n_messages: int) -> Sample:
        """Measure until the receiver has confirmed the last message."""

        def there(end: End) -> list[float]:
            began = time.perf_counter()
            for _ in range(n_messages):
                end.send(payload)
            end.receive(1)
            return [(time.perf_counter() - began) * 1e6]

        def back(end: End) -> None:
            for _ in range(n_messages):
                end.receive(len(payload))
            end.send(b"x")

        (took_us,) = self._both(name, there, back)
        return Sample((took_us / n_messages,), len(payload) * n_messages / took_us)

    def _both(self, name: str, there: Callable[[End], list[float]], back: Callable[[End], None]) -> list[float]:
        group = random_hex_id()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(writing)
            _child(lambda: _until_closed(reading, lambda: back(self._end(name, group, 1))))
        os.close(reading)
        try:
            end = self._end(name, group, 0)
            found = there(end)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        finally:
            os.close(writing)
        _, status = os.waitpid(pid, 0)
        end.close()
        if status:
            raise SystemExit(f"{name}: the other end failed")
        return found

    def _end(self, name: str, group: str, me: int) -> End:
        if name in ("raw_redis", "raw_stream"):
            return RawRedis(self._port, group, me, stream=name == "raw_stream")
        if name == "raw_tcp":
            return RawTcp(self._work, me)
        address = f"redis://127.0.0.1:{self._port}/0"
        nobody = GroupCredential("", "")
        links = {
            "redis": GroupLink(TransportKind.REDIS, address, nobody),
            "tcp": GroupLink(TransportKind.TCP, address, nobody, "127.0.0.1"),
            "dir": GroupLink(TransportKind.OBJECT, f"file://{self._work / 'shared'}", nobody),
            "s3": GroupLink(TransportKind.OBJECT, "s3://relay/bench", nobody),
        }
        return Ours(links[name], GroupId(group), me)

    def _start_s3(self) -> None:
        ports = free_ports(4)
        identity = {"name": "b", "credentials": [{"accessKey": "bench", "secretKey": "bench"}], "actions": ["Admin"]}
        config = self._work / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        (self._work / "store").mkdir()
        command = [
            str(Path(sys.executable).with_name("weed")),
            "-logtostderr=true",
            "server",
            f"-dir={self._work / 'store'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-s3",
            f"-s3.port={ports[0]}",
            f"-s3.config={config}",
            f"-master.port={ports[1]}",
            f"-volume.port={ports[2]}",
            f"-filer.port={ports[3]}",
            "-master.telemetry=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]
        roles = zip(("s3", "master", "volume", "filer"), ports, strict=True)
        self._left_behind = [
            Path(f"/tmp/seaweedfs-{name}.sock")
            for role, port in roles
            for name in (f"{role}-{port}", f"{role}-grpc-{port + 10_000}")
        ]
        self._programs.append(start(command, self._work / "s3.log", "Start Seaweed S3 API Server"))
        os.environ |= {
            "THAW_S3_ENDPOINT": f"http://127.0.0.1:{ports[0]}",
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": "us-east-1",
        }
        _make_bucket()


def _child(work: Callable[[], None]) -> None:
    """Run ``work`` in the forked process and exit, so that no code of the parent runs in the child."""
    status = 1
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def _until_closed(reading: int, work: Callable[[], None]) -> None:
    """Stay until the other end has received everything.

    A process that exits with unread acknowledgements resets its connection, and its last message is lost.
    """
    work()
    os.read(reading, 1)


def _warm(n_messages: int) -> int:
    return min(_WARM_UP, n_messages)


def _make_bucket() -> None:
    """Make the bucket with boto3 in a process of its own: boto3's threads must not exist when this process forks."""
    code = """
import os, time, boto3
client = boto3.client("s3", endpoint_url=os.environ["THAW_S3_ENDPOINT"])
for attempt in range(300):  # the port opens before the store behind it can take a bucket
    try:
        client.create_bucket(Bucket="relay")
        client.put_object(Bucket="relay", Key="probe", Body=b"x")
        break
    except Exception:
        time.sleep(0.1)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def _wait_for_text(place: Path) -> str:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            return place.read_text()
        except FileNotFoundError:
            time.sleep(0.001)
    raise TimeoutError(str(place))
