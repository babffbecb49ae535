"""The real fetchd in a process of its own, controlled over its control socket."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

from bench._common import PYTHON, Program, cpu_seconds, python_env, start
from bench._sample import Sample
from relay.clients.channel import Channel
from relay.protocol.messages import (
    FetchCancel,
    FetchDone,
    FetchStart,
    FetchStarted,
    FetchWait,
    Inspect,
    Inspected,
    Refused,
    from_plain,
    to_plain,
)
from thaw.dev.links import inside
from thaw.errors import from_info
from thaw.ids import GroupId
from thaw.model import FileRange, ModelFacts
from thaw.plan import PlanModel

_DEADLINE_S = 300.0
_SETTLE_S, _LOOK_S, _IDLE_S = 5.0, 0.05, 0.002


class Fetchd:
    """``retain`` is off, so no fetch finds the bytes of an earlier one.  Use it as a context manager."""

    def __init__(self, work: Path, pool_mb: int, *, connections: int = 4, namespace: str = "", **env: str) -> None:
        socket = work / "fetchd.sock"
        settings = python_env(
            THAW_FETCHD_SOCKET=str(socket),
            THAW_FETCHD_DOORS=str(work / "doors"),
            THAW_FETCHD_POOL_MB=str(pool_mb),
            THAW_FETCHD_RETAIN="false",
            THAW_FETCHD_FILE_ROOTS="/",
            THAW_FETCHD_ALLOW="127.0.0.1, 10.231.0.0/16",  # the origins of benchmarks
            THAW_FETCHD_CONNECTIONS=str(connections),
            **env,
        )
        command = [PYTHON, "-m", "fetchd.main"]
        self._program: Program = start(
            [*inside(namespace, tuple(command))] if namespace else command,
            work / "fetchd.log",
            '"event": "ready"',
            env=settings,
        )
        self._channel = Channel.connect(str(socket), timeout_s=_DEADLINE_S)
        self._groups = (GroupId(f"bench-{i}") for i in itertools.count())

    def __enter__(self) -> Fetchd:
        return self

    def __exit__(self, *_: Any) -> None:
        self._channel.close()
        self._program.stop()

    @property
    def pid(self) -> int:
        return self._program.pid

    def ask(self, message: Any) -> Any:
        self._channel.send(to_plain(message))
        answer = from_plain(self._channel.receive()[0])
        if isinstance(answer, Refused):
            raise from_info(answer.error)
        return answer

    def inspect(self, uri: str) -> ModelFacts:
        answer = self.ask(Inspect(uri))
        assert isinstance(answer, Inspected)
        return answer.facts

    def fetch(self, facts: ModelFacts, ranges: tuple[FileRange, ...]) -> Sample:
        """Measure from the request until the last byte has arrived and is checked.  Then drop the bytes again."""
        group = next(self._groups)
        model = PlanModel(facts.uri, facts.sha256, facts.etag, facts.n_bytes)
        cpu, began = cpu_seconds(self.pid), time.monotonic()
        started = self.ask(FetchStart(group, 0, 1, model, ranges))
        done = self.ask(FetchWait(group, 0))
        seconds, cpu = time.monotonic() - began, cpu_seconds(self.pid) - cpu
        assert isinstance(started, FetchStarted)
        assert isinstance(done, FetchDone)
        if started.resident or done.fetched_bytes < facts.n_bytes:
            raise SystemExit(f"fetchd had {facts.n_bytes - done.fetched_bytes} bytes already: nothing was measured")
        self.ask(FetchCancel(group, 1))
        self.settle()
        return Sample(seconds, cpu, done.fetched_bytes)

    def settle(self) -> None:
        """Wait until fetchd has zeroed the dropped slabs, so that the next competitor has the machine to itself."""
        before, end = -1.0, time.monotonic() + _SETTLE_S
        while (now := cpu_seconds(self.pid)) - before > _IDLE_S and time.monotonic() < end:
            before = now
            time.sleep(_LOOK_S)
