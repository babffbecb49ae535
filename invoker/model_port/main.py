"""``python -m invoker.model_port.main``: the model port of a host, a process of its own.  Runs until SIGTERM or SIGINT.

It is none of the invoker's threads: what it sends must not wait for an interpreter that forwards tokens, and programs
of others reach it, so it has neither the invoker's rights nor its sockets.
"""

from __future__ import annotations

import sys
import threading
from typing import Final

from invoker.model_port.files import ModelFiles
from invoker.model_port.port import ModelPort, places
from invoker.model_port.settings import ModelPortSettings
from relay.clients.fetch import FetchClient
from relay.state import redis_link
from relay.state.allowed_models import AllowedModels, ModelLeave
from relay.state.api_keys import ApiKeys
from relay.state.clock import StateClock
from relay.state.registry import Registry
from thaw.errors import BadRequest, PlatformError, Unavailable
from thaw.logs import Log
from thaw.model import CHUNK_BYTES
from thaw.model_uri import ModelUri, policy_of
from thaw.process import descriptors, lasting
from thaw.process.ending import Ending
from thaw.settings import SettingError, load

_MIB: Final = 1024 * 1024
_FETCHD_WAIT_S: Final = 120
"""fetchd fills its pool before it listens."""


def _check(settings: ModelPortSettings) -> None:
    """Raises SettingError."""
    if settings.piece_mb < 8 or settings.piece_mb * _MIB % CHUNK_BYTES:
        raise SettingError(
            f"THAW_MODEL_PORT_PIECE_MB={settings.piece_mb} is not a multiple of 8",
            hint="try 128; the pool must hold it",
        )
    try:
        ModelUri.parse_prefix(settings.store)
    except BadRequest as e:
        raise SettingError(f"THAW_MODEL_PORT_STORE: {e.message}", hint="try s3://models") from None


def _port(settings: ModelPortSettings, log: Log) -> ModelPort:
    _check(settings)
    client = redis_link.connect(settings.state_url)
    registry = Registry(client, StateClock())
    fetch = FetchClient(settings.fetchd_socket)
    files = ModelFiles(fetch, registry.scheduler_epoch, settings.piece_mb * _MIB, log)
    _close_left(files)
    most = places(fetch.status().pool_bytes, settings.piece_mb * _MIB)
    leave = ModelLeave(policy_of(settings.models), AllowedModels(client))
    return ModelPort(settings.bind, settings.store, files, most, ApiKeys(client), leave, log)


def _close_left(files: ModelFiles) -> None:
    """Raises Unavailable when fetchd does not come up."""
    pause = threading.Event()
    for left in range(_FETCHD_WAIT_S, -1, -1):
        try:
            return files.close_left()
        except Unavailable:
            if left == 0:
                raise
            pause.wait(1.0)


def main() -> None:
    log = Log("model-port")
    lasting.guard(log)
    ending = Ending()
    descriptors.raise_limit()  # a reader needs a descriptor for each slab of its piece
    try:
        settings = load(ModelPortSettings)
        log = log.bind(host_id=settings.host_id)
        port = _port(settings, log)
    except (SettingError, PlatformError) as e:
        sys.exit(f"model port: {e.message}; {e.hint}")
    except OSError as e:
        sys.exit(f"model port: cannot listen: {e}; set THAW_MODEL_PORT_BIND to a free host:port")
    port.start()
    log.event("ready", address=port.address)
    ending.wait()
    port.stop()
    log.event("stopped")


if __name__ == "__main__":
    main()
