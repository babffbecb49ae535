"""The storage initializer's settings."""

from __future__ import annotations

from dataclasses import dataclass

from thaw.settings import setting


@dataclass(frozen=True, slots=True)
class InitializerSettings:
    url: str = setting("THAW_MODEL_PORT_URL", "this node's model port, http://host:port")
    key: str = setting("THAW_API_KEY", "a tenant's API key; its namespace must be allowed the model")
    patience_s: float = setting("THAW_MODEL_PATIENCE_S", "give up after so many seconds in which no byte came", 600.0)
