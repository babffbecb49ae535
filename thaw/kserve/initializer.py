"""``python -m thaw.kserve.initializer SRC DEST [SRC DEST …]``: the storage initializer for ``thaw://NAME``.

KServe runs it as the init container of a model server's pod, with the model's URI and the directory that the server
reads.  It gets the files from the model port of its node.  If a model cannot be had, it exits with status 1, and its
last line on stderr is the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from thaw.errors import BadRequest, ThawError
from thaw.kserve.download import Download
from thaw.kserve.model_port import ModelPortClient
from thaw.kserve.settings import InitializerSettings
from thaw.logs import Log
from thaw.settings import load

_SCHEME: Final = "thaw://"


def pairs(arguments: Sequence[str]) -> list[tuple[str, Path]]:
    """The names of the models, and where each belongs.  Raises BadRequest for a URI of another scheme."""
    if not arguments or len(arguments) % 2:
        raise BadRequest("give a URI and a directory, or several pairs of both", hint="thaw://NAME /mnt/models")
    found = []
    for uri, directory in zip(arguments[::2], arguments[1::2], strict=True):
        if not uri.startswith(_SCHEME) or not uri.removeprefix(_SCHEME):
            raise BadRequest(f"{uri!r:.200} is not a model of this platform", hint="write it as thaw://NAME")
        found.append((uri.removeprefix(_SCHEME), Path(directory)))
    return found


def main() -> None:
    log = Log("initializer")
    try:
        wanted = pairs(sys.argv[1:])
        settings = load(InitializerSettings)
        port = ModelPortClient(settings.url, settings.key)
        for name, directory in wanted:
            listing = Download(port, name, directory, settings.patience_s, log).run()
            log.event("ready", model=name, version=listing.version, verified=listing.verified, path=str(directory))
    except ThawError as e:
        sys.exit(f"storage initializer: {e.message}" + (f"; {e.hint}" if e.hint else ""))
    except OSError as e:
        sys.exit(f"storage initializer: {e.filename or 'the directory'} cannot be written: {e.strerror}")


if __name__ == "__main__":
    main()
