"""Logs: one JSON object a line on stderr, a constant event name, values as fields.  Never prompts, never keys."""

from __future__ import annotations

import json
import sys
import threading
import time

_lock = threading.Lock()


class Log:
    """``Log("fetchd").event("fetch_done", group_id=g, n_bytes=n)``."""

    def __init__(self, component: str, **fields: object) -> None:
        self._fields = {"component": component, **fields}

    def bind(self, **fields: object) -> Log:
        bound = Log("")
        bound._fields = {**self._fields, **fields}
        return bound

    def event(self, name: str, **fields: object) -> None:
        line = json.dumps({"ts": round(time.time(), 3), "event": name, **self._fields, **fields}, default=str)
        with _lock:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
