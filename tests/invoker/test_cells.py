"""Stem cells of a driver that makes a container for each: when they are made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from fetchd.server import UnixServer
from invoker.cells import StemCells
from invoker.driver import Exit, Handle, Spec
from invoker.ledger import Ledger
from relay.channel import Channel, ChannelClosed
from relay.fetch_client import FetchClient
from relay.messages import Done, DoorOpen, DoorOpened, from_plain, to_plain
from tests.invoker.platform import WAIT_S
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.logs import Log


class Containers:
    """They answer at once."""

    zygote = None

    def __init__(self) -> None:
        self.doors: dict[str, str] = {}  # by kind, of those that were made
        self.made = {KIND_PYTHON: threading.Event(), KIND_LLM: threading.Event()}

    def on_exit(self, callback: Callable[[Exit], None]) -> None:
        pass

    def create(self, spec: Spec) -> Handle:
        self.doors[spec.kind] = spec.door
        return Handle(spec.container_id, spec.kind, Path("/nowhere"))

    def start(self, handle: Handle, spec: Spec) -> Handle:
        return handle

    def connect(self, handle: Handle, *, deadline_s: float) -> str:
        self.made[handle.kind].set()
        return handle.socket_path

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
        channel.send(to_plain(DoorOpened("/the/door") if isinstance(message, DoorOpen) else Done()))


def cells_of(driver: Containers, run_dir: Path) -> StemCells:
    made = StemCells(driver, FetchClient(str(run_dir / "f")), Ledger(1 << 30), 1 << 20, Log("test"))  # type: ignore[arg-type]
    made.set_target(KIND_LLM, 1)
    made.set_target(KIND_PYTHON, 1)
    return made


def test_an_llm_cell_is_made_as_soon_as_fetchd_listens_and_holds_up_no_other(run_dir: Path) -> None:
    driver = Containers()
    cells = cells_of(driver, run_dir)
    assert driver.made[KIND_PYTHON].wait(WAIT_S)
    assert KIND_LLM not in driver.doors
    fetchd = UnixServer(str(run_dir / "f"), 0o600, answer, Log("test"), most=8)
    assert driver.made[KIND_LLM].wait(WAIT_S)
    assert driver.doors[KIND_LLM] == "/the/door"
    cells.close()
    fetchd.close()


def test_a_host_that_ends_waits_for_no_fetchd(run_dir: Path) -> None:
    driver = Containers()
    cells = cells_of(driver, run_dir)
    assert driver.made[KIND_PYTHON].wait(WAIT_S)
    cells.close()
    assert cells.view() == ()
    assert KIND_LLM not in driver.doors
