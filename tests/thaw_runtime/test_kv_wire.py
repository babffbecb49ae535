"""KV blocks on the wire: valid messages are read as they were sent, and damaged ones are refused."""

from __future__ import annotations

import pytest

from relay.protocol import tensors
from relay.protocol.tensors import TensorHeader
from thaw.errors import ProtocolError
from thaw_runtime.pipeline.kv_wire import KvPart, decode_kv_part, encode_kv_part

PART = KvPart(
    3,
    2,
    ((4, 7), ()),
    {"layers.1.attn": "f32", "layers.2.attn": "f32"},
    {"layers.1.attn": memoryview(b"abcd"), "layers.2.attn": memoryview(b"")},
    {"r1": b"state"},
)


def test_a_part_is_read_as_it_was_sent() -> None:
    assert decode_kv_part(memoryview(encode_kv_part(PART))) == PART


def test_a_part_without_blocks_says_which_layouts_a_stage_has() -> None:
    empty = KvPart(1, 1, ((),), {"a": "x"}, {"a": memoryview(b"")})
    assert decode_kv_part(memoryview(encode_kv_part(empty))) == empty


@pytest.mark.parametrize("cut", [0, 1, 3, 20, -1])
def test_a_part_that_was_cut_is_refused(cut: int) -> None:
    with pytest.raises(ProtocolError):
        decode_kv_part(memoryview(encode_kv_part(PART))[:cut])


@pytest.mark.parametrize("head", [b"", b"\x90", b"\x92\x01\x01", b"not msgpack"])
def test_a_part_with_a_damaged_head_is_refused(head: bytes) -> None:
    payload = tensors.pack([TensorHeader("kv", "U8", (len(head),))]) + head
    with pytest.raises(ProtocolError):
        decode_kv_part(memoryview(payload))


def test_a_part_with_other_layers_than_its_head_names_is_refused() -> None:
    raw = encode_kv_part(PART).replace(b"layers.2.attn", b"layers.9.attn", 1)
    with pytest.raises(ProtocolError, match="other layers"):
        decode_kv_part(memoryview(raw))
