"""``thaw host list``, ``drain`` and ``undrain``, and ``thaw namespace list`` and ``usage``."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from thaw.cli.context import client
from thaw.cli.tables import age, bit_rate, show, size, table

host_app = typer.Typer(
    no_args_is_help=True, help="Show and drain the hosts that functions run on (needs an operator's key)."
)
namespace_app = typer.Typer(no_args_is_help=True, help="Show the namespaces that the API key may use.")


@namespace_app.command("list")
def namespaces() -> None:
    """List the namespaces of the API key."""
    print("namespaces")
    for name in client().get("/api/v1/namespaces"):
        print(name)


@namespace_app.command("usage")
def usage() -> None:
    """List what every namespace has: keys, actions, records of the last week, instances (needs an operator's key)."""
    columns = ("namespace", "keys", "actions", "activations", "instances")
    rows = table(*columns)
    for one in client().get("/api/v1/thaw/namespaces")["namespaces"]:
        rows.add_row(*(str(one[name]) for name in columns))
    show(rows)


@host_app.command("list")
def hosts() -> None:
    """List the hosts, with their devices, memory and instances."""
    from thaw.cli.host_reports import reports

    rows = table("host", "device", "free / memory", "link", "share", "cells", "instances", "seen")
    for host in reports(client()):
        free, memory = sum(d.free_bytes for d in host.devices), sum(d.memory_bytes for d in host.devices)
        link = bit_rate(host.network_bytes_per_s) if host.network_bytes_per_s else "unlimited"
        rows.add_row(
            host.host_id + (" (draining)" if host.draining else ""),
            ", ".join(d.name for d in host.devices),
            f"{size(free)} / {size(memory)}",
            link,
            host.share,
            str(host.stem_cells),
            str(len(host.instances)),
            age(host.seen_wall_ms),
        )
    show(rows)


Name = Annotated[str, typer.Argument(metavar="HOST", help="A host, as thaw host list names it.")]


@host_app.command("drain")
def drain(host: Name) -> None:
    """Empty a host: nothing new starts there, and what runs may finish."""
    client().put(_drain_path(host), {})
    print(f"{host} is draining; thaw host undrain {host} takes it back")


@host_app.command("undrain")
def undrain(host: Name) -> None:
    """Let new functions start on a drained host again."""
    client().delete(_drain_path(host))
    print(f"{host} takes starts")


def _drain_path(host: str) -> str:
    return f"/api/v1/thaw/hosts/{quote(host, safe='')}/drain"
