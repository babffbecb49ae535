"""The container's main process.  It serves HTTP/1.1 on a unix socket and handles text; the engine process computes.

``POST /init`` {"value": LlmInit}, ``POST /preflight`` of the same value (would that /init succeed?), ``POST /run``
{"value": LlmRun, activation_id, deadline …}, ``GET /health``, and for a stage of a pipeline ``POST /consolidate``
(become a worker) and ``GET`` of the same (wait for it again).  ``POST /adapter`` loads an adapter
(relay/protocol/adapter_messages.py), and ``GET /adapters`` names those that are loaded.  The answer to a run is a
chunked stream of frames (u32-LE length + one JSON message); the gateway turns them into the format that the client
asked for.  This process imports neither torch nor vLLM, so it answers while the engine process loads them.
"""

from __future__ import annotations

import json
import os
import socketserver
import struct
from collections.abc import Callable, Iterable
from typing import Any

from relay.clients import http11
from relay.clients.channel import Channel
from relay.protocol import messages
from relay.protocol.adapter_messages import ADAPTER_HEADER, decoded
from relay.protocol.messages import ConsolidateReply, LlmInit, RunFailed, RunToken, RunVectors
from thaw import wire
from thaw.errors import BadRequest, NotFound, PlatformError, ProtocolError, ThawError, from_info
from thaw.logs import Log, print_traceback
from thaw.process import lasting
from thaw.process.hangup import HangupWatcher
from thaw_runtime.engine.link import EngineLink
from thaw_runtime.llm.consolidation import Outcome
from thaw_runtime.llm.container import LlmContainer
from thaw_runtime.llm.runs import RunMessage

STREAM_TYPE = "application/x-thaw-stream"
MAX_BODY_BYTES = 64 * 1024 * 1024  # the gateway's own limit is far below
EXIT_ENGINE_LOST = 70
EXIT_KILLED = 128
"""As in a shell, the exit status of a container is this plus the number of the signal that killed its engine."""
TELL_DEADLINE_S = 2.0
_STREAM_HEAD = (f"HTTP/1.1 200 OK\r\nContent-Type: {STREAM_TYPE}\r\nTransfer-Encoding: chunked\r\n\r\n").encode()
_LAST_CHUNK = b"0\r\n\r\n"

log = Log("runtime-proxy")


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 1024
    container: LlmContainer
    hangups: HangupWatcher


class Handler(http11.Handler):
    server: _Server

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply(200, self.server.container.health())
        elif self.path == "/consolidate":
            self._answer(lambda: self._consolidated(self.server.container.consolidation.wait()))
        elif self.path == "/adapters":
            self._reply(200, {"names": self.server.container.adapters.names()})
        else:
            self._refuse(NotFound(f"no {self.path}"))

    def do_POST(self) -> None:
        self._answer(self._load_adapter if self.path == "/adapter" else lambda: self._post(self._body()))

    def _answer(self, answer: Callable[[], None]) -> None:
        with self.server.container.answering():
            try:
                answer()
            except ThawError as e:
                self._refuse(e)
            except OSError:
                self.close_connection = True  # the client has closed the connection and gets no answer
            except Exception as e:  # noqa: BLE001  an answer that breaks off means a lost container: it is retried
                self._refuse(_unforeseen(e))

    def _post(self, body: dict[str, Any]) -> None:
        if self.path == "/init":
            self._init(body)
        elif self.path == "/preflight":
            self._reply(200, self.server.container.preflight(_init_of(body)))
        elif self.path == "/run":
            self._run(body)
        elif self.path == "/consolidate":
            self._consolidated(self.server.container.consolidation.begin())
        else:
            raise NotFound(f"no {self.path}")

    def _load_adapter(self) -> None:
        self.close_connection = True  # the length itself may be wrong
        self.server.container.adapters.load(self.headers, self.rfile)  # type: ignore[arg-type]
        self._reply(200, {"ok": True})

    def _body(self) -> dict[str, Any]:
        length = int(self.headers.get("content-length") or 0)
        if not 0 <= length <= MAX_BODY_BYTES:
            self.close_connection = True
            raise BadRequest(f"a body of {length} bytes; at most {MAX_BODY_BYTES}")
        try:
            body = json.loads(self.rfile.read(length))
        except ValueError as e:
            raise BadRequest(f"the body is not JSON: {e}") from e
        if not isinstance(body, dict):
            raise BadRequest("the body is not a JSON object")
        return body

    def _init(self, body: dict[str, Any]) -> None:
        self._reply(200, self.server.container.init(_init_of(body)))

    def _run(self, body: dict[str, Any]) -> None:
        adapter = decoded(self.headers.get(ADAPTER_HEADER) or "")
        stream, deadline = self.server.container.run(body, adapter, int(self.headers.get("content-length") or 0))
        unwatch = self.server.hangups.watch(self.connection, stream.hang_up)
        try:
            self._stream(stream.messages(deadline))
        finally:
            unwatch()

    def _consolidated(self, outcome: Outcome) -> None:
        if isinstance(outcome, ConsolidateReply):
            self._reply(200, outcome)
        else:
            error = from_info(outcome.error)
            said = {"error": error.message, "info": error.info(), "events": outcome.events}
            self._reply(error.http_status, said)

    def _stream(self, batches: Iterable[list[RunMessage]]) -> None:
        """Send the head before the first token is there, so that it has already been forwarded when the token comes."""
        self.wfile.write(_STREAM_HEAD)
        ended = False
        try:
            for batch in batches:
                ended = bool(batch) and not isinstance(batch[-1], RunToken | RunVectors)
                self.wfile.write(_chunk(b"".join(map(_frame, batch)), last=ended))
        except OSError:
            raise
        except Exception as e:  # noqa: BLE001  as in do_POST, but the head has been sent
            ended = True
            error = e if isinstance(e, ThawError) else _unforeseen(e)
            self.wfile.write(_chunk(_frame(RunFailed(error.info())), last=True))
        if not ended:
            self.wfile.write(_LAST_CHUNK)

    def _refuse(self, error: ThawError) -> None:
        self._reply(error.http_status, {"error": error.message, "info": error.info()})

    def _reply(self, status: int, value: object) -> None:
        self.reply(status, wire.dumps(value))


def _init_of(body: dict[str, Any]) -> LlmInit:
    try:
        return wire.from_plain(LlmInit, body.get("value"), "$.value")
    except ProtocolError as e:
        raise BadRequest(e.message) from e


def _chunk(data: bytes, *, last: bool) -> bytes:
    chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""  # an empty chunk would end the body
    return chunk + _LAST_CHUNK if last else chunk


def _frame(message: RunMessage) -> bytes:
    data = json.dumps(messages.to_plain(message), separators=(",", ":"), ensure_ascii=False).encode()
    if len(data) > messages.MAX_RUN_MESSAGE_BYTES:
        said = f"what is known of this text takes {len(data)} bytes, and at most {messages.MAX_RUN_MESSAGE_BYTES}"
        return _frame(RunFailed(BadRequest(f"{said} can be had: send less of it, or ask for fewer logprobs").info()))
    return struct.pack("<I", len(data)) + data


def _unforeseen(error: Exception) -> PlatformError:
    print_traceback()
    return PlatformError(f"the container failed: {type(error).__name__}: {error}")


def serve(socket_path: str, descriptor_socket: str, channel: Channel, engine_pid: int) -> None:
    """Serve until the engine is lost, which ends this process: a container without an engine is of no use."""

    def lost(signal_number: int) -> None:
        container.engine_lost(TELL_DEADLINE_S)
        log.event("container_ends", reason="engine lost")
        os._exit(EXIT_KILLED + signal_number if signal_number else EXIT_ENGINE_LOST)

    lasting.guard(log)
    server = _bind(socket_path)
    link = EngineLink(channel, engine_pid)
    server.container = container = LlmContainer(link, descriptor_socket)
    server.hangups = HangupWatcher()
    server.hangups.start()
    link.listen(lost)
    server.serve_forever(poll_interval=3600)  # shutdown() is never called; its poll would wake an idle container


def _bind(socket_path: str) -> _Server:
    try:
        os.unlink(socket_path)
    except FileNotFoundError:
        pass
    return _Server(socket_path, Handler)
