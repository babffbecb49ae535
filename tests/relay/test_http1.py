"""The end of a response that is fed whole, cut at any place, byte by byte, and with false lengths.

A gateway finds the same end.
"""

from __future__ import annotations

import socket
from contextlib import closing, suppress

import pytest

from relay.clients.http11 import Connection
from relay.protocol.http1 import MAX_HEAD_BYTES, BrokenExchange, ResponseParser
from thaw.errors import ProtocolError

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Type: x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n5\r\nhello\r\na\r\n0123456789\r\n0\r\n\r\n"
OK_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
CLOSING = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize("response", [LENGTH, CHUNKED, EMPTY, CLOSING])
def test_the_end_is_found_at_every_cut(response: bytes) -> None:
    for cut in range(len(response) + 1):
        parser = ResponseParser()
        passed = parser.feed(response[:cut])
        assert parser.done is (cut == len(response))
        assert passed + parser.feed(response[cut:] + b"HTTP/1.1 next") == response
        assert parser.done


@pytest.mark.parametrize("response", [LENGTH, CHUNKED, EMPTY])
def test_one_byte_at_a_time_is_enough(response: bytes) -> None:
    parser = ResponseParser()
    passed = b""
    for i in range(len(response)):
        assert not parser.done
        passed += parser.feed(response[i : i + 1])
    assert parser.done
    assert passed == response


def test_a_head_and_a_size_are_held_back_until_they_are_whole_and_data_is_not() -> None:
    parser = ResponseParser()
    head, body = CHUNKED[: CHUNKED.index(b"5\r\n")], b"5\r\nhello"
    assert parser.feed(head[:-1]) == b""
    assert parser.feed(head[-1:] + body[:1]) == head
    assert parser.feed(body[1:3]) == body[:3]
    assert parser.feed(body[3:5]) == body[3:5]


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
        *(OK_CHUNKED + body for body in (b"zz\r\n", b"-5\r\n", b"5;x=1\r\n", b"0\r\nT: v\r\n", b"1" * 2000)),
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"1" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * MAX_HEAD_BYTES,
    ],
)
def test_a_lie_is_a_protocol_error(lie: bytes) -> None:
    with pytest.raises(ProtocolError):
        ResponseParser().feed(lie)


def is_whole_for_a_gateway(passed: bytes) -> bool:
    ours, theirs = socket.socketpair()
    theirs.sendall(passed)
    theirs.close()
    with closing(Connection(ours)) as connection:
        try:
            connection.read_head()
            connection.read_rest()
        except BrokenExchange:
            return False
        return True


def agree(answer: bytes) -> bool:
    """Return whether the gateway found no end that the invoker did not find."""
    parser = ResponseParser()
    passed = b""
    with suppress(ProtocolError):
        for i in range(len(answer)):
            passed += parser.feed(answer[i : i + 1])
    return parser.done or not is_whole_for_a_gateway(passed)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\n\n{}\r\n\r\n",
        *(OK_CHUNKED + body for body in (b"0;\n\n", b"0\r\nT: v\n\n")),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\xa0\r\nContent-Length: 900\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding\x85: chunked\r\nContent-Length: 900\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    ],
)
def test_an_answer_that_goes_on_is_whole_for_no_gateway(answer: bytes) -> None:
    assert agree(answer)


@pytest.mark.parametrize("answer", [LENGTH, CHUNKED, EMPTY])
@pytest.mark.parametrize("byte", [b"\n", b"\r", b"\t", b" ", b"\x0b", b"\x85", b"\xa0", b";", b"0", b""])
def test_one_wrong_byte_anywhere_ends_no_answer_early(answer: bytes, byte: bytes) -> None:
    for at in range(len(answer)):
        assert agree(answer[:at] + byte + answer[at + 1 :])
