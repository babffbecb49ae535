"""A vLLM pipeline in processes of its own.  The test's process calls its stage 0 like any other engine.

``python remote_engine.py --fd N RELAY_URL MODEL_DIR N_STAGES DIRECTORY`` imports vLLM, forks the followers, and becomes
stage 0.  Calls and replies are control frames on the inherited socket, and events are those of
thaw_runtime/engine/wire.py.
"""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from relay.clients.channel import Channel, ChannelClosed
from relay.protocol.messages import LlmInit
from tests.thaw_runtime.conftest import ROOT
from thaw.errors import ModelUnsupported
from thaw_runtime.engine.protocol import ConsolidationEnded, Emit, EngineRequest, EngineStarted, Event
from thaw_runtime.engine.wire import Events, Submit, decode, encode
from thaw_runtime.weights.readable_segment import Segment

CALL_S = 120.0


class RemoteEngine:
    """See thaw_runtime.engine.protocol.Engine.  ``start`` ignores its arguments: the other process makes its own."""

    def __init__(self, emit: Emit, url: str, model: Path, n_stages: int, directory: Path) -> None:
        self._emit = emit
        self._arguments = [url, str(model), str(n_stages), str(directory)]
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def start(self, stage_plan: LlmInit, segment: Segment) -> EngineStarted:
        ours, theirs = socket.socketpair()
        env = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'runtime-python'}")
        command = [sys.executable, "-m", "tests.thaw_runtime.remote_engine", "--fd", str(theirs.fileno())]
        self._process = subprocess.Popen([*command, *self._arguments], pass_fds=[theirs.fileno()], env=env, cwd=ROOT)
        theirs.close()
        self._channel = Channel(ours)
        self._channel.set_timeout(None)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return EngineStarted(max_model_len=self._call("max_model_len"))

    def submit(self, request: EngineRequest) -> None:
        self._call("submit", encode(Submit(request)))

    def abort(self, request_id: str) -> None:
        self._call("abort", request_id)

    def requests(self) -> tuple[str, ...]:
        return tuple(self._call("requests"))

    def consolidate(self, ended: Callable[[ConsolidationEnded], None]) -> None:
        ended(ModelUnsupported("this test's engine stays a pipeline").info())

    def drain(self, deadline_s: float) -> bool:
        return bool(self._call("drain", deadline_s))

    def memory(self) -> Mapping[str, int]:
        found: Mapping[str, int] = self._call("memory")
        return found

    def stop(self) -> None:
        self._call("stop")

    def join(self) -> None:
        self._call("join")

    def close(self) -> int:
        """Close the channel, and return the process's exit status.  The process waits for its followers first."""
        self._channel.close()
        return self._process.wait(CALL_S)

    def _call(self, name: str, *args: Any) -> Any:
        self._channel.send({"call": name, "args": args})
        return self._replies.get(timeout=CALL_S)

    def _read(self) -> None:
        try:
            while True:
                plain, _ = self._channel.receive()
                if isinstance(plain, dict) and "reply" in plain:
                    self._replies.put(plain["reply"])
                else:
                    message = decode(plain)
                    assert isinstance(message, Events)
                    self._emit(message.events)
        except (ChannelClosed, OSError):
            return


def main() -> None:
    from tests.thaw_runtime.pipeline_probe import Stage, fork, inits
    from thaw_runtime.engine.vllm import env as engine_env
    from thaw_runtime.engine.vllm.warm import warm_up

    channel = Channel(socket.socket(fileno=int(sys.argv[2])))
    channel.set_timeout(None)
    url, model, n_stages, directory = sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]), Path(sys.argv[6])
    engine_env.prepare(1)
    warm_up()
    plans = inits(model, n_stages, url, reserve=1 << 30, max_model_len=512)
    followers = [fork(lambda init=init: Stage(model, init, directory).engine.join()) for init in plans[1:]]
    stage = Stage(model, plans[0], directory)
    engine: Any = stage.engine

    def tell(events: Sequence[tuple[str, Event]]) -> None:
        channel.send(encode(Events(tuple(events))))

    engine._emit = tell
    calls = {"max_model_len": lambda: stage.started.max_model_len, "submit": lambda m: engine.submit(decode(m).request)}
    while True:
        try:
            asked: Any = channel.receive()[0]
        except (ChannelClosed, OSError):
            break
        value = calls.get(asked["call"], getattr(engine, asked["call"], None))(*asked["args"])
        channel.send({"reply": value})
    engine.stop()
    statuses = [os.waitpid(pid, 0)[1] for pid in followers]
    os._exit(1 if any(statuses) else 0)


if __name__ == "__main__":
    main()
