"""``thaw namespace``: lists namespaces, their content and usage, and the models that they may run."""

from __future__ import annotations

from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from thaw.cli.context import client
from thaw.cli.output.tables import show, table
from thaw.errors import BadRequest
from thaw.quotas import NAMES, setting_of

app = typer.Typer(no_args_is_help=True, help="Show namespaces, what they hold, use and may run.")

_KINDS: Final = ("packages", "actions", "triggers", "rules")


@app.command("get")
def get(
    namespace: Annotated[str, typer.Argument(help="The namespace; without it, the API key's.")] = "_",
    name_sort: Annotated[bool, typer.Option("--name-sort", "-n", help="Sort by name, not by the last change.")] = False,
) -> None:
    """List the packages, functions, triggers and rules of a namespace."""
    from thaw.cli.context import globals_, print_json
    from thaw.cli.lists import by_name
    from thaw.cli.platform_api.client import entity_path

    api, place = client(), f"/{namespace.strip('/')}"
    found = {kind: by_name(api.get(entity_path(kind, place), limit=0), name_sort) for kind in _KINDS}
    if globals_.json:
        print_json(found)
        return
    print(f"Entities in namespace: {'default' if place == '/_' else place[1:]}")
    for kind, entities in found.items():
        print(kind)
        for entity in entities:
            print(f"/{entity['namespace']}/{entity['name']}")


@app.command("list")
def namespaces() -> None:
    """List the namespaces of the API key."""
    print("namespaces")
    for name in client().get("/api/v1/namespaces"):
        print(name)


@app.command("usage")
def usage() -> None:
    """List what every namespace has: keys, actions, records that are kept, instances (needs an operator's key)."""
    columns = ("namespace", "keys", "actions", "activations", "instances")
    rows = table(*columns)
    for one in client().get("/api/v1/thaw/namespaces")["namespaces"]:
        rows.add_row(*(str(one[name]) for name in columns))
    show(rows)


Prefixes = Annotated[
    list[str], typer.Argument(metavar="PREFIX...", help="Beginnings of models' URIs, for example s3://team-a/.")
]
Tenant = Annotated[str, typer.Argument(metavar="NAMESPACE", help="The namespace.")]


@app.command("models")
def models(namespace: Tenant) -> None:
    """List what a namespace may run (needs an operator's key)."""
    _show_models(client().get(_models_path(namespace)))


@app.command("allow-models")
def allow_models(namespace: Tenant, prefixes: Prefixes) -> None:
    """Let a namespace run the models below these prefixes, too (needs an operator's key)."""
    _show_models(client().put(_models_path(namespace), {"prefixes": prefixes}))


@app.command("disallow-models")
def disallow_models(namespace: Tenant, prefixes: Prefixes) -> None:
    """Take prefixes back (needs an operator's key).  What runs goes on, and nothing else starts."""
    _show_models(client().delete(_models_path(namespace), {"prefixes": prefixes}))


def _at_most(what: str) -> Any:
    return typer.Option(metavar="N", help=f"At most so many {what}; 'default' takes the value back.")


@app.command("quota")
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
    kept: Annotated[str | None, _at_most("instances that its actions keep while nobody calls")] = None,
) -> None:
    """Show what a namespace may have and has, or set some of it (needs an operator's key)."""
    asked = (actions, code_bytes, record_bytes, held, accepted, starts, weight, records, record_age_s, kept)
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
