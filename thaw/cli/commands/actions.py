"""``thaw action create|update|get|list|delete|logs|invoke``."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from thaw.action import REFUSED, UNCHECKED
from thaw.cli.context import client, print_json, say_aside, say_ok
from thaw.cli.lists import Limit, NameSort, Skip, by_name
from thaw.cli.output.shown import Field, Summary, show_entity

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
NoteFile = Annotated[
    list[Path] | None,
    typer.Option("--annotation-file", "-A", help="A file with a JSON object of annotations. Repeatable."),
]
DelNotes = Annotated[list[str] | None, typer.Option("--del-annotation", help="An annotation to take away. Repeatable.")]
Timeout = Annotated[int | None, typer.Option("--timeout", "-t", help="Time limit of a run, in milliseconds.")]
Memory = Annotated[int | None, typer.Option("--memory", "-m", help="Memory limit, in MB.")]
Concurrency = Annotated[
    int | None, typer.Option("--concurrency", "-c", help="Most requests at the same time in one container.")
]
LogSize = Annotated[int | None, typer.Option("--logsize", "-l", help="Most that a run may print, in MB.")]
Web = Annotated[
    str | None,
    typer.Option(help="Answer HTTP requests without a key: true, raw (the request as it came) or false."),
]
WebSecure = Annotated[
    str | None,
    typer.Option(help="Ask web requests for X-Require-Whisk-Auth: a secret, true (one is made) or false."),
]
Sequence = Annotated[
    bool, typer.Option("--sequence", help="FILE names actions, separated by commas, that run one after another.")
]
Copy = Annotated[bool, typer.Option("--copy", help="FILE names an action, which is copied.")]
Docker = Annotated[str | None, typer.Option(help="An image of your own, which FILE, if there is one, is given to.")]
Native = Annotated[bool, typer.Option("--native", help="FILE is a program that openwhisk/dockerskeleton runs.")]
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
    logsize: LogSize = None,
    web: Web = None,
    web_secure: WebSecure = None,
    sequence: Sequence = False,
    annotation_file: NoteFile = None,
    del_annotation: DelNotes = None,
    copy: Copy = False,
    docker: Docker = None,
    native: Native = False,
    force: Force = False,
) -> None:
    """Deploy a new function."""
    from thaw.cli.deploy import SKELETON, Deployment, action_body
    from thaw.errors import BadRequest

    if file is None and config is None and docker is None:
        raise BadRequest(
            "there is nothing to deploy", hint="thaw action create NAME FILE.py, or NAME --config FILE.json"
        )
    body = action_body(
        Deployment(
            None if copy else file,
            config,
            kind,
            main,
            param,
            param_file,
            annotation,
            timeout,
            memory,
            concurrency,
            stages,
            logsize,
            web,
            web_secure,
            sequence,
            annotation_file,
            del_annotation,
            SKELETON if native and docker is None else docker,
        )
    )
    body = _copied(file, body) if copy else body
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
    logsize: LogSize = None,
    web: Web = None,
    web_secure: WebSecure = None,
    sequence: Sequence = False,
    annotation_file: NoteFile = None,
    del_annotation: DelNotes = None,
    copy: Copy = False,
    docker: Docker = None,
    native: Native = False,
    force: Force = False,
) -> None:
    """Change a function, or deploy it if it does not exist.  Options that are left out keep their values."""
    from thaw.cli.deploy import SKELETON, Deployment, action_body

    body = action_body(
        Deployment(
            None if copy else file,
            config,
            kind,
            main,
            param,
            param_file,
            annotation,
            timeout,
            memory,
            concurrency,
            stages,
            logsize,
            web,
            web_secure,
            sequence,
            annotation_file,
            del_annotation,
            SKELETON if native and docker is None else docker,
        )
    )
    body = _copied(file, body) if copy else body
    _put(name, body, overwrite=True, force=force, done="updated")


def _copied(source: Path | None, changes: dict[str, Any]) -> dict[str, Any]:
    """The body that makes a copy of an action, with the changes of the command line."""
    from thaw.cli.platform_api.client import action_path
    from thaw.errors import BadRequest
    from thaw.standing import RESOURCE_MARK

    if source is None:
        raise BadRequest("--copy needs the action to copy", hint="thaw action create NAME --copy ACTION")
    found = client().get(action_path(str(source)))
    body = {
        field: found[field] for field in ("exec", "parameters", "annotations", "limits", "config") if field in found
    }
    own = [p for p in body["annotations"] if p["key"] != RESOURCE_MARK]  # no resource of a cluster makes the copy
    merged = {p["key"]: p for field in (own, changes.get("annotations", [])) for p in field}
    limits = {**body["limits"], **changes.get("limits", {})}
    return {**body, **changes, "annotations": list(merged.values()), "limits": limits}


def _put(name: str, body: dict[str, Any], *, overwrite: bool, force: bool, done: str) -> None:
    from thaw.cli.platform_api.client import action_path
    from thaw.cli.preflight import say_notes, saying_that_it_waits

    with saying_that_it_waits() if "config" in body else nullcontext():
        made = client().put(action_path(name), body, overwrite=overwrite, force=True if force else None)
    say_notes(made.get("preflight"))
    say_ok(f"{done} action {made.get('name', name)} {made.get('version', '')}".rstrip())


@app.command()
def get(
    name: Name,
    field: Field = None,
    summary: Summary = False,
    save: Annotated[bool, typer.Option("--save", help="Write the code to a file of the function's name.")] = False,
    save_as: Annotated[Path | None, typer.Option("--save-as", help="Write the code to this file.")] = None,
    url: Annotated[bool, typer.Option("--url", "-r", help="Print only the URL at which it is called.")] = False,
) -> None:
    """Print a function as JSON, and say on stderr what serves a model now."""
    from thaw.cli.platform_api.client import action_path

    saved = save or save_as is not None
    found = client().get(action_path(name), code=saved)
    if url:
        print(_url(found))
    elif saved:
        from thaw.cli.output.saving import save_code

        say_ok(f"saved action code to {save_code(found, save_as)}")
    else:
        show_entity("action", found, field, summary, served=_served_by(found.get("instances", [])))


def _url(action: dict[str, Any]) -> str:
    """Where a web action answers, else where the action is invoked with a key."""
    from urllib.parse import quote

    namespace, _, package = (quote(part) for part in action["namespace"].partition("/"))
    notes = _annotations(action)
    name = quote(action["name"])
    if notes.get("web-export") is True:
        return f"{client().apihost}/api/v1/web/{namespace}/{package or 'default'}/{name}"
    return f"{client().apihost}/api/v1/namespaces/{namespace}/actions/{package and package + '/'}{name}"


def _annotations(action: dict[str, Any]) -> dict[str, Any]:
    return {a["key"]: a["value"] for a in action.get("annotations", [])}


def _check_of(action: dict[str, Any]) -> str:
    """Return why no engine has checked the function's model, or why the engine would not start it; else nothing."""
    from rich.markup import escape

    notes = _annotations(action)
    said = notes.get(REFUSED) or (f"unchecked: {notes[UNCHECKED]}" if UNCHECKED in notes else "")
    return escape(str(said))


def _served_by(instances: list[dict[str, Any]]) -> str:
    """Name the instances that serve a model now, each kind once: "pipeline of 4, becoming 2 workers, of version
    3f0c…"."""
    kinds = Counter(map(_kind_of, instances))
    said = [kind if n == 1 else f"{n} × {kind}" for kind, n in sorted(kinds.items())]
    return f": {'; '.join(said)}" if said else ""


def _kind_of(instance: dict[str, Any]) -> str:
    from thaw.checkpoints.versions import short

    stages = instance.get("stages", 1)
    kind = "one worker" if stages == 1 else f"pipeline of {stages}"
    becoming = {None: "", 1: ", becoming one worker"}
    n = instance.get("becoming")
    version = short(instance.get("modelVersion", ""))
    return kind + becoming.get(n, f", becoming {n} workers") + (f", of version {version}" if version else "")


@app.command("list")
def list_(
    package: Annotated[
        str | None, typer.Argument(help="Only the actions of this package: NAME or /NAMESPACE/NAME.")
    ] = None,
    limit: Limit = 30,
    skip: Skip = 0,
    name_sort: NameSort = False,
) -> None:
    """List the functions of this namespace, the one changed last first."""
    from thaw.cli.output.tables import moment, show, table
    from thaw.cli.platform_api.client import action_path

    path = "actions" if package is None else f"{action_path(package)}/"
    found = by_name(client().get(path, limit=limit, skip=skip), name_sort)
    checks = [_check_of(action) for action in found]
    column = ("check",) if any(checks) else ()
    rows = table("action", "version", "kind", "timeout", "memory", "updated", *column)
    for action, check in zip(found, checks, strict=True):
        kind = _annotations(action).get("exec", "")
        limits = action.get("limits", {})
        rows.add_row(
            f"/{action['namespace']}/{action['name']}",
            action.get("version", ""),
            str(kind),
            f"{limits.get('timeout', '')} ms",
            f"{limits.get('memory', '')} MB",
            moment(action.get("updated")),
            *([check] if column else []),
        )
    show(rows, found)


@app.command()
def delete(name: Name) -> None:
    """Delete a function."""
    from thaw.cli.platform_api.client import action_path

    client().delete(action_path(name))
    say_ok(f"deleted action {name}")


@app.command()
def logs(
    name: Name,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then print what its calls have printed, as each one ends.")
    ] = False,
) -> None:
    """Print what its containers wrote to stderr before they ended, within the last hour."""
    from thaw.cli.output.last_output import show_calls, show_last_output

    show_last_output(client(), name)
    if follow:
        show_calls(client(), name)


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
    from thaw.cli.params import parameters
    from thaw.cli.platform_api.client import action_path

    api = client()
    status, body = api.invoke(
        action_path(name), parameters(param, param_file), blocking=blocking or result, result=result
    )
    activation = body.get("activationId", "") if isinstance(body, dict) else ""
    if status == 202:
        waits = blocking or result
        unfinished = ", but the request has not yet finished," if waits else ""
        say_ok(f"invoked {name}{unfinished} with id {activation}")
        if waits:
            raise typer.Exit(status)  # as wsk has it
        return
    if not result:
        say_aside(f"invoked {name} with id {activation}")
    print_json(body)
    if status >= 400:
        raise typer.Exit((status - 256) % 256)
