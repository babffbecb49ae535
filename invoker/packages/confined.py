"""Runs uv for the invoker, as a program of its own: within limits, as a user of its own, and never longer than its
parent.

It imports nothing of the platform: its user may not be able to read that.  Arguments: the user's id (0: stay who we
are), the bytes of the largest file, the seconds of CPU time, then the program and its arguments.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
_MEMORY_BYTES = 4 << 30
"""Address space: uv maps the wheels that it unpacks."""
_FILES = 512


def main() -> None:
    uid, file_bytes, cpu_s = (int(word) for word in sys.argv[1:4])
    for kind, limit in (
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_NOFILE, min(_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    os.umask(0o022)
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    # after the change of user, which resets it
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.execve(sys.argv[4], sys.argv[4:], os.environ)  # noqa: S606  the caller gives the whole environment


main()
