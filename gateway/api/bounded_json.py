"""JSON of tenants, with bounds on its depth and on its number of values before any object is made of it.  Pure.

Three bytes of ``[],`` become 64 bytes of memory: 48 MB of them took 1.3 GB, and held the interpreter for 3.5 s.  So the
marks ``[ { ,`` are counted first.  A body with few of them costs three searches of its bytes.  In others the strings
are left out, a window at a time, by functions that run at C's speed.
"""

from __future__ import annotations

import json
import re
import threading
from contextlib import nullcontext
from itertools import accumulate
from typing import Any, Final

from thaw import wire
from thaw.errors import BadRequest, TooLarge

MAX_DEPTH: Final = 128
"""Python code that walks over a value takes two frames a level, of about a thousand."""
MAX_CONTAINERS: Final = 65_536
"""An object of one field takes 232 bytes, and its name some 50: 18 MB at most."""
MAX_VALUES: Final = 262_144
_LONG_BYTES: Final = 64 * 1024
_LONG_ONES: Final = threading.Lock()
"""One thread parses a long text, and others wait.  Parsing holds the interpreter for milliseconds at a time, and each
of several threads that parse would come between any two steps of everybody's requests."""
_WINDOW_BYTES: Final = 1024 * 1024
_OTHERS: Final = bytes(b for b in range(256) if b not in b'[]{},"')
_STRING: Final = re.compile(rb'"[^"]*"')
_STEPS: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


def parse(data: bytes) -> Any:
    """Raises BadRequest for a text that is no JSON (RFC 8259) or nested too deep, TooLarge for too many values."""
    with _LONG_ONES if len(data) > _LONG_BYTES else nullcontext():
        check(data)
        try:
            text = data.decode("utf-8-sig")
            del data  # 48 MB, of which the caller keeps none either
            plain = wire.strict(text)
            if "\\u" in text and _SURROGATE.search(text):  # the former takes no time beside the latter
                json.dumps(plain, ensure_ascii=False).encode()  # half a pair is no character, and no UTF-8
        except (ValueError, RecursionError) as e:
            raise BadRequest(f"The request content was malformed:\n{e}") from e
        return plain


def check(data: bytes) -> None:
    """Raises BadRequest, TooLarge."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH and data.count(b",") < MAX_VALUES:
        return
    n_containers = n_commas = depth = 0
    inside, carried = False, b""
    for begin in range(0, len(data), _WINDOW_BYTES):
        window = carried + data[begin : begin + _WINDOW_BYTES]
        carried = b"\\" if (len(window) - len(window.rstrip(b"\\"))) % 2 else b""  # half an escape
        marks, inside = _outside_strings(window[:-1] if carried else window, inside)
        n_containers += marks.count(b"[") + marks.count(b"{")
        n_commas += marks.count(b",")
        if n_containers > MAX_CONTAINERS or n_commas >= MAX_VALUES:
            raise TooLarge(
                f"Request larger than allowed: more than {MAX_VALUES} values, or {MAX_CONTAINERS} lists and objects."
            )
        depth = _deepest(marks.translate(None, b","), depth)


def _outside_strings(window: bytes, inside: bool) -> tuple[bytes, bool]:
    """Return the marks that are not in strings, and whether the window ends in a string."""
    marks = window.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS)
    if inside:
        _, quote, marks = marks.partition(b'"')
        if not quote:
            return b"", True
    marks, quote, _ = _STRING.sub(b"", marks).partition(b'"')
    return marks, bool(quote)


def _deepest(brackets: bytes, depth: int) -> int:
    """Return the depth behind the brackets.  Raises BadRequest."""
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise BadRequest("The request content was malformed:\nit is not JSON.")  # brackets that close nothing
    after = depth
    for after in accumulate(map(_STEPS.__getitem__, brackets), initial=depth):
        if after > MAX_DEPTH:
            raise BadRequest(f"The request content was malformed:\nit is nested deeper than {MAX_DEPTH} levels.")
    return after


def has_few_containers(value: Any, most: int) -> bool:
    """Whether the value has at most so many lists and objects in it."""
    left = [value]
    for _ in range(most + 1):
        if not left:
            return True
        one = left.pop()
        inside = one.values() if isinstance(one, dict) else one
        left += [each for each in inside if isinstance(each, dict | list)]
    return not left
