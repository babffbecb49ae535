"""Bearer tokens between the platform's processes and of its scrapers, compared in constant time."""

from __future__ import annotations

import hmac


def is_bearer(authorization: str, *tokens: str) -> bool:
    """Whether the header carries one of the tokens.  An empty token matches no header."""
    given = authorization.encode("utf-8", "surrogateescape")
    return any(bool(token) and hmac.compare_digest(given, f"Bearer {token}".encode()) for token in tokens)
