"""Convert frozen dataclasses to JSON and back, by their type hints.

Values that cross a module or a process are dataclasses; this file is the only place that turns them into JSON and back.
Unknown fields are ignored, because a newer peer may send more.  A missing field without a default, or a value of the
wrong type, raises a ProtocolError that names the path.  JSON holds enums by value, NewTypes as the type that they wrap,
and tuples as arrays.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin

from thaw.errors import ProtocolError

T = TypeVar("T")

_SCALARS = frozenset({str, int, float, bool, types.NoneType})


def to_plain(value: Any) -> Any:
    """The JSON-ready form of a dataclass, enum, sequence, mapping or scalar."""
    if type(value) in _SCALARS:
        return value
    cls: Any = type(value)
    names = _field_names(cls)
    if names is not None:
        return {n: v if type(v := getattr(value, n)) in _SCALARS else to_plain(v) for n in names}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(to_plain(k)): to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    return value


@cache
def _field_names(cls: Any) -> tuple[str, ...] | None:
    """The names of a dataclass's fields; None for any other type."""
    return tuple(f.name for f in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else None


def dumps(value: Any) -> bytes:
    return encode(to_plain(value))


def encode(plain: Any, separators: tuple[str, str] = (",", ":")) -> bytes:
    """Encode as UTF-8.  A function may return half a surrogate pair, which UTF-8 cannot hold: then JSON escapes are
    used.
    """
    try:
        return _encoder(separators).encode(plain).encode()
    except UnicodeEncodeError:
        return json.dumps(plain, separators=separators).encode()


@cache
def _encoder(separators: tuple[str, str]) -> json.JSONEncoder:
    return json.JSONEncoder(separators=separators, ensure_ascii=False)  # json.dumps() would make one for each value


def loads(cls: type[T], data: bytes | str) -> T:
    """Parse JSON into ``cls``.  Raises ProtocolError."""
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"{cls.__name__}: not JSON: {e}") from e
    return from_plain(cls, plain)


class NotFinite(ValueError):
    """A number that JSON cannot hold, or that is too large for a double."""


def strict(text: str) -> Any:
    """Parse JSON as RFC 8259 has it: Python's parser would also take NaN and Infinity, and 1e999 for the latter.
    Raises NotFinite, ValueError, RecursionError."""
    return _STRICT.decode(text)


def _refuse(constant: str) -> None:
    raise NotFinite(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise NotFinite(f"{text:.40} is too large a number")
    return value


_STRICT = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def from_plain(cls: type[T], plain: Any, path: str = "$") -> T:
    """Build ``cls`` from parsed JSON.  Raises ProtocolError with the JSON path."""
    return typing.cast(T, _build(cls, plain, path))


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(hint: Any, plain: Any, path: str) -> Any:
    if type(plain) is hint:  # most values are strings and numbers
        return plain
    while isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    origin = get_origin(hint)
    if hint is Any or hint is object:
        return plain
    if origin in (Union, types.UnionType):
        return _build_union(hint, plain, path)
    if origin in (list, tuple, Sequence):
        return _build_sequence(hint, origin, plain, path)
    if origin in (dict, Mapping):
        _expect(isinstance(plain, dict), "an object", plain, path)
        key_hint, value_hint = get_args(hint)
        return {_build(key_hint, k, path): _build(value_hint, v, f"{path}.{k}") for k, v in plain.items()}
    if dataclasses.is_dataclass(hint):
        return _build_dataclass(typing.cast(type, hint), plain, path)
    return _build_scalar(hint, plain, path)


def _build_union(hint: Any, plain: Any, path: str) -> Any:
    options = [a for a in get_args(hint) if a is not type(None)]
    if plain is None and len(options) < len(get_args(hint)):
        return None
    for option in options[:-1]:
        try:
            return _build(option, plain, path)
        except ProtocolError:
            continue
    return _build(options[-1], plain, path)


def _build_sequence(hint: Any, origin: Any, plain: Any, path: str) -> Any:
    _expect(isinstance(plain, list), "an array", plain, path)
    args = get_args(hint)
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        _expect(len(plain) == len(args), f"{len(args)} items", plain, path)
        return tuple(_build(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(zip(args, plain, strict=True)))
    items = [_build(args[0], v, f"{path}[{i}]") for i, v in enumerate(plain)]
    return tuple(items) if origin is tuple else items


def _build_dataclass(cls: type, plain: Any, path: str) -> Any:
    _expect(isinstance(plain, dict), "an object", plain, path)
    hints = _hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name in plain:
            values[field.name] = _build(hints[field.name], plain[field.name], f"{path}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ProtocolError(f"{path}.{field.name}: missing in {cls.__name__}")
    return cls(**values)


def _build_scalar(hint: Any, plain: Any, path: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(plain)
        except ValueError:
            raise ProtocolError(f"{path}: {plain!r} is not a {hint.__name__}") from None
    if hint is float and type(plain) is int:
        return float(plain)
    # Python counts bool as an int, but this format does not.
    _expect(isinstance(plain, hint) and not (hint is int and isinstance(plain, bool)), hint.__name__, plain, path)
    return plain


def _expect(ok: bool, what: str, plain: Any, path: str) -> None:
    if not ok:
        raise ProtocolError(f"{path}: expected {what}, got {plain!r:.80}")
