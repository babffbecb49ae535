"""Parses a hub's own URL, and the links in the headers Location and Link of its answers.

All code that follows them uses this module: only a plain URL is accepted, and each origin has only one spelling.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import urljoin, urlsplit

from thaw.settings import SettingError

DEFAULT_ENDPOINT: Final = "https://huggingface.co"

_PORTS: Final = {"http": 80, "https": 443}
_PLAIN: Final = re.compile(r"[\x21-\x7e]{1,8192}")
"""Text that may be written into a request line unchanged."""
_HOST: Final = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")


class Link(NamedTuple):
    """``origin`` is ``scheme://host`` in small letters, with the port unless it is the scheme's own; ``path`` has the
    query."""

    origin: str
    path: str

    @property
    def is_safe(self) -> bool:
        return self.origin.startswith("https:")

    @property
    def url(self) -> str:
        return self.origin + self.path


def link_of(text: str, base: Link | None = None) -> Link | None:
    """The place that ``text`` names, as seen from ``base``; None for one to which no request can be sent."""
    if not _PLAIN.fullmatch(text):
        return None
    try:
        parts = urlsplit(urljoin(base.url, text) if base else text)
        host, port = parts.hostname or "", parts.port  # reading the port checks it
    except ValueError:
        return None
    if parts.scheme not in _PORTS or "@" in parts.netloc or not _HOST.fullmatch(host) or port == 0:
        return None
    place = f"[{host}]" if ":" in host else host
    suffix = "" if port in (None, _PORTS[parts.scheme]) else f":{port}"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Link(f"{parts.scheme}://{place}{suffix}", path)


def endpoint_of(text: str) -> str:
    """The hub's URL without a slash at its end; the default for an empty HF_ENDPOINT.  Raises SettingError."""
    found = link_of(text.strip().rstrip("/") or DEFAULT_ENDPOINT)
    if found is None or "?" in found.path:
        raise SettingError(f"HF_ENDPOINT: {text!r:.200} is not the URL of a hub", hint=f"write {DEFAULT_ENDPOINT}")
    return found.url.rstrip("/")
