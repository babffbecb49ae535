"""``thaw-gateway``: gunicorn (its gthread worker), embedded, one worker process whose threads hold the requests."""

from __future__ import annotations

import ctypes
import gc
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from gunicorn.app.base import BaseApplication

from gateway import first_key
from gateway.api.openwhisk.calls import make_call
from gateway.app import create_app
from gateway.core import Gateway
from gateway.front.bounds import Bounds
from gateway.settings import GatewaySettings
from gateway.worker import Worker
from thaw.errors import ThawError
from thaw.ids import Namespace
from thaw.logs import Log
from thaw.model_uri import policy_of
from thaw.process import descriptors, lasting
from thaw.process.ending import end_within
from thaw.settings import SettingError, load

Wsgi = Callable[[dict[str, Any], Any], Iterable[bytes]]

_STACK_BYTES: Final = 512 * 1024  # a thousand threads of the default 8 MiB may exceed container memory limits
_OTHER_DESCRIPTORS: Final = 256
_LAST_WORDS_S: Final = 4.0
"""The worker ends at most this long after its last request.  The recorder may need three seconds of it for its
records."""
_PR_SET_PDEATHSIG: Final = 1
_SWITCH_S: Final = 0.0005
"""Python's 5 ms would let the thread that writes records hold a token back for as long."""


class _Server(BaseApplication):  # type: ignore[misc]
    """gunicorn's settings, and our threads started in the worker: they would not survive its fork."""

    def __init__(self, settings: GatewaySettings, log: Log) -> None:
        self._settings, self._log = settings, log
        self.bounds = bounds(settings)
        self._gateway: Gateway | None = None
        super().__init__()

    def load_config(self) -> None:
        settings = self._settings
        values = {
            "bind": settings.bind,
            "worker_class": Worker,
            "workers": 1,
            "threads": settings.threads,
            "worker_connections": settings.threads + self.bounds.connections,
            "backlog": 4096,
            "keepalive": round(self.bounds.idle_s),
            # no proxy sets these here, and headers of strangers must not
            "forwarded_allow_ips": "",
            "forwarder_headers": "",
            "secure_scheme_headers": {},
            "timeout": 120,
            "graceful_timeout": settings.drain_s,
            "loglevel": "warning",
            "proc_name": "thaw-gateway",
            "post_fork": _die_with_parent,
            "worker_exit": self._on_exit,
            "control_socket_disable": True,
        }
        for name, value in values.items():
            if name in self.cfg.settings:
                self.cfg.set(name, value)

    def load(self) -> Wsgi:
        """Runs in the worker."""
        sys.setswitchinterval(_SWITCH_S)
        lasting.guard(self._log)
        self._gateway = Gateway(self._settings, self._log, make_call)
        self._gateway.start()
        first_key.admit(self._gateway.keys, self._settings.first_key)
        app = create_app(self._gateway)
        gc.freeze()  # objects made so far stay: no collection needs to walk over them while a token waits
        return app

    def knows(self, authorization: str) -> bool:
        """Runs in the worker: whether the header's key is answered without the state server."""
        return self._gateway is not None and self._gateway.auth.knows(authorization)

    def known_namespace(self, authorization: str) -> Namespace | None:
        """Runs in the worker: returns the namespace of the header's key, if it was asked for lately."""
        return None if self._gateway is None else self._gateway.auth.known_namespace(authorization)

    def computing(self, namespace: Namespace | None) -> AbstractContextManager[None]:
        """Runs in the worker: the block is a request of that namespace."""
        return nullcontext() if self._gateway is None else self._gateway.processor.computing(namespace)

    def ends(self) -> None:
        """Runs in the worker when it takes no more connections."""
        if self._gateway is not None:
            self._gateway.held.end_all()

    def _on_exit(self, _arbiter: object, _worker: object) -> None:
        if self._gateway is not None:
            end_within(_LAST_WORDS_S, lambda: self._log.event("ends_unheard"))
            self._gateway.stop()


def _die_with_parent(_arbiter: object, _worker: object) -> None:
    """A killed master must not leave a worker that serves on alone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def bounds(settings: GatewaySettings) -> Bounds:
    """A thread may need a descriptor besides that of its client."""
    left = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - settings.threads - _OTHER_DESCRIPTORS
    return Bounds(
        head_s=settings.head_s,
        body_s=settings.head_s,
        line_s=settings.head_s,
        rate=settings.client_rate,
        answer_s=settings.answer_s,
        connections=max(_OTHER_DESCRIPTORS, min(settings.connections, left)),
        per_address=settings.per_address,
        body_bytes=settings.body_bytes,
        answer_bytes=settings.answer_bytes,
    )


def check(settings: GatewaySettings) -> None:
    """Raises SettingError."""
    first_key.check(settings.first_key)
    policy_of(settings.models)
    if settings.body_bytes < settings.longest_body:
        raise SettingError(
            f"THAW_GATEWAY_BODY_BYTES={settings.body_bytes} is less than one body may have: {settings.longest_body}",
            hint="raise it, or lower THAW_CODE_BYTES, THAW_LLM_PAYLOAD_BYTES or THAW_PAYLOAD_BYTES",
        )
    if settings.client_rate <= 0:
        raise SettingError("THAW_GATEWAY_CLIENT_RATE must be above 0", hint="it is a rate in bytes a second")
    if settings.driver == "process" and not settings.is_on_loopback:
        raise SettingError(
            f"THAW_GATEWAY_BIND={settings.bind!r} is open to others, and THAW_DRIVER=process confines no function",
            hint="bind to 127.0.0.1, or use THAW_DRIVER=docker",
        )


def main() -> None:
    log = Log("gateway")
    try:
        settings = load(GatewaySettings)
        check(settings)
    except ThawError as e:
        sys.exit(f"thaw-gateway: {e.message}\n  {e.hint}")
    descriptors.raise_limit()
    threading.stack_size(_STACK_BYTES)
    _Server(settings, log).run()


if __name__ == "__main__":
    main()
