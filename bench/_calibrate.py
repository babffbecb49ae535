"""The constants of a start's bound, measured outside any measured start: a bare fork, import and copy.

The best of several rounds counts, as in the platform's own bound (docs/scheduling.md): a mean is not a bound.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from bench._common import PYTHON, cpu_seconds, python_env, start
from relay.clients.channel import Channel

_ROUNDS = 5
_IMPORT_S = 180.0
_COPY_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Constants:
    """``t_cc`` is the time from the order to fork the imported process until the fork's socket exists.  A CPU has no
    device context, so ``t_cu`` is 0.
    """

    t_cc: float
    t_l: float  # the time to import the engine; it is 0 for a stem cell, which has imported it already
    t_l_cpu_s: float
    copy_bytes_per_s: float  # shared memory → process memory, one thread

    def bound_s(self, n_bytes: int, link_bytes_per_s: float, t_p: float) -> float:
        """Eq. 5 for one stage from a stem cell.  ``t_p`` is the shortest warm answer to such a prompt."""
        return max(self.t_cc + n_bytes / self.copy_bytes_per_s, n_bytes / link_bytes_per_s) + t_p


def calibrate(work: Path) -> Constants:
    socket = work / "zygote.sock"
    began = time.monotonic()
    zygote = start(
        [PYTHON, "-m", "thaw_runtime.start.zygote", "--socket", str(socket)],
        work / "zygote.log",
        '"event": "ready"',
        env=python_env(),
        deadline_s=_IMPORT_S,
    )
    try:
        t_l, cpu = time.monotonic() - began, cpu_seconds(zygote.pid)
        channel = Channel.connect(str(socket))
        channel.receive()
        forks = [_fork(channel, work, i) for i in range(_ROUNDS)]
        channel.close()
    finally:
        zygote.stop()
    return Constants(min(forks), t_l, cpu, _copy_rate())


def _fork(channel: Channel, work: Path, number: int) -> float:
    """Seconds from the order until the container's socket exists."""
    path, log = work / f"container-{number}.sock", work / f"container-{number}.log"
    log.touch()
    began = time.monotonic()
    channel.send(
        {
            "op": "fork",
            "instance_id": str(number),
            "stdout": str(log),
            "stderr": str(log),
            "env": {"THAW_SOCKET": str(path), "THAW_DOOR": ""},
        }
    )
    pid = int(channel.receive()[0]["pid"])
    while not path.exists() and time.monotonic() - began < 10:
        time.sleep(0.0005)  # shorter than the measured time; the whole wait for readiness takes at most 10 s
    seconds = time.monotonic() - began
    os.kill(pid, signal.SIGKILL)
    channel.receive()  # the message that the process exited
    return seconds


def _copy_rate() -> float:
    source, target = bytes(bytearray(os.urandom(4096)) * (_COPY_BYTES // 4096)), bytearray(_COPY_BYTES)
    rates = []
    for _ in range(_ROUNDS):
        began = time.monotonic()
        memoryview(target)[:] = source
        rates.append(_COPY_BYTES / (time.monotonic() - began))
    return max(rates)
