"""One process that has imported vLLM, from which all platforms of a test process fork their hosts' zygotes.

The import takes ten seconds of a core, and a platform of the tests runs for a few seconds.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.forked import end_with_parent


@cache
def zygote_parent() -> str:
    """Start the process, and return its socket.  It imports while the first platform starts, and ends with this one."""
    scratch = tempfile.TemporaryDirectory(prefix="thaw-imported-")
    path = Path(scratch.name) / "z.sock"
    with (Path(scratch.name) / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "thaw_runtime.start.zygote", "--socket", path],
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TMPDIR": scratch.name},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=end_with_parent,
        )

    def end() -> None:
        process.kill()
        process.wait(30)
        scratch.cleanup()

    atexit.register(end)
    return str(path)
