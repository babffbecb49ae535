"""JSON with long strings, made by msgspec.

Python's encoder holds the interpreter until a string is whole, and no switch interval ends that: requests of everybody
else, each of which needs the interpreter several times, waited for it each time (``bench/floods.py``, bodies).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from thaw import wire

_ENCODER: Final = msgspec.json.Encoder()


def encode(plain: Any) -> bytes:
    """Return UTF-8 with the same value as wire.encode().  ``plain`` is JSON's own: NaN and Infinity would become
    null."""
    try:
        return _ENCODER.encode(plain)
    except (ValueError, OverflowError, TypeError, RecursionError):  # half a surrogate pair, an integer beyond 64 bits
        return wire.encode(plain)


def escaped(piece: bytes) -> bytes:
    """Return the UTF-8 text as it stands in a JSON string, without the quotes."""
    return _ENCODER.encode(piece.decode())[1:-1]
