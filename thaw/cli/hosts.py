"""``thaw host list``, ``drain`` and ``undrain``, and ``thaw namespace``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

import typer

from thaw import wire
from thaw.cli.context import client
from thaw.cli.tables import age, bit_rate, show, size, table
from thaw.errors import BadRequest, Conflict
from thaw.host import HostLeft
from thaw.quotas import NAMES, setting_of

if TYPE_CHECKING:
    from thaw.cli.client import Client

host_app = typer.Typer(
    no_args_is_help=True, help="Show and drain the hosts that functions run on (needs an operator's key)."
)
namespace_app = typer.Typer(no_args_is_help=True, help="Show namespaces, what they use and what they may run.")


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


Prefixes = Annotated[
    list[str], typer.Argument(metavar="PREFIX...", help="Beginnings of models' URIs, for example s3://team-a/.")
]
Tenant = Annotated[str, typer.Argument(metavar="NAMESPACE", help="The namespace.")]


@namespace_app.command("models")
def models(namespace: Tenant) -> None:
    """List what a namespace may run (needs an operator's key)."""
    _show_models(client().get(_models_path(namespace)))


@namespace_app.command("allow-models")
def allow_models(namespace: Tenant, prefixes: Prefixes) -> None:
    """Let a namespace run the models below these prefixes, too (needs an operator's key)."""
    _show_models(client().put(_models_path(namespace), {"prefixes": prefixes}))


@namespace_app.command("disallow-models")
def disallow_models(namespace: Tenant, prefixes: Prefixes) -> None:
    """Take prefixes back (needs an operator's key).  What runs goes on, and nothing else starts."""
    _show_models(client().delete(_models_path(namespace), {"prefixes": prefixes}))


def _at_most(what: str) -> Any:
    return typer.Option(metavar="N", help=f"At most so many {what}; 'default' takes the value back.")


@namespace_app.command("quota")
def quota(
    namespace: Tenant,
    actions: Annotated[str | None, _at_most("actions")] = None,
    code_bytes: Annotated[str | None, _at_most("bytes of actions with their code")] = None,
    record_bytes: Annotated[str | None, _at_most("bytes of records and 202s")] = None,
    held: Annotated[str | None, _at_most("requests that wait for an instance")] = None,
    accepted: Annotated[str | None, _at_most("202s that have not ended")] = None,
    starts: Annotated[str | None, _at_most("starts in progress")] = None,
    weight: Annotated[
        str | None, typer.Option(metavar="W", help="Its turns for each one of others, or 'default' (1).")
    ] = None,
    records: Annotated[str | None, _at_most("records; the oldest gives way")] = None,
    record_age_s: Annotated[str | None, _at_most("seconds that a record is kept")] = None,
) -> None:
    """Show what a namespace may have and has, or set some of it (needs an operator's key)."""
    asked = (actions, code_bytes, record_bytes, held, accepted, starts, weight, records, record_age_s)
    path = f"/api/v1/thaw/namespaces/{quote(namespace, safe='')}/quotas"
    changes = {name: _quota(name, text) for name, text in zip(NAMES, asked, strict=True) if text is not None}
    found = client().put(path, changes) if changes else client().get(path)
    rows = table("quota", "allowed", "used", "set by")
    for name in NAMES:
        own, used = found["own"].get(name), found["used"].get(name)
        allowed = found["default"][name] if own is None else own
        by = found["namespace"] if own is not None else f"{setting_of(name)}" if name != "weight" else "default"
        rows.add_row(name, f"{allowed:g}" if name == "weight" else str(allowed), "" if used is None else str(used), by)
    show(rows)


def _quota(name: str, text: str) -> float | None:
    if text == "default":
        return None
    try:
        return float(text) if name == "weight" else int(text)
    except ValueError:
        raise BadRequest(f"--{name.replace('_', '-')} must be a number or 'default', not '{text:.40}'") from None


def _models_path(namespace: str) -> str:
    return f"/api/v1/thaw/namespaces/{quote(namespace, safe='')}/models"


def _show_models(found: dict[str, Any]) -> None:
    rows = table("models below", "allowed for")
    for prefix in found["for_all"]:
        rows.add_row(prefix, "all namespaces (THAW_MODELS)")
    for prefix in found["own"]:
        rows.add_row(prefix, found["namespace"])
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


_BEGINS_S: Final = 2.0
"""The scheduler hears of a drain at once, and its instances say how many requests they have as soon as they drain."""
_LONG_POLL_S: Final = 20.0

Name = Annotated[str, typer.Argument(metavar="HOST", help="A host, as thaw host list names it.")]


@host_app.command("drain")
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


@host_app.command("undrain")
def undrain(host: Name) -> None:
    """Let new functions start on a drained host again."""
    client().delete(_drain_path(host))
    print(f"{host} takes starts")


def _drain_path(host: str) -> str:
    return f"/api/v1/thaw/hosts/{quote(host, safe='')}/drain"
