"""The object transport: foreign objects in the store, messages that are never read, and a store that is away."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from relay.protocol import frames
from relay.protocol.frames import FrameHeader, FrameKind
from relay.protocol.messages import GroupCredential, GroupLink
from relay.transports.base import Flow
from relay.transports.connect import connect
from relay.transports.object import ObjectTransport, Store, _mac
from relay.transports.object_dir import DirStore
from relay.transports.object_s3 import S3Store
from tests.conformance.transports import Worker
from tests.conftest import free_port
from thaw.errors import PlatformError, ProtocolError, StoreUnavailable, Unavailable
from thaw.ids import GroupId
from thaw.plan import TransportKind
from thaw.s3 import S3Access

GROUP = GroupId("ab" * 16)
SECRET = "the group's secret"
HIDDEN = FrameHeader(FrameKind.HIDDEN_STATES, group_id=bytes.fromhex(GROUP))
FLOW = Flow(chunk_bytes=1000, window_bytes=20_000, resume_s=0.3)
FIRST = "0-000-0000000000000000-00000000"


@pytest.fixture(params=[True, False], ids=["inotify", "polling"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[ObjectTransport]]:
    store = DirStore(tmp_path, notify=request.param)
    with closing(stage(store, 0, ttl_s=0.05)) as one, closing(stage(store, 1, ttl_s=0.05)) as two:
        yield [one, two]


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[ObjectTransport]:
    with closing(stage(DirStore(tmp_path), 1)) as made:
        yield made


def stage(store: Store, number: int, **more: float) -> ObjectTransport:
    return ObjectTransport(store, GROUP, number, (1 - number,), secret=SECRET, flow=FLOW, **more)


def put(root: Path, name: str, body: bytes, secret: str = SECRET) -> None:
    """Put an object into the store.  A member of the group would put the same if ``secret`` is the group's."""
    folder = root / GROUP / "1"
    folder.mkdir(parents=True, exist_ok=True)
    mac = _mac(secret.encode(), 1, name, body[:64], memoryview(body[64:]))
    (folder / ".made").write_bytes(mac + body)
    (folder / ".made").rename(folder / name)


def test_a_waiting_receiver_is_woken_by_what_comes(ends: list[ObjectTransport]) -> None:
    waiting = Worker(lambda: ends[1].receive(deadline_s=20))
    ends[0].send(1, HIDDEN, b"x" * 3000, deadline_s=20)
    waiting.join()


def test_what_was_read_leaves_the_store(ends: list[ObjectTransport], tmp_path: Path) -> None:
    ends[0].send(1, HIDDEN, b"x" * 3000, deadline_s=20)
    assert len(list((tmp_path / GROUP / "1").iterdir())) == 3
    ends[1].receive(deadline_s=20)
    with pytest.raises(TimeoutError):
        ends[1].receive(deadline_s=0)
    assert list((tmp_path / GROUP / "1").iterdir()) == []


def test_what_nobody_reads_is_taken_back_by_its_sender(ends: list[ObjectTransport], tmp_path: Path) -> None:
    ends[0].send(1, HIDDEN, b"never read", deadline_s=20)
    with pytest.raises(TimeoutError):
        ends[0].receive(deadline_s=0.1)  # this takes longer than the message's time to live
    ends[0].send(1, HIDDEN, b"later", deadline_s=20)
    assert [p.name for p in (tmp_path / GROUP / "1").iterdir()] == ["0-000-0000000000000001-00000000"]
    with pytest.raises(ProtocolError, match="frames before .* are lost"):
        ends[1].receive(deadline_s=20)


@pytest.mark.parametrize(
    ("name", "body", "secret", "message"),
    [
        (FIRST, frames.encode(HIDDEN, b"x"), "another", "not a frame of this group, or damaged"),
        (FIRST, b"", SECRET, "not a frame: an object of 32 bytes"),
        (FIRST, frames.encode(HIDDEN, b"x") + b"y", SECRET, "claims 1 bytes and carries 2"),
        (FIRST, frames.encode(FrameHeader(FrameKind.KV), b"x"), SECRET, "another group or priority"),
        (FIRST[:-1] + "1", frames.encode(HIDDEN, b"x"), SECRET, "frames before .* are lost"),
        ("0-007-0000000000000000-00000000", frames.encode(HIDDEN, b"x"), SECRET, "stage 7, which is no peer"),
        ("0-zero", frames.encode(HIDDEN, b"x"), SECRET, "an object that is no frame"),
        (FIRST, bytes(9 << 20), SECRET, "the limit is"),
    ],
    ids=["secret", "empty", "length", "group", "gap", "sender", "name", "size"],
)
def test_a_forged_object_is_refused(
    receiver: ObjectTransport, tmp_path: Path, name: str, body: bytes, secret: str, message: str
) -> None:
    put(tmp_path, name, body, secret)
    with pytest.raises(ProtocolError, match=message):
        receiver.receive(deadline_s=20)


def test_an_object_cannot_be_used_in_another_place(receiver: ObjectTransport, tmp_path: Path) -> None:
    put(tmp_path, FIRST, frames.encode(HIDDEN, b"x"))
    folder = tmp_path / GROUP / "1"
    assert bytes(receiver.receive(deadline_s=20).payload) == b"x"
    put(tmp_path, FIRST, frames.encode(HIDDEN, b"x"))
    (folder / FIRST).rename(folder / "0-000-0000000000000001-00000000")
    with pytest.raises(ProtocolError, match="not a frame of this group"):
        receiver.receive(deadline_s=20)


def test_a_group_that_ended_leaves_the_directory(tmp_path: Path) -> None:
    store = DirStore(tmp_path)
    with closing(stage(store, 0)) as sender:
        sender.send(1, HIDDEN, b"x", deadline_s=20)
    store.drop_group(GROUP)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_goes_away_ends_in_unavailable(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="no such directory"):
        DirStore(tmp_path / "missing")
    root = tmp_path / "shared"
    root.mkdir()
    with closing(stage(DirStore(root), 0)) as sender, closing(stage(DirStore(root), 1)) as receiver:
        root.rename(tmp_path / "unmounted")
        root.write_text("not a directory")
        with pytest.raises(Unavailable, match="the store does not answer"):
            sender.send(1, HIDDEN, b"x", deadline_s=0.1)
        with pytest.raises(Unavailable, match="the store does not answer"):
            receiver.receive(deadline_s=20)


def test_a_store_that_is_not_there_or_refuses_ends_in_unavailable() -> None:
    nobody = S3Store("s3://relay/x", S3Access(f"http://127.0.0.1:{free_port()}", key_id="k", secret="s"))
    with closing(stage(nobody, 1)) as receiver, pytest.raises(Unavailable, match="the store does not answer"):
        receiver.receive(deadline_s=20)


def test_a_store_that_answers_without_end_is_cut_off() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = S3Store("s3://relay/x", S3Access(f"http://127.0.0.1:{server.getsockname()[1]}", key_id="k", secret="s"))

        def answer() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(65536)
                sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")

        serving = Worker(answer)
        with (
            closing(stage(store, 1)) as receiver,
            pytest.raises(ProtocolError, match="99999999999 bytes; the limit is"),
        ):
            receiver.receive(deadline_s=20)
        serving.join()


@pytest.mark.parametrize(
    ("kind", "address", "message"),
    [
        (TransportKind.OBJECT, "ftp://x/y", "does not know 'ftp://x/y'"),
        (TransportKind.NONE, "", "has no transport"),
        (TransportKind.REDIS, "rediss://h", "scheme 'rediss'"),
    ],
)
def test_a_link_that_leads_nowhere_is_refused(kind: TransportKind, address: str, message: str) -> None:
    link = GroupLink(kind, address, GroupCredential("", ""))
    with pytest.raises(PlatformError, match=message):
        connect(link, GROUP, 0, 2)
    with pytest.raises(PlatformError, match="stage 2 of 2"):
        connect(link, GROUP, 2, 2)
