"""Takes one long string out of JSON that arrives in windows.  Pure.

Python would keep the text several times, with up to four bytes a character: 45 MB of code took 540 MB.  Here the string
leaves in pieces of UTF-8, and a short mark stands in its place in the rest, which is then parsed as every other JSON.
The search is only for the places where strings begin and end, by functions that run at C's speed: an escaped quote is
no end, and outside of strings a text that the parser accepts has no backslashes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from thaw.errors import BadRequest, TooLarge

WINDOW_BYTES: Final = 128 * 1024
"""The number of bytes that should be fed at a time: a window and its copies are in memory several times."""
_HIGH: Final = re.compile(rb"\\u[dD][89abAB]..")
"""The first half of an escaped character beyond 16 bits."""
_LONGEST_ESCAPE: Final = 12


class LongString:
    """Feed it the windows, then take ``rest``."""

    def __init__(self, longest: int, most: int, mark: str, write: Callable[[bytes], None]) -> None:
        """A string of more than ``longest`` bytes that does not fit into a window is the long one; everything else has
        ``most`` bytes.  ``write`` gets the pieces."""
        self._longest, self._most, self._mark = longest, most, mark.encode()
        self._write = write
        self._rest = bytearray()
        self._held = b""  # half an escape
        self._string = bytearray()  # the one that is open, while it is not long
        self._is_inside = False
        self._text: StringText | None = None
        self.found = False

    def feed(self, window: bytes) -> None:
        """Raises BadRequest for a long string that is none of JSON's, TooLarge for a second one, and what ``write``
        raises."""
        data, self._held = self._held + window, b""
        if (len(data) - len(data.rstrip(b"\\"))) % 2:
            data, self._held = data[:-1], b"\\"
        marks = data.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        at = 0
        if self._is_inside:
            end = marks.find(b'"')
            self._go_on(data if end < 0 else data[:end])
            if end < 0:
                return
            self._close()
            at = end + 1
        if marks.count(b'"', at) % 2:
            begin = marks.rfind(b'"')
            self._keep(data[at:begin])
            self._is_inside = True
            self._go_on(data[begin + 1 :])
        else:
            self._keep(data[at:])

    def rest(self) -> bytes:
        """Return the rest of the text, with the mark in place of the long string."""
        if self._is_inside or self._held:
            self._keep(b'"' + self._string + self._held)  # this is no JSON, so its parser will refuse it
        rest, self._rest = bytes(self._rest), bytearray()
        return rest

    def _go_on(self, raw: bytes) -> None:
        if self._text is not None:
            self._write(self._text.feed(raw))
            return
        self._string += raw
        if len(self._string) > self._longest:
            if self.found:
                raise TooLarge(f"Request larger than allowed: two strings have more than {self._longest} bytes.")
            self.found, self._text = True, StringText()
            string, self._string = bytes(self._string), bytearray()
            for begin in range(0, len(string), WINDOW_BYTES):
                self._write(self._text.feed(string[begin : begin + WINDOW_BYTES]))

    def _close(self) -> None:
        self._is_inside = False
        if self._text is not None:
            self._write(self._text.end())
            self._text = None
            self._keep(b'"' + self._mark + b'"')
        else:
            self._keep(b'"' + self._string + b'"')
            self._string.clear()

    def _keep(self, data: bytes) -> None:
        self._rest += data
        if len(self._rest) > self._most:
            raise TooLarge(f"Request larger than allowed: more than {self._most} bytes beside the code.")


class StringText:
    """The UTF-8 of a JSON string that arrives in pieces, without its quotes."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, raw: bytes) -> bytes:
        """Return the characters that are complete.  Raises BadRequest."""
        data = self._held + raw
        end = _whole(data)
        self._held = data[end:]
        return _decoded(data[:end])

    def end(self) -> bytes:
        held, self._held = self._held, b""
        return _decoded(held)


def _whole(data: bytes) -> int:
    """Where a character begins of which something may be missing.  ``data`` begins with a whole one."""
    end = len(data)
    marks = data.replace(b"\\\\", b"__")
    escape = marks.rfind(b"\\")
    if escape >= max(0, end - _LONGEST_ESCAPE):
        return escape - 6 if escape >= 6 and _HIGH.fullmatch(marks, escape - 6, escape) else escape
    for _ in range(3):
        if end and data[end - 1] & 0xC0 == 0x80:
            end -= 1
    return end - 1 if end and data[end - 1] >= 0xC0 else end


def _decoded(raw: bytes) -> bytes:
    try:
        text: str = json.loads(f'"{raw.decode()}"')
        return text.encode()
    except ValueError as e:
        raise BadRequest(f"The request content was malformed:\nexec.code is no string of JSON: {e}") from e
