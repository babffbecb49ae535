"""``thaw trigger create|update|get|fire|list|delete``.  A feed is told of its trigger here, as wsk does it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from thaw.cli.commands.packages import Notes, ParamFile, Params, entity_body
from thaw.cli.context import client, say_ok
from thaw.cli.lists import Limit, NameSort, Skip, by_name
from thaw.cli.output.shown import Field, Summary, show_entity

app = typer.Typer(no_args_is_help=True, help="Make triggers, and fire them.")

Name = Annotated[str, typer.Argument(help="The trigger: NAME or /NAMESPACE/NAME.")]
Feed = Annotated[
    str | None,
    typer.Option("--feed", "-f", help="The function that feeds the trigger; it gets the parameters."),
]


@app.command()
def create(
    name: Name, feed: Feed = None, param: Params = None, param_file: ParamFile = None, annotation: Notes = None
) -> None:
    """Make a trigger.  If its feed refuses it, it is deleted again."""
    from thaw.errors import ThawError

    body = entity_body(param, param_file, annotation)
    if feed is None:
        _put(name, body, "created", overwrite=False)
        return
    given = {p["key"]: p["value"] for p in body.pop("parameters", [])}
    body["annotations"] = [*body.get("annotations", []), {"key": "feed", "value": feed}]
    made = _put(name, body, "created", overwrite=False)
    try:
        _tell_feed(feed, "CREATE", made, given)
    except ThawError:
        client().delete(_path(name))
        raise


@app.command()
def update(name: Name, param: Params = None, param_file: ParamFile = None, annotation: Notes = None) -> None:
    """Change a trigger, or make it if it does not exist.  The parameters of one with a feed go to the feed."""
    from thaw.cli.platform_api.client import ApiError

    body = entity_body(param, param_file, annotation)
    try:
        feed = _feed_of(client().get(_path(name)))
    except ApiError as e:
        if e.http_status != 404:
            raise
        feed = None
    given = None if feed is None else {p["key"]: p["value"] for p in body.pop("parameters", [])}
    made = _put(name, body, "updated", overwrite=True)
    if feed is not None and given is not None:
        _tell_feed(feed, "UPDATE", made, given)


@app.command()
def get(name: Name, field: Field = None, summary: Summary = False) -> None:
    """Print a trigger as JSON, or what its feed says of it."""
    found = client().get(_path(name))
    feed = _feed_of(found)
    told = found if feed is None or field is not None or summary else _tell_feed(feed, "READ", found, {})
    show_entity("trigger", told, field, summary, name=found.get("name", name))


@app.command()
def fire(name: Name, param: Params = None, param_file: ParamFile = None) -> None:
    """Fire a trigger: call the functions of its active rules."""
    from thaw.cli.params import parameters

    status, body = client().invoke(_path(name), parameters(param, param_file))
    if status == 204:
        say_ok(f"triggered {name}, which has no active rule")
    else:
        say_ok(f"triggered {name} with id {body.get('activationId', '')}")


@app.command("list")
def list_(limit: Limit = 30, skip: Skip = 0, name_sort: NameSort = False) -> None:
    """List the triggers of this namespace, the one changed last first."""
    from thaw.cli.output.tables import moment, show, table

    rows = table("trigger", "version", "feed", "updated")
    found = by_name(client().get("triggers", limit=limit, skip=skip), name_sort)
    for trigger in found:
        name = f"/{trigger['namespace']}/{trigger['name']}"
        rows.add_row(name, trigger.get("version", ""), _feed_of(trigger) or "", moment(trigger.get("updated")))
    show(rows, found)


@app.command()
def delete(name: Name) -> None:
    """Delete a trigger, and tell its feed.  Its rules stay and are inactive."""
    found = client().get(_path(name))
    feed = _feed_of(found)
    if feed is not None:
        _tell_feed(feed, "DELETE", found, {})
    client().delete(_path(name))
    say_ok(f"deleted trigger {name}")


def _path(name: str) -> str:
    from thaw.cli.platform_api.client import entity_path

    return entity_path("triggers", name)


def _put(name: str, body: dict[str, Any], done: str, *, overwrite: bool) -> dict[str, Any]:
    made: dict[str, Any] = client().put(_path(name), body, overwrite=overwrite)
    say_ok(f"{done} trigger {made.get('name', name)} {made.get('version', '')}".rstrip())
    return made


def _feed_of(trigger: dict[str, Any]) -> str | None:
    return next((str(a["value"]) for a in trigger.get("annotations", []) if a["key"] == "feed"), None)


def _tell_feed(feed: str, event: str, trigger: dict[str, Any], given: dict[str, Any]) -> Any:
    """Call the feed for one event of the trigger, and return its answer.  Raises ApiError when it refuses."""
    from thaw.cli.platform_api.client import ApiError, action_path

    api = client()
    named = {"lifecycleEvent": event, "triggerName": f"/{trigger['namespace']}/{trigger['name']}", "authKey": api.auth}
    status, body = api.invoke(action_path(feed), {**given, **named}, blocking=True, result=True)
    if status >= 400:
        said = body.get("error") if isinstance(body, dict) else body
        raise ApiError(status, f"the feed {feed} refused {event}: {said}", hint="thaw activation logs --last")
    return body
