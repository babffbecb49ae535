"""A zip as an action's code: finds the packages that it asks for and does not contain.

They are installed when the action is deployed (gateway/serving/deploying/package_locks.py), so a zip with a package
that cannot be installed is refused then, and not at its first run.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import struct
import zipfile
import zlib
from typing import Final

from thaw import requirements
from thaw.errors import BadRequest

_ASKS: Final = "requirements.txt"
_BRINGS: Final = re.compile(r"virtualenv/lib/python[\d.]+/site-packages/.")
_MAX_BYTES: Final = 256 * 1024
"""At most this much of a requirements.txt is read; a file with hashes for some hundred packages is smaller."""
_END_BYTES: Final = 22
_LOCATOR_BYTES: Final = 20
_COMMENT_BYTES: Final = 65_536
_END: Final = b"PK\x05\x06"
_LOCATOR_64: Final = b"PK\x06\x07"
_MAX_DIRECTORY_BYTES: Final = 2 * 1024 * 1024
"""A list of files is in memory some ten times as long; a zip with 20,000 files has a shorter one."""
_UNREADABLE: Final = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError)


def decoded_zip(code: str) -> io.BytesIO | None:
    """A zip, or None for source text.  OpenWhisk's rule: code that decodes as base64 to a zip is one."""
    try:
        data = base64.b64decode(code, validate=True)
    except (binascii.Error, ValueError):
        return None
    return io.BytesIO(data) if data[:2] == b"PK" else None


class ZipText:
    """decoded_zip() of code that comes in pieces.  It keeps a zip, which is three quarters as long as the code, and
    nothing of other code."""

    def __init__(self) -> None:
        self._zip: io.BytesIO | None = io.BytesIO()
        self._held = b""
        self._n_padding = 0

    def feed(self, text: bytes) -> None:
        if self._zip is None or not text:
            return
        text = self._held + text
        n_whole = len(text) // 4 * 4
        whole, self._held = text[:n_whole], text[n_whole:]
        try:
            part = b"" if self._n_padding else base64.b64decode(whole, validate=True)
        except (binascii.Error, ValueError):
            part = b""
        self._n_padding += whole.count(b"=")
        self._zip.write(part)
        if (whole and not part) or not _may_be_zip(self._zip):
            self._zip = None

    def end(self) -> io.BytesIO | None:
        """The zip, or None for source text."""
        found, self._zip = self._zip, None
        if found is None or found.tell() < 2:
            return None
        # padding that nothing needs is taken, but not behind padding that was needed
        return found if not self._held.strip(b"=") and not (self._held and self._n_padding) else None


def _may_be_zip(data: io.BytesIO) -> bool:
    return data.tell() < 2 or bytes(data.getbuffer()[:2]) == b"PK"


def packages_of(data: io.BytesIO) -> tuple[str, ...]:
    """Return the packages that the zip asks for and does not contain.  Raises BadRequest for a requirements.txt that
    asks for more than packages by name.

    A zip that cannot be read asks for nothing: its runtime says so, in OpenWhisk's words.
    """
    if not re.search(re.escape(_ASKS).encode(), data.getbuffer()):
        return ()  # names are not compressed; nearly every zip ends here
    return requirements.parse(_asked(data))


def _asked(data: io.BytesIO) -> str:
    if not 0 < _directory_bytes(data) <= _MAX_DIRECTORY_BYTES:
        return ""
    try:
        with zipfile.ZipFile(data) as archive:
            names = archive.namelist()
            if _ASKS not in names or any(_BRINGS.match(name) for name in names):
                return ""
            if archive.getinfo(_ASKS).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                return ""  # other methods give more at once than was asked for
            with archive.open(_ASKS) as file:
                text = file.read(_MAX_BYTES + 1)
    except _UNREADABLE:
        return ""
    if len(text) > _MAX_BYTES:
        raise BadRequest(f"The zip's requirements.txt has more than {_MAX_BYTES} bytes.")
    return text.decode("utf-8", "replace")


def _directory_bytes(data: io.BytesIO) -> int:
    """How much of the zip ``zipfile`` reads as its list of files; 0 if it has none, or the 64-bit form, which only zips
    with a longer one need."""
    whole = data.getbuffer()
    tail = bytes(whole[-(_LOCATOR_BYTES + _END_BYTES + _COMMENT_BYTES) :])
    plain = len(tail) - _END_BYTES
    is_plain = plain >= 0 and tail[plain:].startswith(_END) and tail.endswith(b"\0\0")
    at = plain if is_plain else tail.rfind(_END)
    if at < 0 or len(tail) - at < _END_BYTES or tail[max(0, at - _LOCATOR_BYTES) :].startswith(_LOCATOR_64):
        return 0
    n_bytes: int = struct.unpack_from("<L", tail, at + 12)[0]
    return n_bytes
