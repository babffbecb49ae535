"""``thaw top``: the running, starting and waiting work.  The gateway holds each request until that has changed."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from thaw import wire
from thaw.cli.context import client, globals_, out, print_json
from thaw.ids import ActionName
from thaw.instance import InstanceState
from thaw.work import Work, Worker

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from thaw.cli.platform_api.client import Client

_HELD_S: Final = 20.0


def top(
    all_: Annotated[bool, typer.Option("--all", "-a", help="Of all namespaces (needs an operator's key).")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print it once; so does output that is no terminal.")] = False,
) -> None:
    """Show what runs, starts and waits, and on which host, until Ctrl-C."""
    api, path = client(), "/api/v1/thaw/work" if all_ else "work"
    reply = api.get(path)
    if globals_.json:
        print_json(reply)
        return
    if once or not out().is_terminal:
        out().print(screen(reply))
        return
    from rich.live import Live

    shown = _Screen(reply)
    with Live(get_renderable=shown.now, console=out(), refresh_per_second=1, screen=True) as live:
        while True:
            reply = _next(api, path, shown.reply)
            if reply is not shown.reply:
                shown.reply = reply
                live.refresh()


class _Screen:
    """The last answer, and how old it is: times on the screen go on while nothing changes."""

    def __init__(self, reply: dict[str, Any]) -> None:
        self.reply = reply

    @property
    def reply(self) -> dict[str, Any]:
        return self._told[0]

    @reply.setter
    def reply(self, reply: dict[str, Any]) -> None:
        self._told = (reply, time.monotonic())

    def now(self) -> RenderableType:
        reply, told_s = self._told
        return screen(reply, time.monotonic() - told_s)


def _next(api: Client, path: str, last: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a held request.  If the gateway did not hold it, the next one comes after a pause."""
    from thaw.cli.platform_api.client import ApiError
    from thaw.cli.platform_api.pauses import pause

    asked_s = time.monotonic()
    try:
        reply: dict[str, Any] = api.get(path, known=last["mark"], wait_s=_HELD_S)
    except ApiError as e:
        if e.http_status != HTTPStatus.TOO_MANY_REQUESTS:
            raise
        reply = last
    if reply["mark"] == last["mark"] and time.monotonic() - asked_s < _HELD_S / 2:
        pause(_HELD_S)
    return reply


def screen(reply: dict[str, Any], age_s: float = 0.0) -> RenderableType:
    """``age_s``: how long ago the reply came."""
    from rich.console import Group

    work = wire.from_plain(Work, reply)
    now_ms = int(reply["now_ms"]) + round(1000 * age_s)
    n_starting = sum(w.state is InstanceState.STARTING for w in work.workers)
    n_waiting = sum(w.n_requests for w in work.waiting)
    head = f"{len(work.workers) - n_starting} containers run, {n_starting} start, {n_waiting} requests wait"
    parts: list[RenderableType] = [head]
    if work.workers:
        parts.append(_workers(work, now_ms))
    if work.waiting:
        parts.append(_waiting(work, now_ms))
    return Group(*parts)


def _workers(work: Work, now_ms: int) -> Table:
    from thaw.cli.output.tables import table

    rows = table("action", "version", "host", "device", "stage", "slots", "state")
    for w in work.workers:
        stage = f"{w.stage + 1} of {w.n_stages}" if w.n_stages > 1 else ""
        slots = str(w.slots) if w.slots else ""
        rows.add_row(_who(work, w.action), w.version, w.host, w.device, stage, slots, _state(w, now_ms))
    return rows


def _who(work: Work, action: ActionName) -> str:
    """The action, or the functions whose instances are those of this pool."""
    shared = next((one.functions for one in work.shared if one.action == action), ())
    if not shared:
        return f"/{action}"
    return f"/{shared[0]}" + (f" and {len(shared) - 1} more" if len(shared) > 1 else "")


def _state(worker: Worker, now_ms: int) -> str:
    from thaw.cli.output.tables import duration

    if worker.state is InstanceState.STARTING:
        left_s = None if worker.due_ms is None else (worker.due_ms - now_ms) / 1000
        return "starting" if left_s is None or left_s <= 0 else f"starting, first answer in {duration(left_s)}"
    if worker.state is InstanceState.READY:
        since_ms = worker.idle_since_ms
        return "busy" if since_ms is None else f"idle for {duration(max(0, now_ms - since_ms) / 1000)}"
    return str(worker.state)


def _waiting(work: Work, now_ms: int) -> Table:
    from thaw.cli.output.tables import duration, table

    rows = table("action", "requests wait", "the oldest for")
    for one in work.waiting:
        rows.add_row(_who(work, one.action), str(one.n_requests), duration(max(0, now_ms - one.oldest_ms) / 1000))
    return rows
