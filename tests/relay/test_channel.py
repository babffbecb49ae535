"""Frames over a socket pair, descriptors included."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from relay.clients.channel import MAX_FDS, Channel, ChannelClosed
from relay.protocol.frames import FrameHeader, FrameKind, encode
from thaw.errors import ProtocolError


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    left, right = (Channel(s) for s in socket.socketpair())
    left.set_timeout(5)
    right.set_timeout(5)
    yield left, right
    left.close()
    right.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_message_and_its_descriptors_arrive_together(pair: tuple[Channel, Channel]) -> None:
    reader, writer = os.pipe()
    pair[0].send({"op": "x"}, (reader,))
    message, (received,) = pair[1].receive()
    os.write(writer, b"through")
    assert message == {"op": "x"}
    assert os.read(received, 7) == b"through"
    for fd in (reader, writer, received):
        os.close(fd)


def damaged() -> bytes:
    frame = bytearray(encode(FrameHeader(FrameKind.CONTROL), b"{}"))
    frame[-1] ^= 1
    return bytes(frame)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (damaged(), "payload failed its checksum"),
        (encode(FrameHeader(FrameKind.BULK), b"{}"), "expected a control frame, got BULK"),
        (encode(FrameHeader(FrameKind.CONTROL), b"not json"), "not JSON"),
    ],
    ids=["damaged", "kind", "json"],
)
def test_descriptors_of_a_refused_frame_are_closed(pair: tuple[Channel, Channel], frame: bytes, message: str) -> None:
    before = open_descriptors()
    reader, writer = os.pipe()
    socket.send_fds(pair[0].sock, [frame], [reader])
    with pytest.raises(ProtocolError, match=message):
        pair[1].receive()
    os.close(reader)
    os.close(writer)
    assert open_descriptors() == before


def test_descriptors_that_nobody_takes_never_come_in(pair: tuple[Channel, Channel]) -> None:
    reader, writer = os.pipe()
    pair[0].send({"op": "x"}, (writer,))
    os.close(writer)
    message, fds = Channel(pair[1].sock, takes_fds=False).receive()
    assert (message, fds) == ({"op": "x"}, [])
    assert os.read(reader, 1) == b""  # no process has the other end any more
    os.close(reader)


@pytest.mark.parametrize(
    ("n_bytes", "said"),
    [
        (0, "the peer closed"),
        (1, "the peer closed inside a frame (1 of 64 bytes)"),
        (64, "the peer closed inside a frame (0 of 2 bytes)"),
        (65, "the peer closed inside a frame (1 of 2 bytes)"),
    ],
)
def test_only_a_close_at_a_boundary_is_an_ordinary_end(pair: tuple[Channel, Channel], n_bytes: int, said: str) -> None:
    whole = encode(FrameHeader(FrameKind.CONTROL), b"{}")
    pair[0].sock.sendall(whole + whole[:n_bytes])
    pair[0].close()
    assert pair[1].receive() == ({}, [])
    with pytest.raises(ChannelClosed) as caught:
        pair[1].receive()
    assert caught.value.message == said


def test_descriptors_that_come_with_any_part_of_a_frame_are_its_own(pair: tuple[Channel, Channel]) -> None:
    frame = encode(FrameHeader(FrameKind.CONTROL), b"{}")
    readers = [os.open("/dev/null", os.O_RDONLY) for _ in range(2)]
    socket.send_fds(pair[0].sock, [frame[:64]], readers[:1])
    socket.send_fds(pair[0].sock, [frame[64:]], readers[1:])
    message, received = pair[1].receive()
    assert (message, len(received)) == ({}, 2)
    for fd in (*readers, *received):
        os.close(fd)


def test_as_many_descriptors_as_the_kernel_takes_come_in_one_message(pair: tuple[Channel, Channel]) -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    pair[0].send({}, (null,) * MAX_FDS)
    _, received = pair[1].receive()
    assert len(received) == MAX_FDS
    for fd in (null, *received):
        os.close(fd)


def test_a_channel_connects_by_a_path_and_leaves_nothing_open_where_nobody_listens() -> None:
    with tempfile.TemporaryDirectory(prefix="thaw-") as directory:  # pytest's own paths are too long for a socket
        before, path = open_descriptors(), f"{directory}/s"
        with pytest.raises(OSError, match="No such file"):
            Channel.connect(path)
        assert open_descriptors() == before
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            ours = Channel.connect(path, timeout_s=5)
            theirs = Channel(listener.accept()[0])
            ours.send({"op": "x"})
            assert theirs.receive() == ({"op": "x"}, [])
            assert ours.sock.gettimeout() == 5
            ours.close()
            theirs.close()


class TakenAtOnce(socket.socket):
    """A socket whose peer closes as soon as it has received the bytes of one call."""

    peer: socket.socket

    def sendmsg(self, *arguments: Any) -> int:
        n_bytes = super().sendmsg(*arguments)
        self.peer.close()
        return n_bytes


def test_a_message_whose_receiver_closed_once_it_had_all_of_it_was_sent() -> None:
    ours, theirs = socket.socketpair()
    with TakenAtOnce(fileno=ours.detach()) as sock, open(os.devnull) as file:
        sock.peer = theirs
        Channel(sock).send({"t": "x"}, (file.fileno(),))
    assert theirs.fileno() == -1
