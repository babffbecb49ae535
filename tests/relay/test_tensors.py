"""Tensor descriptors: their sizes are known before anything is allocated, and must add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.protocol import tensors
from relay.protocol.tensors import TensorHeader
from thaw.errors import ProtocolError

HEADERS = [
    TensorHeader("hidden_states", "BF16", (3, 4)),
    TensorHeader("residual", "F32", (2,)),
    TensorHeader("empty", "U8", (0, 5)),
]
BODY = tensors.pack(HEADERS) + bytes(range(24)) + bytes(8)


def test_tensors_come_back_as_views_in_order() -> None:
    unpacked = tensors.unpack(memoryview(BODY))
    assert [header for header, _ in unpacked] == HEADERS
    assert [bytes(data) for _, data in unpacked] == [bytes(range(24)), bytes(8), b""]


def test_a_message_cut_at_any_byte_is_refused() -> None:
    for n_bytes in range(len(BODY)):
        with pytest.raises(ProtocolError):
            tensors.unpack(memoryview(BODY)[:n_bytes])


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(ProtocolError, match="tensors claim 32 bytes, 33 came"):
        tensors.unpack(memoryview(BODY + b"x"))


def test_a_claim_of_many_tensors_is_refused_before_reading_them() -> None:
    with pytest.raises(ProtocolError, match="claims 65535 tensors"):
        tensors.unpack(memoryview(b"\xff\xff"))


@given(st.binary(max_size=100))
def test_random_bytes_raise_nothing_but_protocol_errors(data: bytes) -> None:
    try:
        tensors.unpack(memoryview(data))
    except ProtocolError:
        return
    assert data == b"\x00\x00" or data[:2] != b"\x00\x00"


@pytest.mark.parametrize(
    "header", [TensorHeader("x", "C64", (1,)), TensorHeader("x" * 256, "U8", (1,)), TensorHeader("x", "U8", (1,) * 9)]
)
def test_what_the_format_cannot_say_is_refused_by_the_writer(header: TensorHeader) -> None:
    with pytest.raises(ProtocolError, match="cannot be described"):
        tensors.pack([header])


@pytest.mark.parametrize(
    "headers",
    [
        [TensorHeader("x" * 255, "U8", (0,))],
        [TensorHeader("", "F8_E5M2", (0, *(1,) * 7))],
        [TensorHeader("x", "BOOL", ())] * 4096,
    ],
)
def test_the_largest_of_everything_that_the_format_can_say_comes_back(headers: list[TensorHeader]) -> None:
    body = tensors.pack(headers) + bytes(sum(h.n_bytes for h in headers))
    assert [header for header, _ in tensors.unpack(memoryview(body))] == headers


def test_one_more_tensor_than_the_format_can_say_is_refused_on_both_sides() -> None:
    with pytest.raises(ProtocolError, match="4097 tensors in one message; the limit is 4096"):
        tensors.pack([TensorHeader("x", "U8", (0,))] * 4097)
    with pytest.raises(ProtocolError, match="claims 4097 tensors; the limit is 4096"):
        tensors.unpack(memoryview((4097).to_bytes(2, "little")))
