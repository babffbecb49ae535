"""``thaw-fetchd``: runs until SIGTERM or SIGINT."""

from __future__ import annotations

import resource
import signal
import sys
import threading

from fetchd.daemon import Daemon
from fetchd.settings import FetchdSettings
from thaw.errors import ThawError
from thaw.logs import Log
from thaw.settings import load


def main() -> None:
    log = Log("fetchd")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        settings = load(FetchdSettings)
        _raise_descriptor_limit()
        daemon = Daemon(settings, log.bind(host_id=settings.host_id))
    except ThawError as e:
        log.event("start_failed", error=e.message, hint=e.hint)
        sys.exit(1)
    log.event("ready", socket=settings.socket, host_id=settings.host_id)
    stop.wait()
    daemon.stop()
    log.event("stopped")


def _raise_descriptor_limit() -> None:
    """A large pool has more slabs than the usual 1,024 descriptors."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main()
