"""KV blocks on their way to the stage that becomes a whole worker: the message and its checks.

A part is one relay message of kind KV: a tensor ``kv`` of bytes (the head in msgpack), followed by one tensor of bytes
for each layer, named like the layer::

    the blocks that the receiver does not know, one after the other │ bits │ elements

The blocks are those of the layer's group that a KvWanted names.  Of a block that the receiver knows, one bit for each
element says whether it has changed since the round before, and the changed elements of all such blocks follow in their
order.  All are in the form that the sender's attention kernels use.  ``layouts`` names this form, so a receiver whose
kernels use another one refuses the part instead of reading it wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from relay.protocol import tensors
from relay.protocol.tensors import TensorHeader
from thaw.errors import ProtocolError
from thaw_runtime.pipeline.wire import Blocks

MAX_HEAD_BYTES: Final = 4 * 1024 * 1024
"""512 requests have generators of 5 KB each on a CPU."""
_HEAD: Final = "kv"


@dataclass(frozen=True, slots=True)
class KvPart:
    """Some layers of the blocks that a KvWanted names.

    ``generators`` holds the state of each request's generator, in the last part of the last stage's last round.
    """

    attempt: int
    round: int
    blocks: Blocks
    layouts: Mapping[str, str]  # the layout of each layer in this part, by the layer's name
    layers: Mapping[str, memoryview]
    generators: Mapping[str, bytes] = field(default_factory=dict)


class _Head(msgspec.Struct, frozen=True, array_like=True):
    attempt: int
    round: int
    blocks: Blocks
    layouts: dict[str, str]
    generators: dict[str, bytes]


_encoder: Final = msgspec.msgpack.Encoder()
_heads: Final = msgspec.msgpack.Decoder(_Head)


def encode_kv_part(part: KvPart) -> bytes:
    """The payload of a frame with FLAG_TENSORS."""
    head = _encoder.encode(_Head(part.attempt, part.round, part.blocks, dict(part.layouts), dict(part.generators)))
    headers = [TensorHeader(_HEAD, "U8", (len(head),))]
    headers += [TensorHeader(name, "U8", (len(data),)) for name, data in part.layers.items()]
    return b"".join((tensors.pack(headers), head, *part.layers.values()))


def decode_kv_part(payload: memoryview) -> KvPart:
    """Decode a part, whose layers are views of ``payload``.  Raises ProtocolError."""
    found = tensors.unpack(payload)
    if not found or found[0][0].name != _HEAD or len(found[0][1]) > MAX_HEAD_BYTES:
        raise ProtocolError("KV blocks came without their head")
    try:
        head = _heads.decode(found[0][1])
    except (msgspec.DecodeError, msgspec.ValidationError) as e:
        raise ProtocolError(f"a damaged head of KV blocks: {e}") from e
    layers = {header.name: data for header, data in found[1:]}
    if layers.keys() != head.layouts.keys() or len(layers) != len(found) - 1:
        raise ProtocolError("KV blocks of other layers than their head names")
    return KvPart(head.attempt, head.round, head.blocks, head.layouts, layers, head.generators)
