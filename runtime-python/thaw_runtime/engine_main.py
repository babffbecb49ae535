"""The engine process: one stage, token ids only, commanded by the proxy over an inherited socket.

The reader thread takes commands, the engine's own thread steps.  When the proxy goes away, so does this process;
when the engine breaks, its requests fail first and then the process ends, which the proxy takes as a lost worker.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from relay.channel import Channel, ChannelClosed
from relay.fetch_client import DoorClient
from thaw.errors import PlatformError, ThawError
from thaw.trace import Phase
from thaw_runtime import engine_env
from thaw_runtime.engine import GRANT_DEADLINE_S, Emit, Engine, EngineStarted, Event
from thaw_runtime.engine_wire import (
    Abort,
    EngineReady,
    EngineStart,
    EngineStartFailed,
    Events,
    Message,
    Submit,
    decode,
    encode,
)
from thaw_runtime.start_trace import StartTrace

EXIT_LOST_PROXY = 0
EXIT_BROKEN = 70  # EX_SOFTWARE

MakeEngine = Callable[[Emit], Engine]


def serve(channel: Channel, make_engine: Callable[[], MakeEngine]) -> int:
    """Obey the proxy until it closes.  ``make_engine`` does the heavy import, while the start command is awaited."""
    libraries = _Importing(make_engine)
    channel.set_timeout(None)
    engine: Engine | None = None
    try:
        while True:
            message = decode(channel.receive()[0])
            if isinstance(message, EngineStart):
                engine = _start(channel, message, libraries)
                if engine is None:
                    return EXIT_BROKEN
            elif engine is None:
                raise PlatformError(f"{type(message).__name__} before the engine was started")
            elif isinstance(message, Submit):
                engine.submit(message.request)
            elif isinstance(message, Abort):
                engine.abort(message.request_id)
    except ChannelClosed:
        return EXIT_LOST_PROXY


class _Importing:
    """The heavy import, begun at once.  In a stem cell it has happened before and takes no time."""

    def __init__(self, make_engine: Callable[[], MakeEngine]) -> None:
        self._make = make_engine
        self._trace = StartTrace()
        self._made: MakeEngine | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="libraries")
        self._thread.start()

    def _run(self) -> None:
        began, cpu = time.monotonic(), time.thread_time()
        try:
            with self._trace.phase(Phase.LIBRARIES_BEGIN) as notes:
                self._made = self._make()
                notes.attrs |= {"cpu_s": round(time.thread_time() - cpu, 3)}
        except Exception as e:  # noqa: BLE001  whatever an import raises is told to the proxy
            traceback.print_exc()
            self._error = e
        self._slow = time.monotonic() - began > 0.01

    def result(self, trace: StartTrace) -> MakeEngine:
        self._thread.join()
        if self._made is None:
            raise PlatformError(f"the engine's libraries cannot be imported: {self._error}")
        if self._slow:
            trace.adopt(self._trace.events)
        return self._made


def _start(channel: Channel, command: EngineStart, libraries: _Importing) -> Engine | None:
    trace = StartTrace(group_id=command.init.group_id, stage=command.init.stage, host=command.init.host)

    def emit(events: Sequence[tuple[str, Event]]) -> None:
        _tell(channel, Events(tuple(events)))

    try:
        door = DoorClient.connect(command.door)  # open for as long as the process maps the segment: its life
        segment = door.segment(deadline_s=GRANT_DEADLINE_S)
        engine = libraries.result(trace)(emit)
        started = engine.start(command.init, segment)
    except ThawError as e:
        _tell(channel, EngineStartFailed(e.info()))
        return None
    trace.extend(started.events)
    _tell(channel, EngineReady(EngineStarted(trace.events, started.memory, started.max_model_len)))
    threading.Thread(target=_end_with, args=(engine,), name="engine-end", daemon=True).start()
    return engine


def _end_with(engine: Engine) -> None:
    engine.join()
    _exit(EXIT_BROKEN)


def _exit(status: int) -> NoReturn:
    """At once: vLLM's exit handlers take a second and free nothing the kernel does not."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _tell(channel: Channel, message: Message) -> None:
    try:
        channel.send(encode(message))
    except OSError:
        os._exit(EXIT_LOST_PROXY)  # nobody is left to tell; the reader thread is about to see the same


def vllm() -> MakeEngine:
    engine_env.prepare()
    from thaw_runtime.vllm_engine import VllmEngine

    return VllmEngine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket to the proxy")
    args = parser.parse_args()
    status = serve(Channel(socket.socket(fileno=args.fd)), vllm)
    _exit(status)


if __name__ == "__main__":
    main()
