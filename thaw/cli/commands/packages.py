"""``thaw package create|update|bind|get|list|delete``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from thaw.cli.context import client, say_ok
from thaw.cli.lists import Limit, NameSort, Skip, by_name
from thaw.cli.output.shown import Field, Summary, show_entity

app = typer.Typer(no_args_is_help=True, help="Group functions, give them parameters, and share them.")

Name = Annotated[str, typer.Argument(help="The package: NAME or /NAMESPACE/NAME.")]
Params = Annotated[list[str] | None, typer.Option("--param", "-p", help="A parameter: KEY VALUE. Repeatable.")]
ParamFile = Annotated[
    list[Path] | None, typer.Option("--param-file", "-P", help="A file with a JSON object of parameters. Repeatable.")
]
Notes = Annotated[list[str] | None, typer.Option("--annotation", "-a", help="An annotation: KEY VALUE. Repeatable.")]
Shared = Annotated[str | None, typer.Option(help="Let every namespace call its functions: yes or no.")]


@app.command()
def create(
    name: Name, param: Params = None, param_file: ParamFile = None, annotation: Notes = None, shared: Shared = None
) -> None:
    """Make a package."""
    _put(name, {**entity_body(param, param_file, annotation), **_sharing(shared)}, "created", overwrite=False)


@app.command()
def update(
    name: Name, param: Params = None, param_file: ParamFile = None, annotation: Notes = None, shared: Shared = None
) -> None:
    """Change a package, or make it if it does not exist.  Options that are left out keep their values."""
    _put(name, {**entity_body(param, param_file, annotation), **_sharing(shared)}, "updated", overwrite=True)


@app.command()
def bind(
    package: Annotated[str, typer.Argument(help="The package to bind: NAME or /NAMESPACE/NAME.")],
    name: Annotated[str, typer.Argument(help="The name that it gets here.")],
    param: Params = None,
    param_file: ParamFile = None,
    annotation: Notes = None,
) -> None:
    """Give a package another name and more parameters."""
    namespace, _, bound = package[1:].partition("/") if package.startswith("/") else ("_", "", package)
    body = {**entity_body(param, param_file, annotation), "binding": {"namespace": namespace, "name": bound}}
    _put(name, body, "created binding", overwrite=False)


@app.command()
def get(name: Name, field: Field = None, summary: Summary = False) -> None:
    """Print a package with its functions as JSON."""
    from thaw.cli.platform_api.client import entity_path

    show_entity("package", client().get(entity_path("packages", name)), field, summary)


@app.command("list")
def list_(
    namespace: Annotated[str, typer.Argument(help="What this namespace shares: /NAMESPACE.")] = "",
    limit: Limit = 30,
    skip: Skip = 0,
    name_sort: NameSort = False,
) -> None:
    """List packages, the one changed last first."""
    from thaw.cli.output.tables import moment, show, table
    from thaw.cli.platform_api.client import entity_path

    rows = table("package", "version", "shared", "stands for", "updated")
    found = by_name(client().get(entity_path("packages", namespace), limit=limit, skip=skip), name_sort)
    for package in found:
        bound = package.get("binding")
        rows.add_row(
            f"/{package['namespace']}/{package['name']}",
            package.get("version", ""),
            "yes" if package.get("publish") else "no",
            f"/{bound['namespace']}/{bound['name']}" if bound else "",
            moment(package.get("updated")),
        )
    show(rows, found)


@app.command()
def delete(
    name: Name, force: Annotated[bool, typer.Option("--force", help="Delete its functions, too.")] = False
) -> None:
    """Delete a package."""
    from thaw.cli.platform_api.client import entity_path

    client().delete(entity_path("packages", name), force=force or None)
    say_ok(f"deleted package {name}")


def entity_body(param: list[str] | None, files: list[Path] | None, annotation: list[str] | None) -> dict[str, Any]:
    """The body of a package or a trigger, with the given options only."""
    from thaw.cli.params import key_values, pairs, parameters

    body: dict[str, Any] = {}
    if param is not None or files is not None:
        body["parameters"] = key_values(parameters(param, files))
    if annotation is not None:
        body["annotations"] = key_values(pairs(annotation))
    return body


def _sharing(shared: str | None) -> dict[str, bool]:
    from thaw.errors import BadRequest

    if shared is None:
        return {}
    if shared not in ("yes", "no"):
        raise BadRequest(f"--shared takes yes or no, not {shared!r}", hint="thaw package update NAME --shared yes")
    return {"publish": shared == "yes"}


def _put(name: str, body: dict[str, Any], done: str, *, overwrite: bool) -> None:
    from thaw.cli.platform_api.client import entity_path

    made = client().put(entity_path("packages", name), body, overwrite=overwrite)
    what = "" if done.endswith("binding") else "package "
    say_ok(f"{done} {what}{made.get('name', name)} {made.get('version', '')}".rstrip())
