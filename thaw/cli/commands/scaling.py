"""``thaw action warm`` and ``thaw action scale``."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final

import typer

from thaw.cli.context import client, globals_, print_json, say_ok

_HELD_S: Final = 20.0

Name = Annotated[str, typer.Argument(help="The function: NAME or /NAMESPACE/NAME.")]


def warm(
    name: Name,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait until it is ready.")] = False,
) -> None:
    """Start an instance before anybody calls, and say when it will answer. It ends after its keep-alive."""
    from thaw.cli.output.tables import duration
    from thaw.cli.platform_api.pauses import pause

    api, path = client(), _path("warm", name)
    found = api.post(path, {}, wait_s=_HELD_S if wait else None)
    while wait and found["state"] != "ready":
        asked_s = time.monotonic()
        found = api.post(path, {}, wait_s=_HELD_S)
        if found["state"] != "ready" and time.monotonic() - asked_s < _HELD_S / 2:
            pause(_HELD_S)  # the gateway is about to end, and another one holds the request
    if globals_.json:
        print_json(found)
        return
    hosts = ", ".join(found["hosts"])
    if found["state"] == "ready":
        say_ok(f"{name} is warm on {hosts}{', and busy' if found.get('busy') else ''}")
        return
    expected_s = found["expected_s"]
    when = f", and its first answer is expected in {duration(expected_s)}" if expected_s else ""
    say_ok(f"{name} starts on {hosts}{when}")


def scale(
    name: Name,
    least: Annotated[int | None, typer.Option("--min", help="Keep at least so many instances.")] = None,
    most: Annotated[int | None, typer.Option("--max", help="Start at most so many instances.")] = None,
    keep_alive: Annotated[
        float | None, typer.Option("--keep-alive", help="Keep an idle instance for so many seconds, from its start on.")
    ] = None,
    buffer: Annotated[int | None, typer.Option(help="Idle instances beyond the need (absent in this version).")] = None,
) -> None:
    """Show how many instances a function has, or change that without a new version of the function. If a ModelFunction
    of a cluster made the function, that one is out of sync until its next change."""
    from thaw.cli.output.tables import duration, show, table
    from thaw.errors import BadRequest

    if buffer is not None:
        raise BadRequest(
            "there is no buffer of idle instances in this version",
            hint="--min keeps instances; of a model the scheduler starts more ahead of its requests by itself",
        )
    given = {"min_instances": least, "max_instances": most, "keep_alive_s": keep_alive}
    changes = {field: value for field, value in given.items() if value is not None}
    path = _path("scaling", name)
    found: dict[str, Any] = client().put(path, changes) if changes else client().get(path)
    rows = table("action", "version", "at least", "at most", "keep-alive")
    least_most = (str(found["min_instances"]), str(found["max_instances"]))
    rows.add_row(f"/{found['action']}", found["version"], *least_most, duration(found["keep_alive_s"]))
    show(rows, found)


def _path(kind: str, name: str) -> str:
    from thaw.cli.platform_api.client import entity_path

    return entity_path(kind, name)
