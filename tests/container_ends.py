"""The containers of a driver that have ended, as the driver reports them."""

from __future__ import annotations

import threading

from invoker.drivers.base import Driver, Exit

_WAIT_S = 30.0


class Ends:
    def __init__(self, driver: Driver) -> None:
        self.seen: list[Exit] = []
        self._changed = threading.Condition()
        driver.on_exit(self._take)

    def wait(self, container_id: str) -> Exit:
        with self._changed:
            found = self._changed.wait_for(
                lambda: next((e for e in self.seen if e.container_id == container_id), None), _WAIT_S
            )
        assert found is not None, f"{container_id} did not end"
        return found

    def _take(self, end: Exit) -> None:
        with self._changed:
            self.seen.append(end)
            self._changed.notify_all()
