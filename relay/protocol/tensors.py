"""Tensor descriptors, which a frame with FLAG_TENSORS carries before the data.  docs/formats/frame.md.

::

    u16 count │ count × ( u8 name_len, name utf-8, u8 dtype, u8 n_dims, n_dims × u32 ) │ data of each, in order

No numpy, no torch: data are buffers, a dtype is its safetensors name.  A receiver learns every size before it
allocates anything, and the sizes must add up to the bytes that came.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from thaw.errors import ProtocolError

_DTYPES: Final = ("BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2")
_ITEM_BYTES: Final = (1, 1, 1, 2, 4, 8, 2, 2, 4, 8, 1, 1)
_MAX_TENSORS: Final = 4096
_MAX_DIMS: Final = 8


@dataclass(frozen=True, slots=True)
class TensorHeader:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[_DTYPES.index(self.dtype)]


def pack(headers: Sequence[TensorHeader]) -> bytes:
    """The descriptor block.  Raises ProtocolError for a name, a dtype or a shape that the format cannot describe."""
    if len(headers) > _MAX_TENSORS:
        raise ProtocolError(f"{len(headers)} tensors in one message; the limit is {_MAX_TENSORS}")
    parts = [struct.pack("<H", len(headers))]
    for header in headers:
        name = header.name.encode()
        if header.dtype not in _DTYPES or len(name) > 255 or len(header.shape) > _MAX_DIMS:
            raise ProtocolError(f"tensor {header.name!r} of {header.dtype} {header.shape} cannot be described")
        parts.append(struct.pack("<B", len(name)) + name)
        parts.append(
            struct.pack(f"<BB{len(header.shape)}I", _DTYPES.index(header.dtype), len(header.shape), *header.shape)
        )
    return b"".join(parts)


def unpack(body: memoryview) -> list[tuple[TensorHeader, memoryview]]:
    """The tensors of a whole message, as views of ``body``.  Raises ProtocolError for any number that does not fit."""
    try:
        headers, at = _unpack_headers(body)
    except (struct.error, IndexError, UnicodeDecodeError) as e:
        raise ProtocolError(f"tensor descriptors are damaged: {e}") from e
    if sum(h.n_bytes for h in headers) != len(body) - at:
        raise ProtocolError(f"tensors claim {sum(h.n_bytes for h in headers)} bytes, {len(body) - at} came")
    tensors: list[tuple[TensorHeader, memoryview]] = []
    for header in headers:
        tensors.append((header, body[at : at + header.n_bytes]))
        at += header.n_bytes
    return tensors


def _unpack_headers(body: memoryview) -> tuple[list[TensorHeader], int]:
    (count,) = struct.unpack_from("<H", body, 0)
    if count > _MAX_TENSORS:
        raise ProtocolError(f"message claims {count} tensors; the limit is {_MAX_TENSORS}")
    headers, at = [], 2
    for _ in range(count):
        name_bytes = body[at]
        name = bytes(body[at + 1 : at + 1 + name_bytes]).decode()
        at += 1 + name_bytes
        dtype, n_dims = body[at], body[at + 1]
        if dtype >= len(_DTYPES) or n_dims > _MAX_DIMS:
            raise ProtocolError(f"tensor {name!r} claims dtype {dtype} and {n_dims} dimensions")
        shape = struct.unpack_from(f"<{n_dims}I", body, at + 2)
        at += 2 + 4 * n_dims
        headers.append(TensorHeader(name, _DTYPES[dtype], shape))
    return headers, at
