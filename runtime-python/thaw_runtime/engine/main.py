"""The engine process: it runs one stage on token ids, and takes commands from the proxy over an inherited socket.

The reader thread takes commands, and the engine's own thread computes.  When the proxy ends, this process ends too.
When the engine breaks, its requests fail first; then the process ends, and the proxy sees a lost worker.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NoReturn

from relay.clients.channel import Channel, ChannelClosed
from relay.clients.fetch import DescriptorClient
from relay.thread_account import ThreadAccount
from thaw.errors import BadRequest, ErrorInfo, PlatformError, ProtocolError, ThawError
from thaw.logs import Log, flush_output, print_traceback
from thaw.process import lasting
from thaw.tracing.trace import Phase
from thaw_runtime.engine.library import EngineLibrary
from thaw_runtime.engine.protocol import (
    GRANT_DEADLINE_S,
    AdapterFiles,
    ConsolidationEnded,
    Engine,
    EngineStarted,
    Event,
    Failed,
    MakeEngine,
)
from thaw_runtime.engine.registry import engine_of_process
from thaw_runtime.engine.wire import (
    Abort,
    AdapterEnded,
    Consolidate,
    ConsolidationDone,
    Embed,
    EngineCheck,
    EngineChecked,
    EngineReady,
    EngineStart,
    EngineStartFailed,
    Events,
    LoadAdapter,
    Message,
    Submit,
    decode,
    encode,
)
from thaw_runtime.process.memory_bound import bound_memory
from thaw_runtime.process.start_trace import StartTrace
from thaw_runtime.weights import parameter_manager
from thaw_runtime.weights.readable_segment import Segment

log = Log("runtime-engine")

CHECK_BYTES: Final = 512 << 20
"""The bytes that a check may allocate in addition to the model, whose weights stay empty
(invoker/containers/preflight.py books them)."""
_MOST_GROWN: Final = 2
"""The largest growth of weights in memory: a number stored in two bytes may take four."""
EXIT_LOST_PROXY = 0
EXIT_BROKEN = 70  # EX_SOFTWARE


def serve(channel: Channel, make_engine: Callable[[], MakeEngine], born_ns: int | None = None) -> int:
    """Obey the proxy until it closes.  ``make_engine`` does the heavy import while the start command is awaited.
    ``born_ns`` is the time on the monotonic clock when the proxy began this process.

    A start runs on a thread of its own, so a proxy that dies in the middle of it is seen at once and not after the last
    byte.  The caller then ends the process, whatever the start is waiting for.
    """
    lasting.guard(Log("engine"))
    use_own_tmp()
    parameter_manager.start()  # before any heavy import, because a thread makes a CUDA context meanwhile
    libraries = _Importing(make_engine, born_ns)
    channel.set_timeout(None)
    start = _Start(channel, libraries)
    try:
        while True:
            plain, fds = channel.receive()
            message = decode(plain)
            if isinstance(message, EngineStart):
                start.begin(message)
            elif isinstance(message, EngineCheck):
                start.check(message)
            elif start.engine is None:
                raise PlatformError(f"{type(message).__name__} before the engine was started")
            elif isinstance(message, Submit | Embed):
                start.engine.submit(message.request)
            elif isinstance(message, Abort):
                start.engine.abort(message.request_id)
            elif isinstance(message, Consolidate):
                _consolidate(channel, start.engine)
            elif isinstance(message, LoadAdapter):
                _load_adapter(channel, start.engine, message, fds)
    except (ChannelClosed, OSError):
        if start.engine is not None:
            start.engine.stop()  # tells the other stages of a pipeline now; otherwise they would wait for this one
        return EXIT_LOST_PROXY


def _load_adapter(channel: Channel, engine: Engine, message: LoadAdapter, fds: list[int]) -> None:
    def ended(error: ErrorInfo | None) -> None:
        _tell(channel, AdapterEnded(message.number, error))

    (weights_fd,) = fds
    engine.load_adapter(AdapterFiles(message.name, message.replaces, message.config.encode(), weights_fd), ended)


def _consolidate(channel: Channel, engine: Engine) -> None:
    """Begin to become one worker.  The pipeline goes on whatever happens here, so no error of it ends the process."""

    def ended(outcome: ConsolidationEnded) -> None:
        _tell(channel, ConsolidationDone(outcome))

    try:
        engine.consolidate(ended)
    except ThawError as e:
        ended(e.info())
    except Exception as e:  # noqa: BLE001  the requests of this engine must not fail with an attempt to consolidate
        print_traceback()
        ended(PlatformError(f"the consolidation failed on a bug: {type(e).__name__}: {e}").info())


def use_own_tmp() -> None:
    """Put temporary files where the container's driver says (TMPDIR), even if the zygote has chosen another place."""
    tempfile.tempdir = None


class _Importing:
    """The heavy import, which begins at once.  A stem cell (an idle container) has done it before, without a phase.

    The phase begins at ``born_ns``: it includes the start of the interpreter and this file's own imports."""

    def __init__(self, make_engine: Callable[[], MakeEngine], born_ns: int | None) -> None:
        """Called on the process's first thread, whose account holds everything that the process has spent so far."""
        self._make, self._born_ns, self._spent = make_engine, born_ns, ThreadAccount().spent()
        self._trace = StartTrace()
        self._made: MakeEngine | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="libraries")
        self._thread.start()

    def _run(self) -> None:
        n_before = len(sys.modules)
        try:
            with self._trace.phase(Phase.LIBRARIES_BEGIN):
                self._made = self._make()
        except Exception as e:  # noqa: BLE001  result() raises it, and its caller tells the proxy
            print_traceback()
            self._error = e
        self._imported = len(sys.modules) > n_before

    def result(self, trace: StartTrace) -> MakeEngine:
        self._thread.join()
        if isinstance(self._error, ThawError):
            raise self._error
        if self._made is None:
            raise PlatformError(f"the engine's libraries cannot be imported: {self._error}")
        if self._imported:
            if self._born_ns is not None:
                self._trace.began_at(self._born_ns, self._spent)
            trace.adopt(self._trace.events)
        return self._made


class _Start:
    """One start, from the command to an engine that accepts requests.  The process ends with the engine."""

    def __init__(self, channel: Channel, libraries: _Importing) -> None:
        self.engine: Engine | None = None
        self._mapped: Segment | None = None
        self._channel = channel
        self._libraries = libraries

    def begin(self, command: EngineStart) -> None:
        threading.Thread(target=self._run, args=(command,), name="start", daemon=True).start()

    def check(self, command: EngineCheck) -> None:
        threading.Thread(target=self._check, args=(command,), name="check", daemon=True).start()

    def _check(self, command: EngineCheck) -> None:
        try:
            engine = self._libraries.result(StartTrace())(lambda _: None)
            segment = self._segment(command.descriptor_socket)
            bound_memory(CHECK_BYTES + _MOST_GROWN * sum(s.weight_bytes for s in command.init.stages))
            checked = engine.check(command.init, segment)
        except ThawError as e:
            _tell(self._channel, EngineChecked(None, e.info()))
        except Exception as e:  # noqa: BLE001  the edge of a thread: otherwise the proxy would wait forever
            print_traceback()
            error = PlatformError(f"the check failed on a bug: {type(e).__name__}: {e}")
            _tell(self._channel, EngineChecked(None, error.info()))
        else:
            _tell(self._channel, EngineChecked(checked))

    def _segment(self, descriptor_socket: str) -> Segment:
        # the connection stays open until the process ends, as the sign that it lives
        self._descriptors = DescriptorClient.connect(descriptor_socket)
        return parameter_manager.open_segment(*self._descriptors.granted(deadline_s=GRANT_DEADLINE_S))

    def _run(self, command: EngineStart) -> None:
        trace = StartTrace(group_id=command.init.group_id, stage=command.init.stage, host=command.init.host)
        try:
            engine, started = self._engine(command, trace)
        except ThawError as e:
            _tell(self._channel, EngineStartFailed(e.info()))
            _exit(EXIT_BROKEN)
        except Exception:  # noqa: BLE001  the edge of a thread: otherwise the proxy would wait forever
            print_traceback()
            _exit(EXIT_BROKEN)
        trace.extend(started.events)
        self.engine = engine
        _tell(self._channel, EngineReady(replace(started, events=trace.events)))
        threading.Thread(target=self._unmap_with_fetchd, name="fetchd-end", daemon=True).start()
        engine.join()
        _exit(EXIT_BROKEN)

    def _unmap_with_fetchd(self) -> None:
        """Unmap the segment when fetchd ends, so that the next fetchd's pool has room on the host.  A load in the
        background keeps the mapping that it reads."""
        self._descriptors.wait_closed()
        self._mapped = None

    def _engine(self, command: EngineStart, trace: StartTrace) -> tuple[Engine, EngineStarted]:
        def emit(events: Sequence[tuple[str, Event]]) -> None:
            for request_id in tell_events(self._channel, events):
                engine.abort(request_id)

        with trace.phase(Phase.CONTEXT_BEGIN):
            self._mapped = segment = self._segment(command.descriptor_socket)
        engine = self._libraries.result(trace)(emit)
        return engine, engine.start(command.init, segment)


def _exit(status: int) -> NoReturn:
    """End at once: the engine's exit handlers take a second and free nothing that the kernel does not free."""
    flush_output()
    os._exit(status)


def tell_events(channel: Channel, events: Sequence[tuple[str, Event]]) -> list[str]:
    """Tell the proxy, in several messages where one would be too large for a frame.  An event that alone is too large
    (the logprobs of a long prompt) fails its request and no other.  Return the requests that failed so."""
    try:
        _tell(channel, Events(tuple(events)))
    except ProtocolError:
        if len(events) > 1:
            half = len(events) // 2
            return [*tell_events(channel, events[:half]), *tell_events(channel, events[half:])]
        request_id, _ = events[0]
        error = BadRequest("What is asked of the prompt does not fit in a message: ask for fewer logprobs.")
        _tell(channel, Events(((request_id, Failed(error.info())),)))
        return [request_id]
    return []


def _tell(channel: Channel, message: Message) -> None:
    try:
        channel.send(encode(message))
    except OSError:
        os._exit(EXIT_LOST_PROXY)  # the proxy has ended, and the reader thread is about to see it too


def load_cold(library: EngineLibrary) -> MakeEngine:
    library.prepare()
    return library.load()


def load_warm(library: EngineLibrary) -> MakeEngine:
    """The heavy import of a stem cell that is a container.  It also imports the modules that a zygote imports."""
    library.prepare()
    library.warm_up()
    log.event("ready", pid=os.getpid())
    return library.load()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket to the proxy")
    parser.add_argument("--born-ns", type=int, help="when this process was begun, on the monotonic clock")
    parser.add_argument("--warm", action="store_true", help="import what any start may need")
    args = parser.parse_args()
    load = partial(load_warm if args.warm else load_cold, engine_of_process())
    _exit(serve(Channel(socket.socket(fileno=args.fd)), load, args.born_ns))


if __name__ == "__main__":
    main()
