"""A container whose engine is the toy: the real proxy, and a process that serves the engine to it."""

from __future__ import annotations

import os
import socket

from relay.clients.channel import Channel
from tests import toy_engine
from thaw_runtime.llm import proxy


def main() -> None:
    ours, theirs = socket.socketpair()
    engine = os.fork()
    if not engine:
        ours.close()
        toy_engine.serve(theirs)
    theirs.close()
    print("engine", engine, flush=True)
    proxy.serve(os.environ["THAW_SOCKET"], os.environ["THAW_DOOR"], Channel(ours), engine)
