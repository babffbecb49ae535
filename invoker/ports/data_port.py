"""The data port: gateways send runs to it.  HTTP/1.1 keep-alive, one thread a connection, every request with the
installation's bearer token.

``POST /instances/{id}/run`` · ``POST /logs`` · ``POST /output`` · ``POST /preflight`` · ``POST /packages`` ·
``POST /image`` · ``GET /metrics``, for which THAW_METRICS_TOKEN will do; ``GET /health`` needs no token.  A request
that is refused before anything ran gets a complete answer (401, 404, 410 InstanceGone, 429 InstanceBusy: route again).
When a container is lost during a request, the port closes the connection: the answer then has no last chunk, so the
gateway does not take it for complete.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from invoker import metrics
from invoker.containers.adapters import Adapters
from invoker.containers.fleet import Fleet
from invoker.containers.live import Live, Run
from invoker.containers.preflight import Preflights
from invoker.drivers.activation_logs import LATE_S
from invoker.packages.layers import Layers
from invoker.ports.forward import Ending, Forwarded, forward
from invoker.ports.guarded import GuardedServer
from relay.clients import http11
from relay.protocol.adapter_messages import ADAPTER_HEADER, LEFT_HEADER, decoded, encoded
from relay.protocol.data_port_messages import (
    ImageFound,
    ImageWanted,
    LogsFound,
    LogsWanted,
    OutputFound,
    OutputWanted,
    PackagesFound,
    PackagesWanted,
    PreflightWanted,
)
from relay.protocol.messages import ACTIVATION_HEADER
from thaw import wire
from thaw.action import KIND_BLACKBOX, KIND_PYTHON
from thaw.bearer import is_bearer
from thaw.errors import (
    AdapterMissing,
    BadRequest,
    InstanceBusy,
    InstanceGone,
    MemoryTooSmall,
    NotFound,
    ThawError,
    TimeLimitExceeded,
    TooLarge,
    Unauthorized,
    WorkerLost,
)
from thaw.ids import InstanceId
from thaw.process import lasting
from thaw.process.hangup import HangupWatcher

MAX_BODY_BYTES: Final = 64 * 1024 * 1024
STATUS: Final[dict[type[ThawError], int]] = {InstanceGone: 410, InstanceBusy: 429}
"""Both errors mean "route again" on this port.  To a client they mean something else, and have another status."""

REFRESH_S: Final = 1.0
_FETCHD_S: Final = 5.0
_EXIT_S: Final = 5.0
"""The longest wait for the reason of a container's end; a cluster reports it a second or two later."""
IDLE_S: Final = 600.0
"""The host closes a kept connection that is silent for longer.  The gateway then opens another."""


class DataPort(GuardedServer):
    def __init__(
        self,
        bind: str,
        fleet: Fleet,
        preflights: Preflights,
        layers: Layers,
        adapters: Adapters,
        token: Callable[[], str],
        refresh: Callable[[], str],
        scrapers: str = "",
    ) -> None:
        """``scrapers`` is the token that an operator has set for scrapers of /metrics; empty: none."""
        self.fleet, self.preflights, self.layers, self.adapters = fleet, preflights, layers, adapters
        self.token, self._refresh = token, refresh
        self._refreshed = 0.0
        self.hangups = HangupWatcher()  # for runs that wait for an adapter
        self.scrapers = scrapers
        super().__init__(bind, Handler, "data-port", fleet.log)

    def rotated_token(self) -> str:
        """The token that the state server holds now.  This asks the state server at most once a second; otherwise a
        stranger's requests could make the host ask as often as they come.
        """
        now = time.monotonic()
        if now - self._refreshed < REFRESH_S:
            return self.token()
        self._refreshed = now
        return self._refresh()

    def start(self) -> None:
        self.hangups.start()
        super().start()

    def stop(self) -> None:
        self.hangups.stop()
        super().stop()


class Handler(http11.Handler):
    disable_nagle_algorithm = True  # a generated token must not wait for the next one
    timeout = IDLE_S
    server: DataPort

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply(*lasting.health())
        else:
            self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, serve: Callable[[], None]) -> None:
        try:
            self._check_token()
            serve()
        except ThawError as e:
            self._reply(STATUS.get(type(e), e.http_status), {"error": e.message, "info": wire.to_plain(e.info())})

    def _check_token(self) -> None:
        given = self.headers.get("authorization") or ""
        scraped = self.server.scrapers if self.command == "GET" and self.path == "/metrics" else ""
        if is_bearer(given, self.server.token(), scraped) or is_bearer(given, self.server.rotated_token()):
            self.server.knows(self.connection)
            return
        self.close_connection = True  # the request's body stays unread
        raise Unauthorized("this port takes requests of the platform only", hint="send the installation's token")

    def _get(self) -> None:
        if self.path != "/metrics":
            raise NotFound(f"no {self.path}")
        self._reply_bytes(200, metrics.page() + self._fetchd_metrics(), "text/plain; version=0.0.4")

    def _fetchd_metrics(self) -> bytes:
        """fetchd's metrics, because fetchd listens on no network.  Empty while fetchd does not answer."""
        try:
            return self.server.fleet.fetch.metrics(deadline_s=_FETCHD_S).encode()
        except ThawError:
            return b""

    def _post(self) -> None:
        length = self.headers.get("content-length") or ""
        if not length.isdigit():
            self.close_connection = True
            raise BadRequest("a run needs Content-Length")
        if int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            raise TooLarge(f"Request larger than allowed: {length} > {MAX_BODY_BYTES} bytes.")
        body = self.rfile.read(int(length))
        if self.path == "/logs":
            self._reply(200, wire.to_plain(self._logs(wire.loads(LogsWanted, body))))
        elif self.path == "/output":
            wanted = wire.loads(OutputWanted, body)
            self._reply(200, wire.to_plain(OutputFound(self.server.fleet.last_output.of_action(wanted.action))))
        elif self.path == "/preflight":
            self._reply(200, wire.to_plain(self.server.preflights.check(wire.loads(PreflightWanted, body))))
        elif self.path == "/image":
            image = wire.loads(ImageWanted, body)
            found = self.server.fleet.driver.pin(image.image, deadline_s=image.deadline_ms / 1000)
            self._reply(200, wire.to_plain(ImageFound(found)))
        elif self.path == "/packages":
            self._reply(200, wire.to_plain(self._packages(wire.loads(PackagesWanted, body))))
        else:
            self._serve_run(body)

    def _packages(self, wanted: PackagesWanted) -> PackagesFound:
        deadline_s = wanted.deadline_ms / 1000
        return PackagesFound(self.server.layers.lock(wanted.asked, wanted.namespace, deadline_s=deadline_s))

    def _logs(self, wanted: LogsWanted) -> LogsFound:
        """Collect the log lines of several runs.  One deadline holds for all of them, so containers that never end
        their output delay the answer only once.
        """
        deadline = time.monotonic() + LATE_S
        found: list[tuple[str, ...] | None] = []
        last: dict[InstanceId, tuple[str, ...] | None] = {}
        for run in wanted.runs:
            live = self.server.fleet.find(run.instance_id)
            lines = () if live is None or live.logs is None else tuple(live.logs.lines(run.activation_id, deadline))
            if lines or (live is not None and live.logs is not None and not live.exited.is_set()):
                found.append(lines)
            else:
                if run.instance_id not in last:
                    last[run.instance_id] = self._last_lines(run.instance_id, live, deadline)
                found.append(last[run.instance_id])
        return LogsFound(tuple(found))

    def _last_lines(self, instance_id: InstanceId, live: Live | None, deadline: float) -> tuple[str, ...] | None:
        """The last output of a container that has ended or is ending: the lines of its runs are gone."""
        if live is not None:
            live.gone.wait(max(0.0, deadline - time.monotonic()))
        output = self.server.fleet.last_output.of_instance(instance_id)
        if output is None:
            return None
        stamp = datetime.fromtimestamp(output.ended_wall_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return tuple(f"{stamp} stderr: {line}" for line in output.stderr.splitlines())

    def _serve_run(self, body: bytes) -> None:
        fleet = self.server.fleet
        run = fleet.begin_run(self._instance_id(self.path, "run"))
        began = time.monotonic()
        try:
            result = self._run_with_adapter(run, body)
        finally:
            fleet.end_run(run)
        metrics.RUNS.labels(outcome=result.ending.value).inc()
        metrics.RUN_SECONDS.observe(time.monotonic() - began)

    def _run_with_adapter(self, run: Run, body: bytes) -> Forwarded:
        live, uri = run.live, decoded(self.headers.get(ADAPTER_HEADER) or "")
        if not uri:
            return self._run(run, body)
        left_ms = self.headers.get(LEFT_HEADER) or ""
        deadline = time.monotonic() + (int(left_ms[:12]) / 1000 if left_ms.isdecimal() else live.timeout_s)
        with self.server.adapters.using(live, uri, deadline, self._watch_hangup) as held:

            def on_status(status: int) -> None:
                """Before the caller hears of it, because it may send the run again at once."""
                if status == AdapterMissing.http_status:
                    self.server.adapters.lost(live, held)

            return self._run(run, body, f"{ADAPTER_HEADER}: {encoded(held.name)}\r\n", on_status)

    def _watch_hangup(self, on_hangup: Callable[[], None]) -> Callable[[], None]:
        return self.server.hangups.watch(self.connection, on_hangup)

    def _run(
        self, run: Run, body: bytes, headers: str = "", on_status: Callable[[int], None] | None = None
    ) -> Forwarded:
        live = run.live
        accept = self.headers.get("accept") or "*/*"
        head = (
            f"POST /run HTTP/1.1\r\nHost: container\r\nAccept: {accept}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{headers}\r\n"
        ).encode("latin-1")
        assert live.handle is not None  # noqa: S101  a READY instance has one
        self.wfile.flush()
        deadline = time.monotonic() + live.timeout_s
        activation_id = self.headers.get(ACTIVATION_HEADER, "")
        if live.logs is not None:
            live.logs.run_began(activation_id)
        ending = Ending.CONTAINER_LOST

        def on_answered() -> None:
            self._note_end(live, activation_id, Ending.DONE)  # the next run's lines follow
            self.server.fleet.free_slot(run)

        def on_given_up(result: Forwarded) -> None:
            self._end_function(live, result)

        path = live.handle.socket_path
        try:
            result = forward(live, path, head, body, self.connection, deadline, on_answered, on_given_up, on_status)
            ending = result.ending
        finally:
            if run.has_slot:
                self._note_end(live, activation_id, ending)
        if result.ending is Ending.NOBODY and live.cell_kind == KIND_BLACKBOX:  # the image itself may still run
            threading.Thread(target=self.server.fleet.kill, args=(live, None), name="no-port", daemon=True).start()
        if result.ending is Ending.NOBODY:  # the host reports its end soon; the gateway may route again
            raise InstanceGone(f"the container of instance {live.record.instance_id} does not listen any more")
        if result.ending is not Ending.DONE:
            self._broken(live, result)
        return result

    @staticmethod
    def _note_end(live: Live, activation_id: str, ending: Ending) -> None:
        """Tell the log collector whether to wait for a sentinel: only a run that its container began writes one."""
        if live.logs is None:
            return
        if ending in (Ending.NOBODY, Ending.CONTAINER_LOST):
            live.logs.run_lost(activation_id)
        else:
            live.logs.run_ended(activation_id)

    def _broken(self, live: Live, result: Forwarded) -> None:
        """Tell the caller of a run whose answer is not complete, if it can still be told."""
        if result.ending is Ending.TIMEOUT and not result.started:
            self._reply_error(_late(live))
        elif result.ending is Ending.CONTAINER_LOST and not result.started and (lost := _how_it_ended(live)):
            self._reply_error(lost)
        else:
            self.close_connection = True

    def _end_function(self, live: Live, result: Forwarded) -> None:
        """End the container of a function whose run is given up: nothing else stops the function.  An HTTP server that
        has begun to answer is not ended: it may serve others, and may stream for as long as it is let.

        The end is decided before this returns, and the container is stopped on another thread.
        """
        is_late = result.ending is Ending.TIMEOUT
        goes_on = live.serves_http and result.started if is_late else live.aborts_runs
        if live.kind != KIND_PYTHON or goes_on:
            return
        fleet = self.server.fleet
        if fleet.begin_end(live, _late(live) if is_late else None):
            threading.Thread(target=fleet.stop, args=(live,), name="given-up", daemon=True).start()

    def _reply_error(self, error: ThawError) -> None:
        self._reply(error.http_status, {"error": error.message, "info": wire.to_plain(error.info())})

    def _instance_id(self, path: str, verb: str) -> InstanceId:
        parts = path.split("/")
        if len(parts) != 4 or parts[1] != "instances" or parts[3] != verb:
            raise NotFound(f"no {path}")
        return InstanceId(parts[2])

    def _reply(self, status: int, value: object) -> None:
        self._reply_bytes(status, json.dumps(value).encode(), "application/json")

    def _reply_bytes(self, status: int, data: bytes, content_type: str) -> None:
        try:
            self.reply(status, data, content_type)
        except OSError:
            self.close_connection = True


def _late(live: Live) -> ThawError:
    return TimeLimitExceeded(f"The action exceeded its time limits of {round(live.timeout_s * 1000)} milliseconds.")


def _how_it_ended(live: Live) -> ThawError | None:
    """Return how a function's container ended under a run.  The driver hears of it a moment later; None if it does not.
    A lost model's requests go on elsewhere, so nobody waits for that."""
    if live.kind != KIND_PYTHON or not live.exited.wait(_EXIT_S):
        return None
    if live.out_of_memory:
        return _out_of_memory(live)
    return live.error if isinstance(live.error, WorkerLost) else None  # else it was ended for the sake of another run


def _out_of_memory(live: Live) -> ThawError:
    limit = f" of {live.function.limits.memory} MiB" if live.function is not None else ""
    return MemoryTooSmall(
        f"The action used more memory than its limit{limit} (limits.memory).",
        hint="raise limits.memory, or keep less in memory",
    )
