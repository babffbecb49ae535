"""Frames over a socket pair, descriptors included."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from relay.channel import Channel, ChannelClosed
from relay.frames import FrameHeader, FrameKind, encode
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
    assert os.read(reader, 1) == b""  # nobody has the other end any more
    os.close(reader)


def test_a_close_between_frames_is_told_from_one_inside_a_frame(pair: tuple[Channel, Channel]) -> None:
    whole = encode(FrameHeader(FrameKind.CONTROL), b"{}")
    pair[0].sock.sendall(whole + whole[:65])
    pair[0].sock.shutdown(socket.SHUT_WR)
    assert pair[1].receive() == ({}, [])
    with pytest.raises(ProtocolError, match="closed inside a frame \\(1 of 2 bytes\\)"):
        pair[1].receive()


def test_a_close_at_a_boundary_is_channel_closed(pair: tuple[Channel, Channel]) -> None:
    pair[0].close()
    with pytest.raises(ChannelClosed, match="the peer closed"):
        pair[1].receive()
