"""``thaw host list``, ``drain`` and ``undrain``, and ``thaw namespace list``."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from thaw.cli.context import client
from thaw.cli.tables import age, bit_rate, show, size, table

host_app = typer.Typer(no_args_is_help=True, help="The hosts that functions run on.")
namespace_app = typer.Typer(no_args_is_help=True, help="What this key may use.")


@namespace_app.command("list")
def namespaces() -> None:
    """The namespaces of this key."""
    print("namespaces")
    for name in client().get("/api/v1/namespaces"):
        print(name)


@host_app.command("list")
def hosts() -> None:
    """Hosts with their devices, memory and what runs there."""
    from thaw.cli.host_reports import reports

    rows = table("host", "device", "free / memory", "link", "share", "cells", "instances", "seen")
    for host in reports(client()):
        free, memory = sum(d.free_bytes for d in host.devices), sum(d.memory_bytes for d in host.devices)
        link = bit_rate(host.network_bytes_per_s) if host.network_bytes_per_s else "unlimited"
        rows.add_row(
            host.host_id + (" (draining)" if host.draining else ""), ", ".join(d.name for d in host.devices),
            f"{size(free)} / {size(memory)}", link, host.share, str(host.stem_cells), str(len(host.instances)),
            age(host.seen_wall_ms),
        )  # fmt: skip
    show(rows)


Name = Annotated[str, typer.Argument(metavar="HOST", help="as thaw host list names it")]


@host_app.command("drain")
def drain(host: Name) -> None:
    """Let a host run empty: nothing new starts there, what runs ends in its time."""
    client().put(_drain_path(host), {})
    print(f"{host} is draining; thaw host undrain {host} takes it back")


@host_app.command("undrain")
def undrain(host: Name) -> None:
    """Let a drained host take starts again."""
    client().delete(_drain_path(host))
    print(f"{host} takes starts")


def _drain_path(host: str) -> str:
    return f"/api/v1/thaw/hosts/{quote(host, safe='')}/drain"
