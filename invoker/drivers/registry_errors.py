"""Why an image of a user's cannot be pulled, in words for the tenant.

An engine's or a node's sentence may name addresses of the operator's network, which are not a tenant's business.
"""

from __future__ import annotations

import re
from typing import Final

_NO_WAY: Final = re.compile(r"dial tcp|lookup |context deadline|i/o timeout|connection reset|x509")
_NO_CREDENTIAL: Final = re.compile(r"no basic auth credentials")
_REFUSED: Final = re.compile(r": unauthorized\b|incorrect username or password|authorization failed|401 Unauthorized")
_WRAPPED: Final = re.compile(r"\Arpc error: code = \w+ desc = ")
"""A kubelet's words before those of containerd."""
HINT: Final = "look whether it exists; for a private registry the operator gives the hosts a credential"


def why(said: str, credential: str) -> str:
    """``credential``: where the operator puts one."""
    if _NO_WAY.search(said):
        return "its registry does not answer"
    if _NO_CREDENTIAL.search(said):
        return f"its registry asks for a credential, and this host has none; the operator gives it one ({credential})"
    if _REFUSED.search(said):
        return f"its registry takes no credential of this host; the operator gives it a valid one ({credential})"
    return _WRAPPED.sub("", said)
