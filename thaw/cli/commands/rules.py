"""``thaw rule create|update|get|list|status|enable|disable|delete``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from thaw.cli.context import client, say_ok
from thaw.cli.lists import Limit, NameSort, Skip, by_name
from thaw.cli.output.shown import Field, Summary, show_entity

app = typer.Typer(no_args_is_help=True, help="Join triggers to functions.")

Name = Annotated[str, typer.Argument(help="The rule: NAME or /NAMESPACE/NAME.")]
Trigger = Annotated[str, typer.Argument(help="The trigger.")]
Action = Annotated[str, typer.Argument(help="The function that it calls.")]


@app.command()
def create(name: Name, trigger: Trigger, action: Action) -> None:
    """Have a function called whenever a trigger is fired."""
    _put(name, trigger, action, "created", overwrite=False)


@app.command()
def update(name: Name, trigger: Trigger, action: Action) -> None:
    """Change a rule, or make it if it does not exist."""
    _put(name, trigger, action, "updated", overwrite=True)


@app.command()
def get(name: Name, field: Field = None, summary: Summary = False) -> None:
    """Print a rule as JSON."""
    show_entity("rule", client().get(_path(name)), field, summary)


@app.command()
def status(name: Name) -> None:
    """Say whether a rule is active."""
    found = client().get(_path(name))
    say_ok(f"rule {found.get('name', name)} is {found.get('status')}")


@app.command()
def enable(name: Name) -> None:
    """Switch a rule on."""
    _switch(name, "active", "enabled")


@app.command()
def disable(name: Name) -> None:
    """Switch a rule off."""
    _switch(name, "inactive", "disabled")


@app.command("list")
def list_(limit: Limit = 30, skip: Skip = 0, name_sort: NameSort = False) -> None:
    """List the rules of this namespace, the one changed last first."""
    from thaw.cli.output.tables import show, table

    rows = table("rule", "status", "trigger", "action")
    found = by_name(client().get("rules", limit=limit, skip=skip), name_sort)
    for rule in found:
        rows.add_row(
            f"/{rule['namespace']}/{rule['name']}", rule["status"], _whole(rule["trigger"]), _whole(rule["action"])
        )
    show(rows, found)


@app.command()
def delete(
    name: Name, _disable: Annotated[bool, typer.Option("--disable", help="As in wsk; not needed here.")] = False
) -> None:
    """Delete a rule, active or not."""
    client().delete(_path(name))
    say_ok(f"deleted rule {name}")


def _put(name: str, trigger: str, action: str, done: str, *, overwrite: bool) -> None:
    body = {"trigger": _qualified(trigger), "action": _qualified(action)}
    made = client().put(_path(name), body, overwrite=overwrite)
    say_ok(f"{done} rule {made.get('name', name)} {made.get('version', '')}".rstrip())


def _switch(name: str, wanted: str, done: str) -> None:
    client().post(_path(name), {"status": wanted})
    say_ok(f"{done} rule {name}")


def _path(name: str) -> str:
    from thaw.cli.platform_api.client import entity_path

    return entity_path("rules", name)


def _qualified(name: str) -> str:
    return name if name.startswith("/") else f"/_/{name}"


def _whole(named: dict[str, Any]) -> str:
    return f"/{named['path']}/{named['name']}"
