"""Heads that are not HTTP, or nearly not: a list of known ones, and as many mutations of good ones as a test wants."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

_GOOD: Final = (
    b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a:b\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /instances/i/run HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t\r\nContent-Length: 2\r\n\r\n{}",
    b"PUT /api/v1/namespaces/_/actions/a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
)
_HEAD: Final = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
_CHUNKED: Final = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

KNOWN: Final = (
    b"\r\n\r\n\r\n",
    b"\x00" * 100 + b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) + b"\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET  / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"get / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\nHost: x\n\n",
    b"GET /\x80\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET //// HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%00%ff%c0%af/../.. HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 3000 + b"\r\n",
    b"GET / HTTP/1.1\r\nA: " + b"b" * 60_000 + b"\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: \xff\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n",
    b"GET / HTTP/1.1\r\n: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nNo colon\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nSCRIPT_NAME: /a\r\nPATH_INFO: b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Ssl: off\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Basic \xff\xfe\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Basic \xe4\xf6\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nExpect: 200-maybe\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: x\r\n\r\n",
    _HEAD + b"Content-Length: -1\r\n\r\n",
    _HEAD + b"Content-Length: +2\r\n\r\n{}",
    _HEAD + b"Content-Length: 2, 2\r\n\r\n{}",
    _HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    _HEAD + b"Content-Length: 99999999999999999999\r\n\r\n",
    _HEAD + b"Content-Length: \xc2\xb2\r\n\r\n{}",
    _HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    _HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
    _HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    _HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    _CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n",
    _CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n",
    _CHUNKED + b"9" * 100_000 + b"\r\n",
    _CHUNKED + b"ffffffffffffffffffff\r\n",
    _CHUNKED + b"2;" + b"a" * 100_000,
    _CHUNKED + b"2\r\n{}}\r\n0\r\n\r\n",
    _CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n",
    _CHUNKED + b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n",
)


def mutations(rng: random.Random, n: int) -> Iterator[bytes]:
    """Good requests with a few bytes cut out, doubled, changed or put in."""
    for _ in range(n):
        data = bytearray(rng.choice(_GOOD))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data) + 1)
            change = rng.randrange(5)
            if change == 0:
                del data[at : at + rng.randint(1, 10)]
            elif change == 1:
                data[at:at] = data[at : at + rng.randint(1, 40)]
            elif change == 2:
                data[at:at] = rng.choice(
                    (b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"\r\n\r\n", b"\xff", b"%00")
                )
            elif change == 3:
                data[at : at + 1] = bytes([rng.randrange(256)])
            else:
                data[at:at] = rng.choice(KNOWN)[: rng.randint(1, 200)]
        yield bytes(data)
