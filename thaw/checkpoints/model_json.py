"""The JSON of headers, indexes and configs, which an attacker may have written, with bounds before any object is made.

Three bytes of ``[],`` become 64 bytes of memory, and a product of long integers holds the interpreter for a minute.  So
the marks of lists and values are counted first, long numbers are refused while they are read, and each tensor becomes a
compact value as soon as its object ends.  Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NoReturn, TypeGuard

from thaw import wire
from thaw.errors import ProtocolError
from thaw.model import ModelFile, TensorInfo

MAX_TENSORS: Final = 524_288
"""A model has at most so many.  The largest published checkpoints have some 280,000: each of 23,040 experts with three
matrices, and each of them with its scales."""
MAX_FILES: Final = 1024
"""A model has at most so many.  The largest published checkpoints have some 200 shards."""
MAX_CHUNKS: Final = 262_144
"""A model has at most so many: 2 TiB."""
MAX_TEXT_BYTES: Final = 160 * 1024 * 1024
"""An index has at most so many bytes.  A tensor takes some 300 of them."""
MAX_HEADERS_BYTES: Final = 96 * 1024 * 1024
"""The headers of all files of a model have at most so many bytes together.  A tensor takes some 130 of them."""
LARGE_BYTES: Final = 2 * 1024 * 1024
"""A text of this size becomes some 10 MB of values.  Hardly any model has such an index."""
_MOST_PER_CHARACTER: Final = 4
"""One emoji makes every character of a text as wide as itself."""
MAX_NAME: Final = 1024
MAX_DIMENSIONS: Final = 16
MAX_SIZE: Final = 2**48
"""No dimension, no offset and no file is as long as this."""

_VALUES_PER_TENSOR: Final = 10
_LISTS_PER_TENSOR: Final = 4
_MAX_CONFIG_VALUES: Final = 262_144
_DIGITS: Final = 19
_NUMBERS_PER_OBJECT: Final = 2 * MAX_DIMENSIONS + 8


class Unreadable(ValueError):
    """The text is no JSON, or more of it than a model needs."""


class Entry(tuple[Any, Any, Any]):
    """The entry of one tensor in a safetensors header: dtype, shape, data_offsets, each as it was found."""

    __slots__ = ()


def header(data: bytes) -> Any:
    """Parse a safetensors header.  Its tensors become entries.  Raises Unreadable."""
    return _Bounded(_entry).parse(data)


def index(data: bytes | str) -> Any:
    """Parse ``thaw-index.json``.  Its files and tensors become values.  Raises Unreadable, ProtocolError."""
    _check_narrow(data)
    names: dict[str, str] = {}

    def made(fields: dict[str, Any]) -> Any:
        if "shape" in fields:
            for key in ("file", "dtype"):  # some few texts, of which each tensor would have a copy of its own
                if isinstance(name := fields.get(key), str):
                    fields[key] = names.setdefault(name, name)
            return wire.from_plain(TensorInfo, fields)
        return wire.from_plain(ModelFile, fields) if "sidecar" in fields else fields

    return _Bounded(made).parse(data)


def shards(data: bytes | str) -> Any:
    """Parse ``model.safetensors.index.json``.  Raises Unreadable."""
    _check_narrow(data)
    return _Bounded(dict).parse(data)


def config(data: bytes) -> Any:
    """Parse ``config.json``.  Raises Unreadable."""
    _count(data, _MAX_CONFIG_VALUES, _MAX_CONFIG_VALUES)
    return _load(json.JSONDecoder(), data)


def is_narrow(data: bytes | str) -> bool:
    """Whether each character of the text, and of every text in it, takes one byte of memory."""
    return data.isascii() and ("\\u" not in data if isinstance(data, str) else b"\\u" not in data)


def header_cost(header: bytes) -> int:
    """The number of bytes for which a header counts towards MAX_HEADERS_BYTES."""
    return len(header) * (1 if is_narrow(header) else _MOST_PER_CHARACTER)


def product(factors: Iterable[int], most: int) -> int:
    """The product of whole numbers from 0 on, or a number above ``most`` as soon as that is certain."""
    found = 1
    sizes = tuple(factors)
    if 0 in sizes:
        return 0
    for size in sizes:
        found *= size
        if found > most:
            return most + 1
    return found


def are_sizes(value: Any) -> TypeGuard[Sequence[int]]:
    """Whether ``value`` is a short list of whole numbers that can be sizes."""
    return (
        isinstance(value, list | tuple)
        and len(value) <= MAX_DIMENSIONS
        and all(type(v) is int and 0 <= v < MAX_SIZE for v in value)
    )


def _entry(fields: dict[str, Any]) -> Any:
    dtype, shape, span = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if isinstance(dtype, str) or isinstance(shape, list) or isinstance(span, list):
        return Entry((dtype, shape, span))
    return fields


class _Bounded:
    """One parse.  ``made`` is called with the fields of each object, as soon as it ends."""

    def __init__(self, made: Callable[[dict[str, Any]], Any]) -> None:
        self._made = made
        self._n_objects = self._n_numbers = 0

    def parse(self, data: bytes | str) -> Any:
        _count(data, _VALUES_PER_TENSOR * MAX_TENSORS, _LISTS_PER_TENSOR * MAX_TENSORS)
        decoder = json.JSONDecoder(
            object_pairs_hook=self._object,
            parse_int=self._int,
            parse_constant=_refuse,
        )
        return _load(decoder, data)

    def _object(self, pairs: list[tuple[str, Any]]) -> Any:
        self._n_objects += 1
        self._n_numbers = 0
        if self._n_objects > MAX_TENSORS + MAX_FILES:
            raise Unreadable(f"it has more than {MAX_TENSORS} tensors and {MAX_FILES} files")
        fields = dict(pairs)
        if len(fields) != len(pairs):
            raise Unreadable("a name occurs twice")
        return self._made(fields)

    def _int(self, text: str) -> int:
        self._n_numbers += 1
        if len(text) > _DIGITS or self._n_numbers > _NUMBERS_PER_OBJECT:
            raise Unreadable(f"a number is longer than {_DIGITS} digits, or an object has too many of them")
        return int(text)


def _check_narrow(data: bytes | str) -> None:
    if len(data) > LARGE_BYTES and not is_narrow(data):
        raise Unreadable(f"it has {len(data)} bytes, and of more than {LARGE_BYTES} each must be ASCII without \\u")


def _refuse(text: str) -> NoReturn:
    raise Unreadable(f"{text} is no JSON")


def _count(data: bytes | str, most_values: int, most_lists: int) -> None:
    """Count the marks, including those inside strings: a valid model has few of them there.  Raises Unreadable."""
    if len(data) > MAX_TEXT_BYTES:
        raise Unreadable(f"it has {len(data)} bytes; at most {MAX_TEXT_BYTES} make sense")
    comma, square, brace = (",", "[", "{") if isinstance(data, str) else (b",", b"[", b"{")
    if data.count(comma) > most_values or data.count(square) + data.count(brace) > most_lists:  # type: ignore[arg-type]
        raise Unreadable(f"it has more than {most_values} values or {most_lists} lists and objects")


def _load(decoder: json.JSONDecoder, data: bytes | str) -> Any:
    try:
        return decoder.decode(data if isinstance(data, str) else data.decode())
    except ProtocolError:
        raise
    except (ValueError, RecursionError) as e:
        raise e if isinstance(e, Unreadable) else Unreadable(f"not JSON: {e}") from None
