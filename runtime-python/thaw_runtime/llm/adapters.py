"""The adapters of one container: records which ones are loaded, and loads new ones."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Mapping
from typing import BinaryIO

from relay.protocol.adapter_messages import (
    ADAPTER_HEADER,
    CONFIG_BYTES_HEADER,
    MOST_ADAPTER_BYTES,
    REPLACES_HEADER,
    decoded,
)
from thaw.errors import AdapterMissing, BadRequest, InstanceBusy, ThawError
from thaw_runtime.engine.link import EngineLink

_MOST_CONFIG_BYTES = 1 << 20


class Adapters:
    """Thread-safe."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._loaded: dict[str, None] = {}

    def names(self) -> list[str]:
        """Return the loaded adapters; the most recent one is last."""
        with self._lock:
            return list(self._loaded)

    def check(self, name: str) -> None:
        """Raises AdapterMissing for an adapter that is not loaded.  The invoker loads it when the run is sent again."""
        with self._lock:
            if name and name not in self._loaded:
                raise AdapterMissing("the adapter has just left this instance")

    def load(self, headers: Mapping[str, str], body: BinaryIO) -> None:
        """Read an adapter from a request and load it.  Raises BadRequest, and the engine's errors."""
        name, replaces = decoded(headers.get(ADAPTER_HEADER, "")), decoded(headers.get(REPLACES_HEADER, ""))
        n_bytes, n_config = (_number(headers, key) for key in ("content-length", CONFIG_BYTES_HEADER))
        if not (name and 0 < n_config <= min(n_bytes - 1, _MOST_CONFIG_BYTES) and n_bytes <= MOST_ADAPTER_BYTES):
            raise BadRequest("an adapter has a name, a config and weights")
        config = body.read(n_config).decode("utf-8", "replace")
        fd = _memory(body, n_bytes - n_config)
        try:
            self._load(name, replaces, config, fd)
        finally:
            os.close(fd)

    def _load(self, name: str, replaces: str, config: str, fd: int) -> None:
        try:
            self._link.load_adapter(name, replaces, config, fd)
        except InstanceBusy:
            raise  # nothing has changed
        except ThawError:
            with self._lock:
                self._loaded.pop(replaces, None)
            raise
        with self._lock:
            self._loaded.pop(replaces, None)
            self._loaded.pop(name, None)
            self._loaded[name] = None


def _number(headers: Mapping[str, str], key: str) -> int:
    text = headers.get(key, "")
    return int(text) if text.isdigit() and len(text) < 20 else 0


def _memory(body: BinaryIO, n_bytes: int) -> int:
    """Return a descriptor of memory with the next bytes of ``body``.  Raises BadRequest when ``body`` is shorter."""
    fd = os.memfd_create("adapter")
    try:
        os.ftruncate(fd, n_bytes)
        with mmap.mmap(fd, n_bytes) as memory, memoryview(memory) as view:
            done = 0
            while done < n_bytes:
                count = body.readinto(view[done:])  # type: ignore[attr-defined]
                if not count:
                    raise BadRequest(f"the adapter ended at byte {done} of {n_bytes}")
                done += count
    except BaseException:
        os.close(fd)
        raise
    return fd
