"""The pure parts of gateway/front/: the end of a request, the shares of memory, the order of turns."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.front.bounds import Bounds
from gateway.front.connection import Connection
from gateway.front.deadlines import Deadlines
from gateway.front.memory import SharedMemory
from gateway.front.request import BrokenRequest, RequestReader
from thaw.ids import Namespace

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
A, B, C = Namespace("a"), Namespace("b"), Namespace("c")


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%X\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


@given(st.binary(max_size=300), st.lists(st.integers(1, 400), max_size=6), st.booleans())
def test_a_request_is_the_same_however_its_bytes_arrive(body: bytes, cuts: list[int], in_chunks: bool) -> None:
    framed = chunked(*([body] if body else [])) if in_chunks else body
    framing = b"Transfer-Encoding: chunked" if in_chunks else b"Content-Length: %d" % len(body)
    data = HEAD + framing + b"\r\n\r\n" + framed + b"GET"
    places = sorted({c for c in cuts if c < len(data) - 3})
    reader = RequestReader()
    for begin, end in zip([0, *places], [*places, len(data)], strict=True):
        assert not reader.complete
        reader.feed(data[begin:end])
    assert reader.complete
    assert reader.head == HEAD + framing + b"\r\n\r\n"
    assert (reader.body().read(), reader.rest) == (body, b"GET")


def test_a_request_that_arrives_byte_by_byte_is_the_same() -> None:
    reader = RequestReader()
    data = b"\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"2;a=b\r\nab\r\n1 ; c\r\nc\r\n0\r\nT: x\r\n\r\n"
    assert [reader.feed(data[i : i + 1]) for i in range(len(data))] == [False] * (len(data) - 1) + [True]
    assert reader.body().read() == b"abc"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\n", 400),
        (HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (HEAD + b"content-length : +1\r\n\r\n", 400),
        (HEAD + b"Content-Length:\r\n\r\n", 400),
        (HEAD + b"Content-Length: 1_0\r\n\r\n", 400),
        (HEAD + b"Content-Length: " + b"1" * 16 + b"\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: x\n\n", 400),
        (b"\r\n\r\n", 400),
        (HEAD + b"A: " + b"b" * 66_000, 431),
        (HEAD + b"A: " + b"b" * 66_000 + b"\r\n\r\n", 431),
    ],
)
def test_a_head_that_two_readers_could_understand_differently_is_refused(data: bytes, status: int) -> None:
    for size in (len(data), 1000):
        reader = RequestReader()
        with pytest.raises(BrokenRequest) as e:
            for i in range(0, len(data), size):
                reader.feed(data[i : i + size])
        assert e.value.http_status == status


BROKEN_CHUNKS = {
    "0x2": b"0x2\r\nab\r\n0\r\n\r\n",
    "-2": b"-2\r\nab\r\n0\r\n\r\n",
    "100000 digits": b"9" * 100_000,
    "20 digits": b"9" * 20 + b"\r\n",
    "empty": b"\r\n",
    "too long": b"2\r\nabc\r\n0\r\n\r\n",
    "bare line feed": b"2\nab\r\n",
    "long trailers": b"0\r\n" + b"A: b\r\n" * 3000,
    "tiny": b"1\r\na\r\n" * 20_000,
}
BROKEN_PARTS = {
    "extension with a line feed": b"2;\nxx\r\nab\r\n0\r\n\r\n",
    "extension with a zero": b"2;a\x00\r\nab\r\n0\r\n\r\n",
    "extension with a carriage return": b"2;a\rb\r\nab\r\n0\r\n\r\n",
    "extension with a delete": b"0;\x7f\r\n\r\n",
    "trailer without a colon": b"0\r\nno colon\r\n\r\n",
    "trailer with a space before its colon": b"0\r\nA : b\r\n\r\n",
    "trailer without a name": b"0\r\n: b\r\n\r\n",
    "trailer with a line feed": b"0\r\nA: b\nGET / HTTP/1.1\r\n\r\n",
    "trailer with a length": b"0\r\nContent-Length: 5\r\n\r\n",
    "trailer with a framing": b"0\r\ntransfer-encoding: chunked\r\n\r\n",
}


def is_refused(chunks: bytes) -> None:
    reader = RequestReader()
    with pytest.raises(BrokenRequest):
        reader.feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)


@pytest.mark.parametrize("chunks", BROKEN_CHUNKS.values(), ids=list(BROKEN_CHUNKS))
def test_chunks_that_are_none_are_refused(chunks: bytes) -> None:
    is_refused(chunks)


@pytest.mark.parametrize("chunks", BROKEN_PARTS.values(), ids=list(BROKEN_PARTS))
def test_an_extension_or_a_trailer_that_two_readers_could_understand_differently_is_refused(chunks: bytes) -> None:
    is_refused(chunks)


def test_extensions_and_trailers_are_left_out() -> None:
    reader = RequestReader()
    assert reader.feed(
        HEAD + b'Transfer-Encoding: chunked\r\n\r\n2; a="b\tc"\r\nab\r\n0;x\r\nE-Tag:\t"\xe4"\r\n\r\nGET'
    )
    assert (reader.body().read(), reader.rest) == (b"ab", b"GET")


@pytest.mark.parametrize(("version", "expects"), [(b"1.0", False), (b"1.1", True)])
def test_a_client_of_the_old_version_gets_no_100(version: bytes, expects: bool) -> None:
    reader = RequestReader()
    reader.feed(b"POST / HTTP/" + version + b"\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
    assert reader.expects is expects


def test_a_namespace_gets_no_more_than_is_left_to_others() -> None:
    memory = SharedMemory(100)
    assert memory.take(A, 40)
    assert not memory.take(A, 30)
    assert memory.take(A, 10)
    assert memory.take(B, 25)
    assert not memory.take(B, 5)
    assert memory.take(C, 25)  # the first body of a namespace
    assert not memory.take(C, 1)
    memory.give_back(A, 40)
    assert memory.take(B, 7)


def test_a_whole_body_fits_when_nothing_else_is_there() -> None:
    assert SharedMemory(100).take(A, 100)


def test_a_body_without_progress_is_out_after_the_grace_whatever_length_it_announced() -> None:
    bounds = Bounds(body_s=10, rate=1000)
    assert bounds.body_deadline_s(5, 0) == 15
    assert bounds.body_deadline_s(5, 20_000) == 35
    assert bounds.body_deadline_s(5, 10**6) == 1015  # the rate alone decides


def test_deadlines_come_in_their_order_and_may_move() -> None:
    a, b = socket.socketpair()
    with a, b:
        one, two, three = (Connection(a, None, None, 1.0) for _ in range(3))
        deadlines = Deadlines()
        for connection, at in ((one, 10.0), (two, 20.0), (three, 5.0)):
            deadlines.set(connection, at)
        deadlines.set(three, 30.0)
        deadlines.set(two, 8.0)
        assert list(deadlines.due(9.0)) == [two]
        assert list(deadlines.due(25.0)) == [one]
        one.is_closed = two.is_closed = True
        deadlines.forget_closed(0)
        assert list(deadlines.due(99.0)) == [three]
        assert list(deadlines.due(99.0)) == []
