"""A zip as an action's code: which packages it asks for and does not bring.

OpenWhisk's runtimes install a zip's ``requirements.txt`` when an action is initialised.  Here nothing is installed:
function containers have no network.  A zip that needs an installation is refused when it is deployed, not at its first
run.
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

from thaw.errors import BadRequest

_ASKS: Final = "requirements.txt"
_BRINGS: Final = re.compile(r"virtualenv/lib/python[\d.]+/site-packages/.")
_MAX_BYTES: Final = 256 * 1024
"""At most this much of a requirements.txt is read; a file with hashes for some hundred packages is smaller."""
_MOST_NAMED: Final = 5
_UNREADABLE: Final = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError)


def decoded_zip(code: str) -> bytes | None:
    """The bytes of a zip, or None for source text.  OpenWhisk's rule: code that decodes as base64 to a zip is one."""
    try:
        data = base64.b64decode(code, validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if data[:2] == b"PK" else None


class ZipText:
    """decoded_zip() of code that comes in pieces.  It keeps a zip, which is three quarters as long as the code, and
    nothing of other code."""

    def __init__(self) -> None:
        self._data: bytearray | None = bytearray()
        self._held = b""
        self._is_padded = False

    def feed(self, text: bytes) -> None:
        if self._data is None or not text:
            return
        text = self._held + text
        n_whole = len(text) // 4 * 4
        whole, self._held = text[:n_whole], text[n_whole:]
        try:
            part = b"" if self._is_padded else base64.b64decode(whole, validate=True)
        except (binascii.Error, ValueError):
            part = b""
        self._is_padded = whole.endswith(b"=")
        self._data += part
        if (whole and not part) or (len(self._data) > 1 and not self._data.startswith(b"PK")):
            self._data = None

    def end(self) -> bytes | None:
        """The zip, or None for source text."""
        data, self._data = self._data, None
        return bytes(data) if data and not self._held and data.startswith(b"PK") else None


def check_packages(data: bytes) -> None:
    """Raises BadRequest for a zip that asks for packages and does not bring them.

    A zip that cannot be read passes: its runtime says so, in OpenWhisk's words.
    """
    if _ASKS.encode() not in data:
        return  # names are not compressed; nearly every zip ends here
    asked = _asked(data)
    if not asked:
        return
    named = ", ".join(asked[:_MOST_NAMED]) + (", …" if len(asked) > _MOST_NAMED else "")
    raise BadRequest(
        f"The zip's requirements.txt asks for packages, which are not installed here: {named}. Bring them in the zip "
        "(pip install --target virtualenv/lib/python3.11/site-packages -r requirements.txt), or take requirements.txt "
        "out of it when the hosts' image has them (see docs/functions.md)."
    )


def _asked(data: bytes) -> list[str]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
            if _ASKS not in names or any(_BRINGS.match(name) for name in names):
                return []
            with archive.open(_ASKS) as file:
                text = file.read(_MAX_BYTES)
    except _UNREADABLE:
        return []
    lines = (re.split(r"\s#|;", line)[0].strip() for line in text.decode("utf-8", "replace").splitlines())
    return [line.rstrip("\\ ") for line in lines if line and not line.startswith(("#", "--"))]
