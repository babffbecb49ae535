"""The name of a token in logprobs: its text, or for half a character its bytes as OpenAI writes them
(``bytes:\\xf0\\x9f``).

Two tokens with other bytes have other names, also where both would print as a replacement character.
"""

from __future__ import annotations

import re
from typing import Final

_BYTES: Final = re.compile(r"bytes:(?:\\x[0-9a-f]{2})+")


def token_name(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_bytes(name: str) -> bytes:
    """The bytes of the token with this name."""
    if not _BYTES.fullmatch(name):
        return name.encode()
    return bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))


def n_characters(name: str) -> int:
    """By how many characters the token makes a text longer, as far as it shows them itself."""
    return 0 if _BYTES.fullmatch(name) else len(name)
