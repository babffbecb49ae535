"""The first key of an installation, which a starting gateway makes known to the state server.

It comes as THAW_FIRST_KEY from the tool that set the installation up (``thaw dev up``, scripts/compose-env.sh) and
generated the key: there is no well-known default.  It is stored like every key, by its hash.  It is an operator's: with
it the other keys are made.
"""

from __future__ import annotations

import re
from typing import Final

from relay.state.api_keys import ApiKey, ApiKeys, Role
from thaw.clock import wall_ms
from thaw.ids import Namespace
from thaw.settings import SettingError

NAMESPACE: Final = Namespace("guest")
_KEY: Final = re.compile(r"[0-9a-f-]{36}:[A-Za-z0-9_-]{32,128}")


def check(key: str) -> None:
    """Raises SettingError for a text that is not a generated key."""
    if key and not _KEY.fullmatch(key):
        raise SettingError("THAW_FIRST_KEY is not a key", hint="make one: scripts/compose-env.sh does")


def admit(keys: ApiKeys, key: str) -> None:
    """Idempotent; a key that was revoked stays revoked.  Raises Unavailable, PlatformError."""
    if key:
        keys.admit(key, ApiKey(NAMESPACE, "guest", Role.OPERATOR, key.partition(":")[0], wall_ms()))
