"""The first key of an installation, which a starting gateway makes known to the state server.

It comes as THAW_FIRST_KEY from the tool that set the installation up (``thaw dev up``, scripts/compose-env.sh) and
generated the key: there is no well-known default.  It is stored like every key, by its hash.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from relay.state.records import Records, Subject
from thaw.ids import Namespace
from thaw.settings import SettingError

NAMESPACE: Final = Namespace("guest")
_KEY: Final = re.compile(r"[0-9a-f-]{36}:[A-Za-z0-9_-]{32,128}")


def check(key: str) -> None:
    """Raises SettingError for a text that is not a generated key."""
    if key and not _KEY.fullmatch(key):
        raise SettingError("THAW_FIRST_KEY is not a key", hint="make one: scripts/compose-env.sh does")


def admit(records: Records, key: str) -> None:
    """Idempotent.  Raises Unavailable, PlatformError."""
    if key:
        records.put_key(hashlib.sha256(key.encode()).hexdigest(), Subject(NAMESPACE, "guest"))
