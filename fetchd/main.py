"""``thaw-fetchd``: runs until SIGTERM or SIGINT."""

from __future__ import annotations

import sys

from fetchd.daemon import Daemon
from fetchd.settings import FetchdSettings
from thaw.errors import ThawError
from thaw.logs import Log
from thaw.process import descriptors, lasting
from thaw.process.ending import Ending
from thaw.settings import load


def main() -> None:
    log = Log("fetchd")
    lasting.guard(log)
    ending = Ending()
    try:
        settings = load(FetchdSettings)
        descriptors.raise_limit()  # every slab needs a descriptor
        daemon = Daemon(settings, log.bind(host_id=settings.host_id))
    except ThawError as e:
        log.event("start_failed", error=e.message, hint=e.hint)
        sys.exit(1)
    log.event("ready", socket=settings.socket, host_id=settings.host_id)
    ending.wait()
    daemon.stop()
    log.event("stopped")


if __name__ == "__main__":
    main()
