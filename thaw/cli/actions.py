"""``thaw action create|update|get|list|delete|invoke``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from thaw.cli.context import client, err, out, print_json, say_ok

app = typer.Typer(no_args_is_help=True, help="Deploy and call functions.")

Name = Annotated[str, typer.Argument(help="The function: NAME or /NAMESPACE/NAME.")]
File = Annotated[Path | None, typer.Argument(help="Its code: FILE.py, or a .zip with __main__.py.")]
Config = Annotated[
    Path | None, typer.Option("--config", help="The config of an LLM function (FILE.json), which has no code.")
]
Kind = Annotated[str | None, typer.Option(help="Runtime, for example python:3.11.")]
Main = Annotated[str | None, typer.Option(help="Name of the entry function (default: main).")]
Params = Annotated[list[str] | None, typer.Option("--param", "-p", help="A parameter: KEY VALUE. Repeatable.")]
ParamFile = Annotated[
    list[Path] | None, typer.Option("--param-file", "-P", help="A file with a JSON object of parameters. Repeatable.")
]
Notes = Annotated[list[str] | None, typer.Option("--annotation", "-a", help="An annotation: KEY VALUE. Repeatable.")]
Timeout = Annotated[int | None, typer.Option("--timeout", "-t", help="Time limit of a run, in milliseconds.")]
Memory = Annotated[int | None, typer.Option("--memory", "-m", help="Memory limit, in MB.")]
Concurrency = Annotated[
    int | None, typer.Option("--concurrency", "-c", help="Most requests at the same time in one container.")
]
Stages = Annotated[int | None, typer.Option(help="Force this number of pipeline stages (LLM functions only).")]
Force = Annotated[bool, typer.Option("--force", help="Deploy it even if a check says that its model would not start.")]


@app.command()
def create(
    name: Name,
    file: File = None,
    config: Config = None,
    kind: Kind = None,
    main: Main = None,
    param: Params = None,
    param_file: ParamFile = None,
    annotation: Notes = None,
    timeout: Timeout = None,
    memory: Memory = None,
    concurrency: Concurrency = None,
    stages: Stages = None,
    force: Force = False,
) -> None:
    """Deploy a new function."""
    from thaw.cli.deploy import Deployment, action_body
    from thaw.errors import BadRequest

    if file is None and config is None:
        raise BadRequest(
            "there is nothing to deploy", hint="thaw action create NAME FILE.py, or NAME --config FILE.json"
        )
    body = action_body(
        Deployment(file, config, kind, main, param, param_file, annotation, timeout, memory, concurrency, stages)
    )
    _put(name, body, overwrite=False, force=force, done="created")


@app.command()
def update(
    name: Name,
    file: File = None,
    config: Config = None,
    kind: Kind = None,
    main: Main = None,
    param: Params = None,
    param_file: ParamFile = None,
    annotation: Notes = None,
    timeout: Timeout = None,
    memory: Memory = None,
    concurrency: Concurrency = None,
    stages: Stages = None,
    force: Force = False,
) -> None:
    """Change a function, or deploy it if it does not exist.  Options that are left out keep their values."""
    from thaw.cli.deploy import Deployment, action_body

    body = action_body(
        Deployment(file, config, kind, main, param, param_file, annotation, timeout, memory, concurrency, stages)
    )
    _put(name, body, overwrite=True, force=force, done="updated")


def _put(name: str, body: dict[str, Any], *, overwrite: bool, force: bool, done: str) -> None:
    from thaw.cli.client import action_path
    from thaw.cli.preflight import say_notes

    made = client().put(action_path(name), body, overwrite=overwrite, force=True if force else None)
    say_notes(made.get("preflight"))
    say_ok(f"{done} action {made.get('name', name)} {made.get('version', '')}".rstrip())


@app.command()
def get(name: Name, save: Annotated[bool, typer.Option(help="Print only the code.")] = False) -> None:
    """Print a function as JSON, and say what serves a model now."""
    from thaw.cli.client import action_path

    found = client().get(action_path(name), code=save)
    if save:
        print(found.get("exec", {}).get("code", ""), end="")
        return
    say_ok(f"got action {found.get('name', name)}{_served_by(found.get('instances', []))}")
    print_json(found)


def _served_by(instances: list[dict[str, Any]]) -> str:
    """Name what serves a model now, each kind once: "pipeline of 4, becoming 2 workers, of version 3f0c…"."""
    kinds = Counter(map(_kind_of, instances))
    said = [kind if n == 1 else f"{n} × {kind}" for kind, n in sorted(kinds.items())]
    return f": {'; '.join(said)}" if said else ""


def _kind_of(instance: dict[str, Any]) -> str:
    from thaw.versions import short

    stages = instance.get("stages", 1)
    kind = "one worker" if stages == 1 else f"pipeline of {stages}"
    becoming = {None: "", 1: ", becoming one worker"}
    n = instance.get("becoming")
    version = short(instance.get("modelVersion", ""))
    return kind + becoming.get(n, f", becoming {n} workers") + (f", of version {version}" if version else "")


@app.command("list")
def list_(
    limit: Annotated[int, typer.Option("--limit", "-l", help="Show at most this many; 0 means 200.")] = 30,
    skip: Annotated[int, typer.Option("--skip", "-s", help="Leave out this many at the beginning.")] = 0,
) -> None:
    """List the functions of this namespace, the one changed last first."""
    from thaw.cli.tables import moment, show, table

    rows = table("action", "version", "kind", "timeout", "memory", "updated")
    for action in client().get("actions", limit=limit, skip=skip):
        kind = next((a["value"] for a in action.get("annotations", []) if a["key"] == "exec"), "")
        limits = action.get("limits", {})
        rows.add_row(
            f"/{action['namespace']}/{action['name']}",
            action.get("version", ""),
            str(kind),
            f"{limits.get('timeout', '')} ms",
            f"{limits.get('memory', '')} MB",
            moment(action.get("updated")),
        )
    show(rows)


@app.command()
def delete(name: Name) -> None:
    """Delete a function."""
    from thaw.cli.client import action_path

    client().delete(action_path(name))
    say_ok(f"deleted action {name}")


@app.command()
def logs(name: Name) -> None:
    """Print what its containers wrote to stderr before they ended, within the last hour."""
    from thaw.cli.client import action_path
    from thaw.cli.tables import moment

    found = client().get(action_path(name).replace("actions/", "logs/", 1))
    for output in found["outputs"]:
        stage = f", stage {output['stage']} of {output['n_stages']}" if output["n_stages"] > 1 else ""
        why = output["reason"] or "released"
        out().print(
            f"[bold]{output['instance_id'][:12]}[/bold] on {output['host_id']}{stage}, ended "
            f"{moment(output['ended_wall_ms'])}:",
            end=" ",
            soft_wrap=True,
        )
        out().print(why, markup=False, soft_wrap=True)
        print(output["stderr"])
    if found["unanswered"]:
        err().print(f"note: {', '.join(found['unanswered'])} did not answer and may have more", markup=False)
    if not found["outputs"]:
        err().print("no container of it has ended within the last hour with anything on stderr", markup=False)


@app.command()
def invoke(
    name: Name,
    param: Params = None,
    param_file: ParamFile = None,
    blocking: Annotated[
        bool, typer.Option("--blocking", "-b", help="Wait until the call ends, and print its record.")
    ] = False,
    result: Annotated[
        bool, typer.Option("--result", "-r", help="Wait until the call ends, and print only its result.")
    ] = False,
) -> None:
    """Call a function.  Without --blocking or --result the call is queued, and its activation id is printed."""
    from thaw.cli.client import action_path
    from thaw.cli.params import parameters

    api = client()
    status, body = api.invoke(
        action_path(name), parameters(param, param_file), blocking=blocking or result, result=result
    )
    activation = body.get("activationId", "") if isinstance(body, dict) else ""
    if status == 202:
        waited = " is still running" if blocking or result else ""
        say_ok(f"invoked {name}{waited} with id {activation}")
        return
    if not result:
        say_ok(f"invoked {name} with id {activation}")
    print_json(body)
    if status >= 400:
        raise typer.Exit((status - 256) % 256)
