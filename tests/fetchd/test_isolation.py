"""Things that a container may not do with fetchd's memory, the state after a process has died, and a full disk."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from fetchd.descriptor_sockets import FDS_PER_MESSAGE
from relay.clients.channel import Channel
from relay.clients.fetch import DescriptorClient, FetchClient
from relay.protocol.frames import FrameHeader, FrameKind, encode
from relay.protocol.messages import Status, StatusQuery, from_plain, to_plain
from tests.fetchd.harness import ROOT, WEIGHTS, Fetchd, wait_until, write_model
from thaw.errors import PlatformError, Unavailable
from thaw.ids import GroupId, InstanceId
from thaw.model import ModelFacts

PRELUDE = """
import array, ctypes, fcntl, json, mmap, os, socket, sys
from relay.clients.channel import Channel
from relay.protocol.messages import SegmentWanted, from_plain, to_plain
channel = Channel.connect(sys.argv[1])
channel.send(to_plain(SegmentWanted()))
plain, fds = channel.receive()
offer = from_plain(plain)
"""

ATTACK = (
    PRELUDE
    + """
def attempt(name, call):
    try:
        call()
    except (OSError, ValueError) as e:
        print(name, "refused", type(e).__name__)
    else:
        print(name, "POSSIBLE")

def reopen_and(fd, act):
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        act(again)
    finally:
        os.close(again)

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def make_writable(fd):
    address = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if libc.mprotect(address, 4096, mmap.PROT_READ | mmap.PROT_WRITE) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")

def map_writable(fd):
    mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE).close()

for what, fd in (("control", fds[0]), ("slab", fds[1])):
    attempt(what + " write", lambda: os.pwrite(fd, b"x", 0))
    attempt(what + " map", lambda: map_writable(fd))
    attempt(what + " mprotect", lambda: make_writable(fd))
    attempt(what + " truncate", lambda: os.ftruncate(fd, 0))
    attempt(what + " reopen write", lambda: reopen_and(fd, lambda again: os.pwrite(again, b"x", 0)))
    attempt(what + " reopen map", lambda: reopen_and(fd, map_writable))
    attempt(what + " reopen punch", lambda: reopen_and(fd, lambda again: os.posix_fallocate(again, 0, 1 << 30)))
    attempt(what + " reopen truncate", lambda: reopen_and(fd, lambda again: os.ftruncate(again, 0)))
    attempt(what + " seal", lambda: reopen_and(fd, lambda again: fcntl.fcntl(again, fcntl.F_ADD_SEALS, 1)))
print("n_fds", len(fds), "n_slabs", offer.n_slabs)
"""
)


PYTHON = {**os.environ, "PYTHONPATH": str(ROOT)}


def run_child(code: str, path: str) -> str:
    command = [sys.executable, "-c", code, path]
    done = subprocess.run(command, env=PYTHON, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def inspect(fetchd: Fetchd, tmp_path: Path, seed: int = 1) -> ModelFacts:
    return fetchd.client.inspect(write_model(tmp_path / f"m{seed}", seed=seed).as_uri())


def test_not_even_root_in_a_container_can_change_a_segment_by_any_way_it_has(tmp_path: Path) -> None:
    with Fetchd(tmp_path) as fetchd, fetchd.reading(fetchd.start(inspect(fetchd, tmp_path)).segment_id) as reader:
        reader.wait(reader.n_bytes, 20)
        before = bytes(reader.view(0, reader.n_bytes))
        output = run_child(ATTACK, fetchd.client.open_descriptor_socket(InstanceId("i1"))).splitlines()
        assert len(output) == 19
        assert [line for line in output[:-1] if "refused" not in line] == []
        assert bytes(reader.view(0, reader.n_bytes)) == before
        with pytest.raises(TypeError, match="read-only"):
            reader.view(0, 1)[0] = 1


def test_a_descriptor_socket_shows_its_own_segment_and_no_slab_of_another_model(tmp_path: Path) -> None:
    identify = PRELUDE + "print(*[os.fstat(fd).st_ino for fd in fds])"
    with Fetchd(tmp_path) as fetchd, contextlib.ExitStack() as stack:
        inodes = []
        for i in range(2):
            started = fetchd.start(inspect(fetchd, tmp_path, seed=i), f"g{i}")
            reader = stack.enter_context(fetchd.reading(started.segment_id, f"i{i}"))
            reader.wait(started.n_bytes, 20)
            path = fetchd.client.open_descriptor_socket(InstanceId(f"i{i}"))
            inodes.append(set(run_child(identify, path).split()))
            assert len(inodes[-1]) == 1 + reader.offer.n_slabs
        assert not inodes[0] & inodes[1]


def test_more_slabs_than_one_message_carries_arrive_in_order(tmp_path: Path) -> None:
    slab_bytes, n_slabs = 2 * 2**20, 205
    model = write_model(tmp_path / "m", n_layers=1, layer_bytes=10)
    n_bytes = slab_bytes * n_slabs
    header = json.dumps({"t": {"dtype": "U8", "shape": [n_bytes], "data_offsets": [0, n_bytes]}}).encode()
    with (model / "model.safetensors").open("wb") as file:  # a sparse file with only the header and a byte per slab
        file.write(len(header).to_bytes(8, "little") + header)
        for i in range(n_slabs):
            file.seek(8 + len(header) + i * slab_bytes)
            file.write(bytes([i]))
        file.truncate(8 + len(header) + n_bytes)
    with Fetchd(tmp_path, THAW_FETCHD_POOL_MB=420, THAW_FETCHD_SLAB_MB=2) as fetchd:
        started = fetchd.start(fetchd.client.inspect(model.as_uri()))
        with fetchd.reading(started.segment_id) as reader:
            assert reader.offer.n_slabs > FDS_PER_MESSAGE
            reader.wait(reader.n_bytes, 30)
            at = reader.locate("model.safetensors", 8 + len(header))
            assert [reader.view(at + i * slab_bytes, 1)[0] for i in range(n_slabs)] == list(range(n_slabs))


def test_a_grant_takes_no_hold_but_its_own_groups(tmp_path: Path) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_RETAIN="false") as fetchd:
        facts = inspect(fetchd, tmp_path)
        first, second = (fetchd.start(facts, group).segment_id for group in ("first", "second"))
        assert first == second
        fetchd.wait("first")
        fetchd.client.open_descriptor_socket(InstanceId("i2"))
        fetchd.client.grant_segment(InstanceId("i2"), second, GroupId("second"), 0)
        fetchd.cancel("second")
        fetchd.client.close_descriptor_socket(InstanceId("i2"))
        with fetchd.reading(first) as reader:
            reader.wait(reader.n_bytes, 20)


def test_the_control_socket_is_for_its_user_and_descriptor_sockets_cannot_be_listed(tmp_path: Path) -> None:
    with Fetchd(tmp_path) as fetchd:
        assert os.stat(fetchd.socket).st_mode & 0o777 == 0o600
        descriptors = Path(fetchd.client.open_descriptor_socket(InstanceId("i1")))
        assert descriptors.parent.stat().st_mode & 0o777 == 0o711


def test_a_container_cannot_use_up_fetchds_descriptors_or_threads_through_its_descriptor_socket(tmp_path: Path) -> None:
    with Fetchd(tmp_path) as fetchd:
        path = fetchd.client.open_descriptor_socket(InstanceId("i1"))
        proc = Path(f"/proc/{fetchd.process.pid}")
        fetchd.client.status()
        before = len(os.listdir(proc / "fd"))
        channels = [Channel.connect(path) for _ in range(40)]
        null = os.open(os.devnull, os.O_RDONLY)
        wanted = encode(FrameHeader(FrameKind.CONTROL), b'{"t": "SegmentWanted"}')
        refused = encode(FrameHeader(FrameKind.BULK), b"{}")
        for i, channel in enumerate(channels):
            with contextlib.suppress(OSError):  # fetchd has closed the channel, because there are too many
                socket.send_fds(channel.sock, [refused if i % 2 else wanted], [null] * 50)
                socket.send_fds(channel.sock, [wanted], [null] * 50)
        wait_until(lambda: len(os.listdir(proc / "task")) < 40 and len(os.listdir(proc / "fd")) <= before + 2 * 16)
        for channel in channels:
            channel.close()
        os.close(null)
        fetchd.client.close_descriptor_socket(InstanceId("i1"))
        wait_until(lambda: len(os.listdir(proc / "fd")) <= before)
        assert fetchd.client.descriptor_sockets() == ()


def test_who_asks_while_fetchd_has_no_descriptor_left_is_answered_when_it_has(tmp_path: Path) -> None:
    with Fetchd(tmp_path) as fetchd:
        pid = fetchd.process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, limits[1]))
        with contextlib.closing(Channel.connect(fetchd.socket)) as channel:
            wait_until(lambda: any(e["event"] == "accept_failed" for e in fetchd.events))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
            channel.send(to_plain(StatusQuery()))
            assert isinstance(from_plain(channel.receive()[0]), Status)


def test_a_reader_notices_a_killed_fetchd_by_its_heartbeat_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_LINK_BYTES_PER_S=100_000) as fetchd:
        with fetchd.reading(fetchd.start(inspect(fetchd, tmp_path)).segment_id) as reader:
            fetchd.kill()
            with pytest.raises(PlatformError, match="no heartbeat for 3 s"):
                reader.wait(reader.n_bytes, 30)
            with pytest.raises(Unavailable, match="fetchd does not listen"):
                fetchd.client.status()
        with Fetchd(tmp_path, THAW_FETCHD_SOCKET=fetchd.socket, THAW_FETCHD_DOORS=f"{fetchd.short.name}/d") as again:
            assert FetchClient(fetchd.socket).status().segments == ()
            assert again.events[-1]["event"] == "ready"


def test_a_clean_stop_tells_the_readers(tmp_path: Path) -> None:
    with (
        Fetchd(tmp_path, THAW_FETCHD_LINK_BYTES_PER_S=100_000) as fetchd,
        fetchd.reading(fetchd.start(inspect(fetchd, tmp_path)).segment_id) as reader,
    ):
        fetchd.process.terminate()
        with pytest.raises(PlatformError, match="cancelled"):
            reader.wait(reader.n_bytes, 20)
        assert fetchd.process.wait(30) == 0
        assert os.listdir(f"{fetchd.short.name}/d") == []


OWNER = """
import sys
from relay.clients.fetch import FetchClient
client = FetchClient(sys.argv[1])
print(client.open_descriptor_socket("i1"), flush=True)
client.grant_segment("i1", sys.argv[2], "g", 0)
print("granted", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("first", ["invoker", "container"])
def test_a_hold_outlives_its_invoker_until_the_containers_connection_ends(tmp_path: Path, first: str) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_RETAIN="false") as fetchd:
        facts = inspect(fetchd, tmp_path)
        whole = fetchd.free_bytes()
        started = fetchd.start(facts)
        fetchd.wait()
        command = [sys.executable, "-c", OWNER, fetchd.socket, started.segment_id]
        owner = subprocess.Popen(command, env=PYTHON, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert owner.stdin is not None
        assert owner.stdout is not None
        path = owner.stdout.readline().strip()
        assert owner.stdout.readline() == "granted\n"
        descriptors = DescriptorClient.connect(path)
        reader = descriptors.segment(deadline_s=20)

        def end_invoker() -> None:
            owner.kill()
            owner.wait(30)

        def end_container() -> None:
            reader.close()
            descriptors.close()

        steps = [end_invoker, end_container] if first == "invoker" else [end_container, end_invoker]
        steps[0]()
        assert fetchd.client.descriptor_sockets() == ("i1",)
        assert fetchd.free_bytes() < whole
        steps[1]()
        wait_until(lambda: fetchd.client.descriptor_sockets() == () and fetchd.free_bytes() == whole)
        owner.stdin.close()
        owner.stdout.close()


class Mute(Fetchd):
    """A fetchd in which every line of the log fails with ENOSPC."""

    def __enter__(self) -> Self:
        with open("/dev/full", "w") as full:
            self.process = self._begin(full.fileno())
        wait_until(Path(self.socket).exists, 30)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.process.terminate()
        self.ended = self.process.wait(15)
        self.short.cleanup()


def test_a_fetchd_whose_log_cannot_be_written_fetches_offers_and_ends_as_ever(tmp_path: Path) -> None:
    with Mute(tmp_path / "r") as fetchd:
        for n in range(3):  # if a thread had died, the next fetch would fail
            model = write_model(tmp_path / f"m{n}", seed=n)
            facts = fetchd.client.inspect(model.as_uri())
            assert fetchd.files(facts, f"g{n}")[WEIGHTS] == (model / WEIGHTS).read_bytes()
            fetchd.cancel(f"g{n}")
        wait_until(lambda: all(s.holders == () for s in fetchd.client.status().segments))
    assert fetchd.ended == 0
