"""``python -m thaw_runtime.llm.main``: the cold path.  The proxy answers at once while its engine imports.

Environment: THAW_SOCKET (where to listen), THAW_DOOR (fetchd's socket for this container), THAW_WARM ("on": the
container is a stem cell, and imports already what any start would otherwise wait for), THAW_LLM_ENGINE (the engine's
name in engine/registry.py).
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from relay.clients.channel import Channel
from thaw.settings import SettingError, load, setting
from thaw_runtime.engine.registry import engine_of_process
from thaw_runtime.process.signals import exit_on_sigterm


@dataclass(frozen=True, slots=True)
class ContainerSettings:
    socket: str = setting("THAW_SOCKET", "the unix socket to listen on")
    descriptor_socket: str = setting("THAW_DOOR", "fetchd's socket of this container")
    warm: str = setting("THAW_WARM", "on: a stem cell, which imports what any start may need", "")


def read_settings() -> ContainerSettings:
    try:
        return load(ContainerSettings)
    except SettingError as e:
        raise SystemExit(f"{e.message}; {e.hint}") from e


def spawn_engine(*, warm: bool = False) -> tuple[Channel, int]:
    """Start an interpreter that imports the engine; return its socket and pid.  It ends when the socket closes."""
    ours, theirs = socket.socketpair()
    engine_of_process().prepare()  # the new process inherits the environment
    command = [sys.executable, "-m", "thaw_runtime.engine.main", "--fd", str(theirs.fileno())]
    command += ["--warm"] if warm else ["--born-ns", str(time.monotonic_ns())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    return Channel(ours), process.pid


def main() -> None:
    settings = read_settings()
    channel, pid = spawn_engine(warm=settings.warm == "on")
    exit_on_sigterm()  # the engine ends by itself, because its socket closes
    from thaw_runtime.llm import proxy  # imported while the engine's process starts, which takes longer

    proxy.serve(settings.socket, settings.descriptor_socket, channel, pid)


if __name__ == "__main__":
    main()
