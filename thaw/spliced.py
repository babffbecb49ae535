"""JSON with one string that is too long to be in memory at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from thaw import wire


def spliced(
    plain: Any,
    mark: str,
    pieces: Iterable[bytes],
    separators: tuple[str, str] = (",", ":"),
    escape: Callable[[bytes], bytes] | None = None,
) -> Iterator[bytes]:
    """Yield the JSON of ``plain``, in which the string ``mark`` stands for the text of ``pieces``.

    ``mark`` must be one that occurs nowhere else, such as a random id.  The pieces are UTF-8, each of whole characters;
    ``escape`` turns a piece into the text of a JSON string.
    """
    before, quoted, after = wire.encode(plain, separators).partition(json.dumps(mark).encode())
    if not quoted:
        raise ValueError("the mark is not in the value")
    yield before + b'"'
    for piece in pieces:
        yield (escape or _escaped)(piece)
    yield b'"' + after


def _escaped(piece: bytes) -> bytes:
    return json.dumps(piece.decode(), ensure_ascii=False)[1:-1].encode()
