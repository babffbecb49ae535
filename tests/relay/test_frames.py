"""Frame v1: the vectors, and every false value in a header."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.protocol import frames
from relay.protocol.frames import FLAG_TENSORS, HEADER_BYTES, MAX_PAYLOAD_BYTES, Frame, FrameHeader, FrameKind, Priority
from thaw.errors import ProtocolError

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors/frames.json").read_text())
HEADER = FrameHeader(FrameKind.HIDDEN_STATES, Priority.KV, 0, bytes(range(16)), 7, 8, 1, 3, step=9)


@pytest.mark.parametrize("vector", VECTORS["good"], ids=lambda v: str(v["name"]))
def test_the_vectors_are_written_and_read(vector: dict[str, Any]) -> None:
    fields = vector["header"] | {"group_id": bytes.fromhex(vector["header"]["group_id"])}
    header = FrameHeader(**fields | {"kind": FrameKind(fields["kind"]), "priority": Priority(fields["priority"])})
    payload, encoded = bytes.fromhex(vector["payload"]), bytes.fromhex(vector["bytes"])
    assert frames.encode(header, payload) == encoded
    decoded = frames.decode(encoded)
    assert decoded.payload == payload
    assert decoded.header._replace(n_bytes=0, payload_crc=0) == header


@pytest.mark.parametrize("vector", VECTORS["bad"], ids=lambda v: str(v["name"]))
def test_the_bad_vectors_are_refused_with_their_reason(vector: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=re.escape(vector["error"])):
        frames.decode(bytes.fromhex(vector["bytes"]))


def test_a_frame_cut_at_any_byte_is_refused() -> None:
    whole = frames.encode(HEADER, b"hidden states")
    for n_bytes in range(len(whole)):
        with pytest.raises(ProtocolError):
            frames.decode(whole[:n_bytes])


def test_one_flipped_bit_anywhere_is_refused() -> None:
    whole = frames.encode(HEADER, b"hidden states")
    for position, bit in itertools.product(range(len(whole)), range(8)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << bit
        with pytest.raises(ProtocolError):
            frames.decode(bytes(damaged))


def test_a_payload_above_the_limit_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="the limit is"):
        frames.encode(HEADER, bytes(MAX_PAYLOAD_BYTES + 1))


@given(st.binary(max_size=200))
def test_random_bytes_never_escape_as_another_exception(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        frames.decode(data)


@given(
    st.builds(
        FrameHeader,
        kind=st.sampled_from(FrameKind),
        priority=st.sampled_from(Priority),
        group_id=st.binary(min_size=16, max_size=16),
        stream_id=st.integers(0, 2**32 - 1),
        seq=st.integers(0, 2**64 - 1),
        step=st.integers(0, 2**64 - 1),
        flags=st.sampled_from((0, FLAG_TENSORS)),
        chunk=st.just(2),
        n_chunks=st.integers(3, 2**32 - 1),
        n_bytes=st.just(0),
        payload_crc=st.just(0),
    ),
    st.binary(max_size=500),
)
def test_what_was_encoded_is_decoded(header: FrameHeader, payload: bytes) -> None:
    frame = frames.decode(frames.encode(header, payload))
    assert isinstance(frame, Frame)
    assert frame.payload == payload
    assert frame.header == header._replace(n_bytes=len(payload), payload_crc=frames.crc32c(payload))
    assert len(frames.encode(header, payload)) == HEADER_BYTES + len(payload)


def test_a_chunks_header_is_its_messages_with_the_place_of_the_chunk_and_the_sum_of_its_bytes() -> None:
    payload = bytes(range(256)) * 400
    message = FrameHeader(FrameKind.HIDDEN_STATES, Priority.KV, FLAG_TENSORS, b"the message's id", 7, step=9)
    head = frames.encode_chunk(message, HEADER.group_id, 8, 1, 3, memoryview(payload))
    assert frames.decode(head + payload).header == message._replace(
        group_id=HEADER.group_id, seq=8, chunk=1, n_chunks=3, n_bytes=len(payload), payload_crc=frames.crc32c(payload)
    )
    assert frames.encode_chunk(message, HEADER.group_id, 8, 1, 3, payload) == head
    with pytest.raises(ProtocolError, match="the limit is"):
        frames.encode_chunk(message, HEADER.group_id, 8, 1, 3, bytes(MAX_PAYLOAD_BYTES + 1))
    assert frames.encode_chunk(message, HEADER.group_id, 8, 1, 3, bytes(MAX_PAYLOAD_BYTES))


@pytest.mark.parametrize("n_bytes", [0, 1, 32 * 1024 - 1, 32 * 1024, 32 * 1024 + 1, 100_000])
def test_the_sum_of_a_view_is_that_of_its_bytes_in_one_piece_or_in_several(n_bytes: int) -> None:
    data = (bytes(range(251)) * 400)[:n_bytes]
    whole = frames.crc32c(data)
    assert frames.crc32c(memoryview(data)) == whole
    for cut in (0, n_bytes // 3, n_bytes):
        assert frames.crc32c(memoryview(data)[cut:], frames.crc32c(memoryview(data)[:cut])) == whole
