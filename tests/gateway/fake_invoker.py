"""An invoker's data port with a deterministic container: token i of an answer has id 100+i and the text ``w{i} ``."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import redis

from relay.protocol import messages
from relay.protocol.adapter_messages import ADAPTER_HEADER
from relay.protocol.messages import (
    ACTIVATION_HEADER,
    RunFailed,
    RunFinished,
    RunPrompt,
    RunToken,
    RunVectors,
    TokenLogprob,
)
from relay.state import bus
from relay.state.registry import Registry
from thaw.clock import wall_ms
from thaw.errors import InstanceBusy, ThawError
from thaw.host import Device, FetchReport, HostReport
from thaw.ids import ActionName, GroupId, HostId, InstanceId
from thaw.instance import InstanceRecord, InstanceState, StartMode


class FakeInvoker:
    """Tests set plain attributes to change its behaviour.  ``runs`` has the requests that it got."""

    def __init__(self, url: str, host: str = "h0") -> None:
        self.host = HostId(host)
        self.client = redis.Redis.from_url(url)
        self.registry = Registry(self.client)
        self.runs: list[dict[str, Any]] = []
        self.refusals: deque[ThawError] = deque()
        self.cut_after: deque[int] = deque()  # the next run's connection is cut after this many tokens
        self.pace: threading.Semaphore | None = None  # each token needs one release
        self.prefill_pace: threading.Semaphore | None = None  # each run that only computes its prompt needs one
        self.prompt_tokens = 3
        self.version = 1.0  # stands in each vector
        self.prompt: RunPrompt | None = None  # sent for each prompt
        self.adapter = ""  # the adapter that its runs report
        self.failures: deque[ThawError] = deque()  # the next runs fail with these, after their heads were sent
        self.function: Callable[[Any], tuple[int, Any]] = lambda value: (200, value)
        self.server: Callable[[], Iterator[Any]] | None = None
        """The messages of the answers of an image's server.  If they end without an end, the connection is cut."""
        self.log_lines: list[str] = []
        self.may_tell_logs = threading.Event()
        self.may_tell_logs.set()
        self.outputs: list[dict[str, Any]] = []  # the last output of its ended containers
        self.preflights: list[dict[str, Any]] = []  # the bodies that it got
        self.preflight: Callable[[], tuple[int, Any]] = lambda: (404, {"error": "no /preflight"})
        self.image: Callable[[str], tuple[int, Any]] = lambda name: (404, {"error": "no /image"})
        self.closed = threading.Semaphore(0)  # released once for each connection that broke during a run
        self.entered = threading.Semaphore(0)  # released once for each run that arrived
        self.running = 0
        self.frees_late = False  # a run that ended keeps its slot until a request was refused for that
        self._slots: dict[str, int] = {}  # the slots of each of its instances
        self._taken: Counter[str] = Counter()
        self._late: Counter[str] = Counter()
        self._token = ""
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()  # the connections of runs
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="fake-invoker", daemon=True).start()

    @property
    def token(self) -> str:
        """The hosts' token, which the gateway made when it started."""
        if not self._token:
            self._token = self.registry.host_token("unused")
        return self._token

    def ready(
        self,
        action: str,
        *,
        slots: int = 8,
        instance: str = "i0",
        version: str = "0.0.1",
        group: str = "a" * 32,
        stage: int = 0,
        n_stages: int = 1,
        model_version: str = "",
    ) -> InstanceRecord:
        self._slots[instance] = slots
        of_model = {"stage": stage, "n_stages": n_stages, "model_version": model_version}
        record = self._record(action, instance, version, group, InstanceState.READY, slots, init_ms=40, **of_model)
        self.registry.put_instance(record)
        return record

    def starting(self, action: str, *, instance: str = "i0", group: str = "a" * 32) -> InstanceRecord:
        """The record of an instance that the invoker is starting.  ``ready`` of the same instance ends the start."""
        record = self._record(action, instance, "0.0.1", group, InstanceState.STARTING, 0)
        self.registry.put_instance(record)
        return record

    def _record(
        self, action: str, instance: str, version: str, group: str, state: InstanceState, slots: int, **more: Any
    ) -> InstanceRecord:
        names = InstanceId(instance), self.host, ActionName(action), version, GroupId(group)
        return InstanceRecord(*names, state, self.address, slots, 0, "cpu", StartMode.COLD, **more)

    def report(self, *fetches: FetchReport, driver: str = "process") -> None:
        device = Device("cpu", "cpu", 10**9, 10**9)
        host = HostReport(self.host, "boot", self.address, (device,), 2, 10**8, "none", driver, 0, wall_ms())
        self.registry.report_host(replace(host, fetches=fetches))

    def gone(self, record: InstanceRecord, error: ThawError | None = None) -> None:
        info = None if error is None else error.info()
        self.registry.put_instance(replace(record, state=InstanceState.GONE, error=info))

    def start_failed(self, error: ThawError, *waiting: messages.DemandAdded) -> None:
        """End requests that wait for a start, as the scheduler does when it has failed."""
        named = tuple(demand.activation_id for demand in waiting)
        bus.publish(self.client, messages.StartFailed(waiting[0].action, named, error.info(), GroupId("b" * 32)))

    def wait_for_demand(self, count: int = 1, timeout_s: float = 60) -> list[messages.DemandAdded]:
        """Block on the event stream until ``count`` requests are waiting."""
        deadline, position = time.monotonic() + timeout_s, b"0-0"
        while len(found := self.registry.demand()) != count:
            assert time.monotonic() < deadline, f"{len(found)} requests wait, not {count}"
            reply: Any = self.client.xread({"thaw:events": position}, block=200)
            position = reply[0][1][-1][0] if reply else position
        return found

    def stop(self) -> None:
        if self._server.socket.fileno() < 0:
            return
        self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the server's thread, which looks twice a second itself
        self._server.shutdown()
        self._server.server_close()
        self.client.close()

    def drop_runs(self) -> None:
        """Break the connections of all runs, as if their containers were lost."""
        with self._lock:
            for connection in self._open:
                connection.shutdown(socket.SHUT_RDWR)

    def take_slot(self, instance: str) -> bool:
        with self._lock:
            if self._taken[instance] < self._slots.get(instance, 1000):
                self._taken[instance] += 1
                return True
            self._taken[instance] -= self._late.pop(instance, 0)
            return False

    def give_slot(self, instance: str) -> None:
        with self._lock:
            held = self._late if self.frees_late else self._taken
            held[instance] += 1 if self.frees_late else -1

    @contextlib.contextmanager
    def run(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            self.running += 1
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self.running -= 1
                self._open.discard(connection)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 2048

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A broken connection is part of the tests."""


def _handler(fake: FakeInvoker) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: Any) -> None: ...

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.headers.get("Authorization") != f"Bearer {fake.token}":
                self._json(401, {"error": "no"})
                return
            if self.path == "/logs":
                fake.may_tell_logs.wait(60)
                self._json(200, {"logs": [fake.log_lines for _ in body["runs"]]})
                return
            if self.path == "/output":
                self._json(200, {"outputs": [o for o in fake.outputs if o["action"] == body["action"]]})
                return
            if self.path == "/image":
                self._json(*fake.image(body["image"]))
                return
            if self.path == "/preflight":
                fake.preflights.append(body)
                self._json(*fake.preflight())
                return
            instance = self.path.split("/")[2]
            if fake.refusals:
                self._refuse(fake.refusals.popleft())
            elif not fake.take_slot(instance):
                self._refuse(InstanceBusy("all slots are taken"))
            else:
                named = {"header": self.headers.get(ACTIVATION_HEADER), "adapter": self.headers.get(ADAPTER_HEADER)}
                fake.runs.append({**body, "path": self.path, **named})
                fake.entered.release()
                with fake.run(self.connection):
                    try:
                        self._run(body["value"])
                    except OSError:
                        self.close_connection = True
                        fake.closed.release()
                    finally:
                        fake.give_slot(instance)

        def _refuse(self, error: ThawError) -> None:
            info = {"code": error.code, "message": error.message, "hint": ""}
            self._json(410 if error.code == "InstanceGone" else 429, {"error": error.message, "info": info})

        def _run(self, value: Any) -> None:
            takes_messages = "application/x-thaw-stream" in self.headers.get("Accept", "")
            if takes_messages and "endpoint" in value:
                self._stream(value)
            elif takes_messages and fake.server is not None:
                self._serve(fake.server())
            else:
                self._wait_for_pace()
                if fake.cut_after:
                    fake.cut_after.popleft()
                    self._cut()
                    return
                self._json(*fake.function(value))

        def _stream(self, run: dict[str, Any]) -> None:
            cut = fake.cut_after.popleft() if fake.cut_after else None
            self._stream_head()
            first = len((run.get("resume") or {}).get("output_token_ids", ()))
            if fake.failures:
                self._end(RunFailed(fake.failures.popleft().info()))
                return
            if run.get("prefill_only") and cut is None:
                self._wait_for_pace("prefill_pace")
                self._end(RunFinished("prefilled", fake.prompt_tokens, first))
                return
            if run["endpoint"] == "embeddings":
                self._embed(run["body"], cut)
                return
            count = run["body"].get("max_tokens") or run["body"].get("max_completion_tokens") or 5
            for i in range(first, count):
                if cut is not None and i - first >= cut:
                    self._cut()
                    return
                self._wait_for_pace()
                logprob = TokenLogprob(f"w{i} ", -0.5, ((f"w{i} ", -0.5),)) if run["body"].get("logprobs") else None
                adapter = fake.adapter if i == first else ""
                self._frame(RunToken(i, 100 + i, f"w{i} ", logprob, adapter=adapter))
            self._end(RunFinished("length", 3, count, prompt=fake.prompt))

        def _serve(self, answer: Iterator[Any]) -> None:
            self._stream_head()
            for message in answer:
                self._frame(message)
                if isinstance(message, RunFinished | RunFailed):
                    self.wfile.write(b"0\r\n\r\n")
                    return
            self._cut()

        def _cut(self) -> None:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

        def _end(self, message: Any) -> None:
            self._frame(message)
            self.wfile.write(b"0\r\n\r\n")

        def _stream_head(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/x-thaw-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()

        def _embed(self, body: Any, cut: int | None) -> None:
            """The vector of text i is (i, fake.version); the last texts come first."""
            one = isinstance(body["input"], str) or isinstance(body["input"][0], int)
            count = 1 if one else len(body["input"])
            for n, i in enumerate(reversed(range(count))):
                if n == cut:
                    self._cut()
                    return
                self._wait_for_pace()
                self._frame(RunVectors(((i, base64.b64encode(struct.pack("<2f", i, fake.version)).decode()),)))
            self._end(RunFinished("stop", 3 * count, 0))

        def _wait_for_pace(self, name: str = "pace") -> None:
            """Wait until the test allows the next token.  Raise ConnectionResetError if the peer closes meanwhile."""
            while (pace := getattr(fake, name)) is not None and not pace.acquire(timeout=0.02):
                self.connection.setblocking(False)
                try:
                    if self.connection.recv(1, socket.MSG_PEEK) == b"":
                        raise ConnectionResetError
                except BlockingIOError:
                    pass
                finally:
                    self.connection.setblocking(True)

        def _frame(self, message: Any) -> None:
            data = json.dumps(messages.to_plain(message)).encode()
            frame = struct.pack("<I", len(data)) + data
            self.wfile.write(b"%x\r\n%s\r\n" % (len(frame), frame))

        def _json(self, status: int, plain: Any) -> None:
            data = json.dumps(plain).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler
