"""Where a response ends: fed whole, at every cut, byte by byte, and with lies."""

from __future__ import annotations

import pytest

from invoker.http_body import MAX_HEAD_BYTES, ResponseParser
from thaw.errors import ProtocolError

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Type: x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n5\r\nhello\r\na;x=1\r\n0123456789\r\n0\r\nT: v\r\n\r\n"
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
CLOSING = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize("response", [LENGTH, CHUNKED, EMPTY, CLOSING])
def test_the_end_is_found_at_every_cut(response: bytes) -> None:
    for cut in range(len(response) + 1):
        parser = ResponseParser()
        assert parser.feed(response[:cut]) == cut
        assert parser.done is (cut == len(response))
        assert parser.feed(response[cut:] + b"HTTP/1.1 next") == len(response) - cut
        assert parser.done


@pytest.mark.parametrize("response", [LENGTH, CHUNKED, EMPTY])
def test_one_byte_at_a_time_is_enough(response: bytes) -> None:
    parser = ResponseParser()
    for i in range(len(response)):
        assert not parser.done
        assert parser.feed(response[i : i + 1]) == 1
    assert parser.done


def test_a_connection_that_closes_is_not_kept() -> None:
    parser = ResponseParser()
    parser.feed(CLOSING)
    assert not parser.keep_alive


@pytest.mark.parametrize(
    "lie",
    [
        b"HTTP/2 200\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 2000,
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * MAX_HEAD_BYTES,
    ],
)
def test_a_lie_is_a_protocol_error(lie: bytes) -> None:
    with pytest.raises(ProtocolError):
        ResponseParser().feed(lie)
