"""The times at which stem cells are made, for a driver that makes a container for each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import invoker.containers.stem_cells
from fetchd.server import UnixServer
from invoker.containers import placing
from invoker.containers.fleet import Fleet
from invoker.containers.instance import Event
from invoker.containers.last_output import LastOutput
from invoker.containers.live import Live
from invoker.containers.memory_ledger import Ledger
from invoker.containers.placing import Placing
from invoker.containers.stem_cells import PYTHON_CELL_BYTES, ZYGOTE, StemCells
from invoker.drivers.base import Exit, Handle, Spec
from relay.clients.channel import Channel, ChannelClosed
from relay.clients.fetch import FetchClient
from relay.protocol.messages import Done, DoorOpen, DoorOpened, from_plain, to_plain
from tests.fetchd.harness import Fetchd
from tests.invoker.platform import WAIT_S
from tests.relay.samples import INSTANCE
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.errors import PlatformError
from thaw.ids import InstanceId
from thaw.instance import InstanceRecord, InstanceState
from thaw.logs import Log


class Shared:
    """A zygote that is ready when the test says so."""

    pid, ready = 0, False
    ready_in_s: float | None = None

    def __init__(self) -> None:
        self.wanted = threading.Event()

    def wait_warm(self, deadline_s: float) -> None:
        pass

    def want(self, on_ready: Callable[[], None]) -> None:
        self.on_ready = on_ready
        self.wanted.set()

    def give_up(self) -> None:
        self.ready = False


class Containers:
    """Containers that answer as soon as ``may_answer`` allows it, which is at once by default."""

    whole_devices = False

    def __init__(self, zygote: Shared | None = None) -> None:
        self.zygote = zygote
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.descriptor_sockets: dict[str, str] = {}  # the descriptor sockets of the containers that were made, by kind
        self.made = {KIND_PYTHON: threading.Event(), KIND_LLM: threading.Event()}

    def on_exit(self, callback: Callable[[Exit], None]) -> None:
        self.ended = callback

    def create(self, spec: Spec) -> Handle:
        self.descriptor_sockets[spec.kind] = spec.descriptor_socket
        return Handle(spec.container_id, spec.kind, Path("/nowhere"))

    def start(self, handle: Handle, spec: Spec) -> Handle:
        return handle

    def connect(self, handle: Handle, *, deadline_s: float) -> Handle:
        self.made[handle.kind].set()
        assert self.may_answer.wait(WAIT_S)
        return handle

    def stop(self, handle: Handle, *, deadline_s: float) -> None:
        pass

    def remove(self, handle: Handle) -> None:
        pass


def answer(channel: Channel) -> None:
    while True:
        try:
            message = from_plain(channel.receive()[0])
        except ChannelClosed:
            return
        channel.send(to_plain(DoorOpened("/the/socket") if isinstance(message, DoorOpen) else Done()))


def cells_of(
    driver: Containers, run_dir: Path = Path("/none"), ledger: Ledger | None = None, **targets: int
) -> StemCells:
    """Stem cells of a host whose engine takes as much memory as a Python function."""
    fetch = FetchClient(str(run_dir / "f"))
    made = StemCells(driver, fetch, ledger or Ledger(1 << 30), PYTHON_CELL_BYTES, Log("test"))
    for kind, count in targets.items():
        made.set_target({"python": KIND_PYTHON, "llm": KIND_LLM}[kind], count)
    return made


def test_an_llm_cell_is_made_as_soon_as_fetchd_listens_and_holds_up_no_other(run_dir: Path) -> None:
    driver = Containers()
    cells = cells_of(driver, run_dir, llm=1, python=1)
    assert driver.made[KIND_PYTHON].wait(WAIT_S)
    assert KIND_LLM not in driver.descriptor_sockets
    fetchd = UnixServer(str(run_dir / "f"), 0o600, answer, Log("test"), most=8)
    assert driver.made[KIND_LLM].wait(WAIT_S)
    assert driver.descriptor_sockets[KIND_LLM] == "/the/socket"
    cells.close()
    fetchd.close()


def test_a_host_that_ends_waits_for_no_fetchd(run_dir: Path) -> None:
    driver = Containers()
    cells = cells_of(driver, run_dir, llm=1, python=1)
    assert driver.made[KIND_PYTHON].wait(WAIT_S)
    cells.close()
    assert cells.view() == ()
    assert KIND_LLM not in driver.descriptor_sockets


class Broken(Containers):
    """Every container fails at ``step``, and ``failed`` is released each time."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self._step = step
        self.failed = threading.Semaphore(0)

    def _reach(self, step: str) -> None:
        if step == self._step:
            self.failed.release()
            raise PlatformError(f"cannot {step} a container")

    def create(self, spec: Spec) -> Handle:
        self._reach("create")
        return super().create(spec)

    def start(self, handle: Handle, spec: Spec) -> Handle:
        self._reach("start")
        return super().start(handle, spec)

    def connect(self, handle: Handle, *, deadline_s: float) -> Handle:
        self._reach("connect to")
        return super().connect(handle, deadline_s=deadline_s)


def test_llm_cells_that_fail_leave_no_descriptor_socket_in_fetchd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invoker.containers.stem_cells, "_RETRY_S", 0.0)
    with Fetchd(tmp_path, THAW_FETCHD_POOL_MB=8) as fetchd:
        for step in ("create", "start", "connect to"):
            driver = Broken(step)
            cells = StemCells(driver, fetchd.client, Ledger(1 << 30), 1 << 20, Log("test"))
            cells.set_target(KIND_LLM, 1)
            for _ in range(5):
                assert driver.failed.acquire(timeout=WAIT_S)
            cells.close()
            assert fetchd.client.descriptor_sockets() == (), step


def test_no_cell_waits_on_a_device_that_it_would_keep_from_all_others(run_dir: Path) -> None:
    driver = Containers()
    driver.whole_devices = True
    fetch = FetchClient(str(run_dir / "f"))
    cells = StemCells(driver, fetch, Ledger(1 << 30), 1 << 20, Log("test"), device="cuda:0")
    cells.set_target(KIND_LLM, 2)
    cells.set_target(KIND_PYTHON, 1)
    assert driver.made[KIND_PYTHON].wait(WAIT_S)
    assert {t.kind: t.count for t in cells.targets()} == {KIND_LLM: 0, KIND_PYTHON: 1}
    cells.close()


def test_a_cell_for_which_there_is_no_room_is_tried_again_when_a_container_has_ended(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invoker.containers.stem_cells, "_RETRY_S", 0.01)
    monkeypatch.setattr(invoker.containers.stem_cells, "_GROWTH", 1e6)
    monkeypatch.setattr(invoker.containers.stem_cells, "_LONGEST_RETRY_S", 1e6)
    driver = Broken("start")
    cells = cells_of(driver, run_dir, python=1)
    for _ in range(2):  # the first pause is short
        assert driver.failed.acquire(timeout=WAIT_S)
    driver.ended(Exit("an instance", 0))
    assert driver.failed.acquire(timeout=WAIT_S)
    cells.close()


def test_a_host_says_of_the_cell_that_starts_wait_for_in_how_long_it_is_ready(run_dir: Path) -> None:
    shared = Shared()
    cells = cells_of(Containers(shared), run_dir, llm=1, python=1)
    for ready_in_s in (None, 3.5):
        shared.ready_in_s = ready_in_s
        assert {t.kind: t.ready_in_s for t in cells.targets()} == {KIND_LLM: ready_in_s, KIND_PYTHON: None}
    cells.close()


class WatchedLedger(Ledger):
    """Sets ``looked`` when a thread has checked the free memory and is about to wait."""

    def __init__(self, total_bytes: int) -> None:
        super().__init__(total_bytes)
        self.looked = threading.Event()

    def wait_change(self, ready: Callable[[], bool], deadline: float) -> bool:
        def look() -> bool:
            found = ready()
            self.looked.set()  # the thread has the ledger's lock, so it can only be woken after its wait has begun
            return found

        return super().wait_change(look, deadline)


class Nowhere:
    """A registry that drops all records."""

    def put(self, record: InstanceRecord, *, flip: bool = False) -> None:
        pass


def fleet_of(driver: Containers, ledger: Ledger, publisher: object = None) -> Fleet:
    kept = LastOutput(Path("/nowhere"), Log("test"))
    return Fleet(driver, FetchClient("/none"), publisher or Nowhere(), ledger, kept, Log("test"))


def starting(instance_id: str, n_bytes: int) -> Live:
    is_new = {"state": InstanceState.STARTING, "slots": 1, "reserve_bytes": n_bytes}
    return Live(replace(INSTANCE, instance_id=InstanceId(instance_id), **is_new), KIND_PYTHON)


def idle(fleet: Fleet, instance_id: str, n_bytes: int, slots: int = 1) -> Live:
    live = starting(instance_id, n_bytes)
    assert fleet.add(live)
    live.apply(Event.UP)
    live.apply(Event.INIT_DONE)
    live.amend(slots=slots)
    return live


@pytest.mark.parametrize("kind", [KIND_PYTHON, KIND_LLM], ids=["stem cell", "zygote"])
def test_a_start_that_waits_for_memory_takes_that_of_a_cell_as_soon_as_it_is_ready(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "WAIT_S", 3600.0)
    zygote = Shared()
    driver, ledger = Containers(zygote), WatchedLedger(PYTHON_CELL_BYTES + 1)
    driver.may_answer.clear()
    cells = cells_of(driver, ledger=ledger)
    cells.set_target(kind, 1)
    assert (driver.made[kind] if kind == KIND_PYTHON else zygote.wanted).wait(WAIT_S)
    place = Placing(fleet_of(driver, ledger), cells).place
    start = threading.Thread(target=place, args=(starting("i", PYTHON_CELL_BYTES),), daemon=True)
    start.start()
    assert ledger.looked.wait(WAIT_S)  # it waits for memory
    if kind == KIND_PYTHON:
        driver.may_answer.set()
    else:
        zygote.ready = True
        zygote.on_ready()
    start.join(WAIT_S)
    assert not start.is_alive()
    assert ledger.holders() == {"i": PYTHON_CELL_BYTES}
    cells.close()


def test_memory_that_a_start_made_free_goes_to_no_stem_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "WAIT_S", 0.0)
    driver, ledger = Containers(Shared()), Ledger(2 * PYTHON_CELL_BYTES)
    fleet = fleet_of(driver, ledger)
    assert ledger.take("idle", ledger.total_bytes)
    cells = cells_of(driver, ledger=ledger, python=1, llm=1)
    idle(fleet, "idle", ledger.total_bytes)
    start = starting("start", ledger.total_bytes)
    fleet.on_buried = cells._refill  # this runs at once, before another start can take the freed memory
    assert fleet.add(start)
    Placing(fleet, cells).place(start)
    assert ledger.holders() == {"start": ledger.total_bytes}
    fleet.kill(start, None)
    assert set(ledger.holders()) == {ZYGOTE, *(c.cell_id for c in cells.view())}
    assert len(ledger.holders()) == 2
    cells.close()


class SlowToGo(Shared):
    """A zygote whose memory the kernel frees slowly.  Another thread runs ``meanwhile`` in this time."""

    meanwhile: Callable[[], None] | None = None

    def give_up(self) -> None:
        self.ready = False
        self.wanted.clear()
        if self.meanwhile is not None:
            other = threading.Thread(target=self.meanwhile, daemon=True)
            other.start()
            other.join(0.1)  # the other thread may have to wait for this one


def test_a_zygote_that_is_being_given_up_is_not_wanted_before_its_memory_is_free() -> None:
    zygote = SlowToGo()
    driver, ledger = Containers(zygote), Ledger(1 << 30)
    fleet = fleet_of(driver, ledger)
    cells = cells_of(driver, ledger=ledger, llm=1)
    assert zygote.wanted.wait(WAIT_S)
    zygote.ready = True
    start = starting("start", ledger.total_bytes)
    assert fleet.add(start)
    refilled = threading.Event()

    def refill() -> None:
        cells._refill()
        refilled.set()

    zygote.meanwhile = refill
    Placing(fleet, cells).place(start)
    assert refilled.wait(WAIT_S)
    assert ledger.holders() == {"start": ledger.total_bytes}
    assert not zygote.wanted.is_set()
    zygote.meanwhile = None
    cells.close()
