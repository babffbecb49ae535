"""How an adapter travels to a container: ``POST /adapter`` with these headers, and its config and weights as body.

A run that wants an adapter names it in a header, because an invoker does not read the body: a gateway by the URI of the
function, an invoker by the name under which it has loaded the adapter.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote, unquote

ADAPTER_HEADER: Final = "x-thaw-adapter"
"""A run and the request that loads an adapter name it here, percent-encoded."""
LEFT_HEADER: Final = "x-thaw-left-ms"
"""A run that names an adapter says here how many milliseconds it may still take."""
REPLACES_HEADER: Final = "x-thaw-replaces"
"""The request that loads an adapter names here the one that makes room, if any."""
CONFIG_BYTES_HEADER: Final = "x-thaw-config-bytes"

MOST_ADAPTER_BYTES: Final = 1 << 30
"""An adapter of rank 64 for all layers of a model with 70 billion parameters has 1.6 GB in two bytes a number; one of
rank 16 for 8 billion has 80 MB."""


def encoded(name: str) -> str:
    """A name as the value of a header."""
    return quote(name, safe=":/@#")


def decoded(value: str) -> str:
    return unquote(value)
