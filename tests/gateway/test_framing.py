"""The data that the chunks and the head of a request may carry."""

from __future__ import annotations

import pytest

from gateway.front.request import BrokenRequest, RequestReader

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "chunks",
    [
        b"2;\nxx\r\nab\r\n0\r\n\r\n",
        b"2;a\x00\r\nab\r\n0\r\n\r\n",
        b"2;a\rb\r\nab\r\n0\r\n\r\n",
        b"0;\x7f\r\n\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\nA : b\r\n\r\n",
        b"0\r\n: b\r\n\r\n",
        b"0\r\nA: b\nGET / HTTP/1.1\r\n\r\n",
        b"0\r\nContent-Length: 5\r\n\r\n",
        b"0\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
)
def test_an_extension_or_a_trailer_that_two_readers_could_understand_differently_is_refused(chunks: bytes) -> None:
    reader = RequestReader()
    with pytest.raises(BrokenRequest):
        reader.feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)


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
