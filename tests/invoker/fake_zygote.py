"""A zygote without an engine: the same messages on the same socket.  Its containers run fake_llm.py."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

from relay.clients.channel import Channel
from thaw.errors import ProtocolError

LLM = str(Path(__file__).with_name("fake_llm.py"))


def main() -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[2])
    listener.listen()
    wake, wake_write = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
    while True:
        sock, _ = listener.accept()
        channel = Channel(sock)
        channel.send({"op": "ready", "pid": os.getpid(), "children": len(children)})
        try:
            _serve(channel, wake, children)
        except (ProtocolError, OSError):
            channel.close()


def _serve(channel: Channel, wake: int, children: dict[int, tuple[str, subprocess.Popen[bytes]]]) -> None:
    poll = select.poll()
    poll.register(channel.sock, select.POLLIN)
    poll.register(wake, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if wake in ready:
            os.read(wake, 100)
            for pid in [p for p, (_, process) in children.items() if process.poll() is not None]:
                name, process = children.pop(pid)
                channel.send(
                    {"op": "exited", "instance_id": name, "pid": pid, "status": process.returncode, "extra": {}}
                )
        if channel.sock.fileno() in ready:
            order, _ = channel.receive()
            with open(order["stdout"], "ab") as out, open(order["stderr"], "ab") as err:
                process = subprocess.Popen(
                    [sys.executable, LLM],
                    env={**os.environ, **order["env"]},
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            children[process.pid] = (order["instance_id"], process)
            channel.send({"op": "forked", "instance_id": order["instance_id"], "pid": process.pid})


if __name__ == "__main__":
    main()
