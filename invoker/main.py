"""thaw-invoker: one per host.  Registers the host, follows the scheduler's commands, serves runs on its data port."""

from __future__ import annotations

import gc
import os
import secrets
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Final

from invoker import metrics
from invoker.commands import Commands
from invoker.containers.adapters import Adapters
from invoker.containers.consolidate import Consolidating
from invoker.containers.fleet import Fleet
from invoker.containers.handover import hand_over
from invoker.containers.instance import State
from invoker.containers.last_output import LastOutput
from invoker.containers.memory_ledger import Ledger
from invoker.containers.patient_fetch import PatientFetchClient
from invoker.containers.placing import Placing
from invoker.containers.preflight import Preflights
from invoker.containers.publish import Publisher
from invoker.containers.recovery import recover
from invoker.containers.start import Deps
from invoker.containers.stem_cells import StemCells
from invoker.drivers.base import DriverContext
from invoker.drivers.layer_directory import layers_of
from invoker.drivers.registry import make_driver
from invoker.heartbeat import Reporter
from invoker.packages.installer import Installer
from invoker.packages.layers import Layers
from invoker.ports.data_port import DataPort
from invoker.settings import InvokerSettings
from relay.clients.fetch import FetchClient
from relay.state import bus, credentials, redis_link
from relay.state.bus import CommandReader
from relay.state.clock import StateClock
from relay.state.records import Records
from relay.state.registry import Registry
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.errors import PlatformError, Unavailable
from thaw.ids import HostId
from thaw.logs import Log
from thaw.process import descriptors, lasting
from thaw.process.ending import Ending
from thaw.settings import SettingError, load

LAST_WORDS_S: Final = 4.0
"""If the container engine is away, the invoker ends this long after its last run.  The usual end takes a second or
two."""

STARTS_END_S: Final = 10.0
"""The time for starts that were given up to remove the containers that they make."""

STATE_WAIT_S: Final = 60.0
"""The state server may come up after the invoker.  After this time the invoker gives up."""


class Agent:
    """Everything of one host, wired together.  ``start`` returns when runs are served; ``stop`` leaves nothing."""

    def __init__(self, settings: InvokerSettings) -> None:
        self._settings = settings
        self._log = Log("invoker", host_id=settings.host_id)
        self._redis = redis_link.connect(settings.state_url)
        clock = StateClock()
        self._registry, records = Registry(self._redis, clock), Records(self._redis, clock)
        run_dir = Path(settings.run_dir)
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise PlatformError(
                f"cannot make {run_dir}: {e.strerror}", hint="set THAW_RUN_DIR to a directory that this user may make"
            ) from e
        self.driver = make_driver(DriverContext(settings, run_dir, self._log, self._start_over))
        self._publisher = Publisher(self._registry, self._log)
        ledger = Ledger(settings.memory_bytes)
        fetch = PatientFetchClient(settings.fetchd_socket)
        last_output = LastOutput(run_dir, self._log)
        self.fleet = Fleet(self.driver, fetch, self._publisher, ledger, last_output, self._log)
        self.cells = StemCells(
            self.driver, fetch, ledger, settings.stem_cell_mb << 20, self._log, device=settings.device
        )
        self.fleet.on_buried = self.cells.refill
        self._token = ""
        self._stopped = threading.Event()
        preflights = Preflights(
            self.fleet,
            self.cells,
            FetchClient(settings.fetchd_socket),
            HostId(settings.host_id),
            settings.device,
            self._log,
        )
        layers = Layers(
            layers_of(run_dir),
            Installer(settings.package_index, self._log),
            settings.packages_mb << 20,
            self.fleet.packages_in_use,
            self._log,
        )
        adapters = Adapters(self.fleet, FetchClient(settings.fetchd_socket), self._log)
        self.port = DataPort(
            settings.bind,
            self.fleet,
            preflights,
            layers,
            adapters,
            lambda: self._token,
            self._refresh_token,
            settings.metrics_token,
        )
        self.address = settings.advertise or self.port.address
        deps = Deps(
            settings,
            self.fleet,
            Placing(self.fleet, self.cells),
            self.cells,
            records,
            layers,
            partial(credentials.read, self._redis),
            self.address,
            self._log,
        )
        self._consolidating = Consolidating(
            self.fleet, records, partial(bus.publish, self._redis), settings.consolidate_timeout_s, self._log
        )
        self._commands = Commands(deps, self.cells, self._consolidating, adapters, self._registry, self._redis)
        self._records = records
        self.reporter = Reporter(settings, self.fleet, self.cells, self._registry, self.address, self._log)
        self.fleet.on_pool_left = self.cells.on_ready = self.reporter.has_news
        self._reader = CommandReader(
            settings.state_url, HostId(settings.host_id), self._commands.handle, self._state_is_up, self._log
        )

    def start(self) -> None:
        """Raises Unavailable when the state server stays away."""
        self._await_state()
        recover(
            self.fleet,
            self.cells,
            self._registry,
            self._records,
            HostId(self._settings.host_id),
            self.address,
            self._consolidating,
            self._log,
        )
        self._publisher.flush(STATE_WAIT_S)  # the scheduler knows what was adopted before it may start anything here
        self.port.start()
        count = 1 if self._settings.stem_cells == "on" else 0
        self.cells.set_target(KIND_PYTHON, count * max(1, self.cells.n_waiting(KIND_PYTHON)))  # adopted ones stay
        self.cells.set_target(KIND_LLM, count)  # 0 also ends a cell that an earlier invoker left
        self.reporter.start()
        self._reader.start()
        gc.freeze()  # objects made so far stay: no collection needs to walk over them while a token waits
        self._log.event("ready", address=self.address, share=self.driver.share)

    def stop(self) -> None:
        """Let runs finish (for a bounded time), then either end every container and take the host out of the registry,
        or leave both to the next invoker."""
        threading.Thread(target=self._end_without_engine, name="end-without-engine", daemon=True).start()
        self._commands.draining = True
        if self._has_successor():
            self._hand_over()
        else:
            self.reporter.drain()
            self._reader.stop()
            self._end_instances()
            self.cells.close()
        if not self._commands.wait_starts(STARTS_END_S):
            self._log.event("starts_left")
        self._publisher.flush(5.0)
        self.reporter.stop()
        self.port.stop()
        self._publisher.close()
        self.driver.close()
        self._redis.close()
        self._stopped.set()
        self._log.event("stopped")

    def _has_successor(self) -> bool:
        """Whether another invoker is expected to take over.  None is on a host that its operator has drained."""
        if self._settings.handover_s <= 0:
            return False
        try:
            seen = self._registry.live_host(HostId(self._settings.host_id))
        except PlatformError:
            return True  # the state server is away, and the host's notes with it
        return seen is None or not seen.draining

    def _hand_over(self) -> None:
        self._reader.stop()  # the next invoker carries out what comes now
        self.fleet.take_no_runs()
        self.reporter.hand_over()
        staying = hand_over(self.fleet, self._settings.drain_s)
        n_cells = self.cells.leave()
        self._log.event("handed_over", instances=len(staying), stem_cells=n_cells)

    def _end_without_engine(self) -> None:
        """A container engine that is shut down ends our containers itself, and the state server with them.  Once no run
        is left, there is nothing to wait for.  The restarted invoker finds remaining containers by their label."""
        self._await_runs()
        if not self._stopped.wait(LAST_WORDS_S) and not self.driver.reachable():
            self._log.event("ends_without_engine")
            os._exit(os.EX_OK)

    def _await_runs(self) -> None:
        """Wait until no run is in flight, or until runs have had their time to finish."""
        until = time.monotonic() + self._settings.drain_s
        for live in self.fleet.all():
            live.idle.wait(max(0.0, until - time.monotonic()))

    def _start_over(self) -> None:
        """The container engine was replaced, and only a restart of this container gets the new engine's socket.  The
        restarted invoker adopts the containers that serve, so nothing is ended here.  Runs in flight may finish first,
        because their answers would be lost."""
        self._await_runs()
        self._log.event("starts_over")
        os._exit(os.EX_TEMPFAIL)

    def _end_instances(self) -> None:
        lives = self.fleet.all()
        for live in lives:
            self.fleet.release(live.record.instance_id, only_idle=False, drain_s=self._settings.drain_s)
        for live in lives:
            if not live.gone.wait(self._settings.drain_s + 5.0):
                self._log.event("instance_left", instance_id=live.record.instance_id)

    def _await_state(self) -> None:
        pause = threading.Event()
        for left in range(int(STATE_WAIT_S), -1, -1):
            try:
                self._token = self._refresh_token()
                return
            except Unavailable:
                if left == 0:
                    raise
                pause.wait(1.0)

    def _refresh_token(self) -> str:
        try:
            self._token = self._registry.host_token(secrets.token_urlsafe(32))
        except PlatformError:
            if not self._token:
                raise
        return self._token

    def _state_is_up(self) -> None:
        """Called after every (re)connection: publish the records again that the state server may have lost."""
        self._publisher.forget_sent()
        for live in self.fleet.all():
            if live.state is not State.GONE:
                self.fleet.announce(live)
        metrics.MEMORY_HELD.set(sum(self.fleet.ledger.holders().values()))


def main() -> None:
    lasting.guard(Log("invoker"))
    ending = Ending()
    descriptors.raise_limit()  # a run needs two descriptors; processes that we start inherit the limit
    try:
        agent = Agent(load(InvokerSettings))
        agent.start()
    except (SettingError, PlatformError) as e:
        sys.exit(f"thaw-invoker: {e.message}; {e.hint}")
    except OSError as e:
        sys.exit(f"thaw-invoker: cannot listen: {e}; set THAW_INVOKER_BIND to a free host:port")
    ending.wait()
    agent.stop()


if __name__ == "__main__":
    main()
