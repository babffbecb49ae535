"""The model port's settings."""

from __future__ import annotations

from dataclasses import dataclass

from thaw.settings import setting


@dataclass(frozen=True, slots=True)
class ModelPortSettings:
    state_url: str = setting("THAW_STATE_URL", "the state server, redis://host:port/db")
    fetchd_socket: str = setting("THAW_FETCHD_SOCKET", "fetchd's control socket on this host")
    host_id: str = setting("THAW_HOST_ID", "this host's name in the log", "")
    bind: str = setting("THAW_MODEL_PORT_BIND", "host:port to listen on; port 0 takes a free one", "127.0.0.1:0")
    store: str = setting("THAW_MODEL_PORT_STORE", "a name NAME means the model STORE/NAME", "s3://models")
    models: str = setting(
        "THAW_MODELS", "prefixes of models that every namespace may read, as for the gateway", "s3://models"
    )
    piece_mb: int = setting(
        "THAW_MODEL_PORT_PIECE_MB",
        "weights come into fetchd's pool in pieces of so many MiB, a multiple of 8; a reader holds one at a time, and "
        "all readers half of the pool",
        128,
    )
