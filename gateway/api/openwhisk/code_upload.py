"""The body of a PUT of an action: long code goes into the state server while the body is read."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Final

from gateway.api import bounded_json
from gateway.api.openwhisk.code_zip import ZipText
from gateway.api.openwhisk.long_string import WINDOW_BYTES, LongString
from relay.state.code import Upload
from thaw.action import DEFAULT_KINDS, KIND_LLM, StoredCode
from thaw.errors import BadRequest, TooLarge
from thaw.ids import random_hex_id

INLINE_BYTES: Final = 64 * 1024
"""Code of at most this length is kept in its action, so that one read gets both."""
_PIECE_BYTES: Final = 512 * 1024


class LongCode:
    """The value of ``exec.code`` in a parsed body when the code has been stored."""

    def __init__(self, stored: StoredCode, zip_: io.BytesIO | None) -> None:
        """``zip_`` is the code as a zip, if it is one."""
        self.stored, self.zip = stored, zip_


class CodeWriter:
    def __init__(self, upload: Upload, max_bytes: int) -> None:
        self._upload, self._max_bytes = upload, max_bytes
        self._piece = bytearray()
        self._zip = ZipText()

    def write(self, text: bytes) -> None:
        """``text`` is UTF-8 of whole characters.  Raises TooLarge, Unavailable, PlatformError."""
        self._piece += text
        self._zip.feed(text)
        n_bytes = self._upload.n_bytes + len(self._piece)
        if n_bytes > self._max_bytes:
            raise TooLarge(f"Request larger than allowed: {n_bytes} > {self._max_bytes} bytes.")
        if len(self._piece) >= _PIECE_BYTES:
            self._flush()

    def end(self) -> LongCode:
        if self._piece:
            self._flush()
        return LongCode(self._upload.end(), self._zip.end())

    def _flush(self) -> None:
        self._upload.add(bytes(self._piece))
        self._piece.clear()


def longest_string(parameters_bytes: int) -> int:
    """How long a string of the body may be in bytes of JSON, unless it is the code of a function."""
    return max(parameters_bytes, INLINE_BYTES)


def action_body(
    read: Callable[[int], bytes], upload: Upload, *, code_bytes: int, parameters_bytes: int
) -> dict[str, Any]:
    """The body's object, in which ``exec.code`` is a LongCode if it has more than 64 KiB.  Raises BadRequest, TooLarge,
    Unavailable, PlatformError."""
    mark = random_hex_id()
    writer = CodeWriter(upload, code_bytes)
    longest = longest_string(parameters_bytes)
    windows = LongString(longest, 3 * longest, mark, writer.write)
    while window := read(WINDOW_BYTES):
        windows.feed(window)
    plain = bounded_json.parse(windows.rest())
    if not isinstance(plain, dict):
        raise BadRequest("The request content was malformed:\nthe body must be a JSON object.")
    exec_ = plain.get("exec")
    code = exec_.get("code") if isinstance(exec_, dict) else None
    if windows.found:
        if code != mark:
            raise TooLarge(
                f"Request larger than allowed: a string beside exec.code has more than {longest} bytes "
                "(THAW_PARAMETERS_BYTES, or 64 KiB if that is more)."
            )
        plain["exec"]["code"] = writer.end()
    elif isinstance(code, str) and len(code.encode()) > INLINE_BYTES and not _is_llm(exec_):
        for begin in range(0, len(code), WINDOW_BYTES):
            writer.write(code[begin : begin + WINDOW_BYTES].encode())
        plain["exec"]["code"] = writer.end()
    return plain


def _is_llm(exec_: Any) -> bool:
    """Its code is a config, which is parsed and not stored."""
    return isinstance(kind := exec_.get("kind"), str) and DEFAULT_KINDS.get(kind, kind) == KIND_LLM
