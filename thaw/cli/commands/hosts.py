"""``thaw host list``, ``drain`` and ``undrain``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import quote

import typer

from thaw import wire
from thaw.cli.context import client
from thaw.cli.output.tables import age, bit_rate, show, size, table
from thaw.errors import Conflict
from thaw.host import HostLeft

if TYPE_CHECKING:
    from thaw.cli.platform_api.client import Client

app = typer.Typer(
    no_args_is_help=True, help="Show and drain the hosts that functions run on (needs an operator's key)."
)


@app.command("list")
def hosts() -> None:
    """List the hosts, with their devices, memory and instances."""
    from thaw.cli.platform_api.host_reports import reports

    rows = table("host", "device", "free / memory", "link", "share", "cells", "instances", "seen")
    for host in reports(client()):
        free, memory = sum(d.free_bytes for d in host.devices), sum(d.memory_bytes for d in host.devices)
        link = bit_rate(host.network_bytes_per_s) if host.network_bytes_per_s else "unlimited"
        rows.add_row(
            host.host_id + (" (draining)" if host.draining else " (handed over)" if host.handing_over else ""),
            ", ".join(d.name for d in host.devices),
            f"{size(free)} / {size(memory)}",
            link,
            host.share,
            str(host.stem_cells),
            str(len(host.instances)),
            age(host.seen_wall_ms),
        )
    show(rows)


_BEGINS_S: Final = 2.0
"""The scheduler hears of a drain at once, and its instances say how many requests they have as soon as they drain."""
_LONG_POLL_S: Final = 20.0

Name = Annotated[str, typer.Argument(metavar="HOST", help="A host, as thaw host list names it.")]


@app.command("drain")
def drain(
    host: Name,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait until no instance is left there.")] = False,
) -> None:
    """Empty a host: nothing new starts there, requests of models move elsewhere, and functions may finish."""
    gateway, path = client(), _drain_path(host)
    gateway.put(path, {})
    print(f"{host} is draining; thaw host undrain {host} takes it back")
    left = _left(gateway.get(path))
    if left.instances and not wait:
        left = _next(gateway, path, left, _BEGINS_S)
    print(_sentence(host, left), flush=True)
    while wait and left.draining and left.instances:
        said, left = left, _next(gateway, path, left, _LONG_POLL_S)
        if left != said:
            print(_sentence(host, left), flush=True)
    if not left.draining:
        raise Conflict(f"{host} is not draining any more", hint=f"thaw host drain {host} empties it again")


def _next(gateway: Client, path: str, known: HostLeft, wait_s: float) -> HostLeft:
    return _left(gateway.get(path, known=wire.dumps(known).decode(), wait_s=wait_s))


def _left(reply: object) -> HostLeft:
    return wire.from_plain(HostLeft, reply)


def _sentence(host: str, left: HostLeft) -> str:
    if not left.instances:
        return f"{host} is empty"
    counts = (
        (left.moving, "request is moving", "requests are moving"),
        (left.running, "function runs", "functions run"),
    )
    parts = [f"{n} {one if n == 1 else several}" for n, one, several in counts if n]
    parts.append(f"{left.instances} instance{' is' if left.instances == 1 else 's are'} left")
    return f"{host}: {', '.join(parts)}"


@app.command("undrain")
def undrain(host: Name) -> None:
    """Let new functions start on a drained host again."""
    client().delete(_drain_path(host))
    print(f"{host} takes starts")


def _drain_path(host: str) -> str:
    return f"/api/v1/thaw/hosts/{quote(host, safe='')}/drain"
