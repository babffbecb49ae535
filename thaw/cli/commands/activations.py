"""``thaw activation list|get|poll|logs|result|explain``."""

from __future__ import annotations

import re
import sys
import time
from http import HTTPStatus
from typing import Annotated, Any, Final

import typer

from thaw.cli.context import client, err, out, print_json
from thaw.cli.lists import Limit, Skip
from thaw.cli.output.shown import Field, Summary, show_entity

app = typer.Typer(no_args_is_help=True, help="Show the records of calls (activations).")

_STAMP: Final = re.compile(r"\A\S+ +(stdout|stderr): ?")
"""The part before the text in each line of a log."""

_HELD_S: Final = 20.0

Id = Annotated[str | None, typer.Argument(help="Activation id (32 hex digits).")]
Last = Annotated[bool, typer.Option("--last", "-l", help="Take the newest activation.")]


@app.command("list")
def list_(
    name: Annotated[str | None, typer.Argument(help="Show only activations of this action.")] = None,
    limit: Limit = 30,
    skip: Skip = 0,
    since: Annotated[int | None, typer.Option(help="Show none before this time (milliseconds since 1970).")] = None,
    upto: Annotated[int | None, typer.Option(help="Show none after this time (milliseconds since 1970).")] = None,
    full: Annotated[bool, typer.Option("--full", "-f", help="Print the whole records as JSON.")] = False,
) -> None:
    """List activations, the newest first."""
    from thaw.cli.output.tables import moment, show, table

    found = client().get("activations", name=name, limit=limit, skip=skip, since=since, upto=upto, docs=full or None)
    if full:
        print_json(found)
        return
    rows = table("datetime", "activation id", "start", "duration", "status", "action")
    for record in found:
        notes = {a["key"]: a["value"] for a in record.get("annotations", [])}
        rows.add_row(
            moment(record.get("start")),
            record["activationId"],
            _start(notes),
            f"{record.get('duration', 0)} ms",
            _status(record),
            record["name"],
        )
    show(rows, found)


def _start(notes: dict[str, Any]) -> str:
    return str(notes.get("start") or notes.get("startMode") or ("cold" if "initTime" in notes else "warm"))


def _status(record: dict[str, Any]) -> str:
    texts = ("success", "application error", "developer error", "internal error")
    code = record.get("statusCode", 0)
    return texts[code] if isinstance(code, int) and 0 <= code < len(texts) else str(code)


@app.command()
def get(
    activation_id: Id = None,
    field: Field = None,
    last: Last = False,
    summary: Summary = False,
    logs: Annotated[bool, typer.Option("--logs", "-g", help="Print only its logs, without times and streams.")] = False,
    wait: Annotated[float, typer.Option("--wait", "-w", help="Wait for this many seconds while it still runs.")] = 0.0,
) -> None:
    """Print the whole record as JSON."""
    if last and activation_id is not None and field is None:
        activation_id, field = None, activation_id  # the id was left out
    found = _ended(_chosen(activation_id, last), wait)
    if logs:
        _print_logs(found["logs"], strip=True)
        return
    show_entity("activation", found, field, summary, name=found["activationId"])


def _ended(activation_id: str, wait_s: float) -> dict[str, Any]:
    """The record of an activation, which exists once the activation has ended; the gateway holds the request for it.
    One that does not is asked again after a pause."""
    from thaw.cli.platform_api.client import ApiError
    from thaw.cli.platform_api.pauses import pause

    until_s = time.monotonic() + wait_s
    while True:
        asked_s = time.monotonic()
        held_s = min(_HELD_S, max(0.0, until_s - asked_s))
        try:
            found: dict[str, Any] = client().get(
                f"activations/{activation_id}", wait_s=f"{held_s:.3f}" if held_s else None
            )
            return found
        except ApiError as e:
            now_s = time.monotonic()
            if e.http_status not in (HTTPStatus.NOT_FOUND, HTTPStatus.TOO_MANY_REQUESTS) or now_s >= until_s:
                raise
            if now_s - asked_s < held_s / 2:
                pause(until_s - now_s)


@app.command()
def poll(
    name: Annotated[str | None, typer.Argument(help="Only the calls of this function.")] = None,
    exit_after: Annotated[
        float | None, typer.Option("--exit", "-e", help="End after so many seconds, not at Ctrl-C.")
    ] = None,
    since_seconds: Annotated[int, typer.Option("--since-seconds", "-s", help="Begin so many seconds ago.")] = 0,
    since_minutes: Annotated[int, typer.Option("--since-minutes", "-m", help="Begin so many minutes ago.")] = 0,
    since_hours: Annotated[int, typer.Option("--since-hours", help="Begin so many hours ago.")] = 0,
    since_days: Annotated[int, typer.Option("--since-days", "-d", help="Begin so many days ago.")] = 0,
) -> None:
    """Print the logs of calls as they end."""
    from thaw.cli.output.last_output import say_passed_over
    from thaw.cli.platform_api.following import ended

    back_s = since_seconds + 60 * since_minutes + 3600 * since_hours + 86_400 * since_days
    since_ms = max(0, round(1000 * (time.time() - back_s))) if back_s else None
    err().print("Enter Ctrl-c to exit.\nPolling for activation logs", markup=False)
    for record in ended(client(), name=name, since_ms=since_ms, for_s=exit_after, passed_over=say_passed_over):
        print(f"\nActivation: '{record['name']}' ({record['activationId']})")
        print_json(record["logs"])
        sys.stdout.flush()


@app.command()
def logs(
    activation_id: Id = None,
    last: Last = False,
    strip: Annotated[
        bool, typer.Option("--strip", "-r", help="Leave the time and the stream of each line out.")
    ] = False,
) -> None:
    """Print what the function wrote to stdout and stderr."""
    _print_logs(client().get(f"activations/{_chosen(activation_id, last)}/logs")["logs"], strip=strip)


def _print_logs(lines: list[str], *, strip: bool) -> None:
    for line in lines:
        print(_STAMP.sub("", line) if strip else line)


@app.command()
def result(activation_id: Id = None, last: Last = False) -> None:
    """Print only the result."""
    print_json(client().get(f"activations/{_chosen(activation_id, last)}/result").get("result"))


@app.command()
def explain(activation_id: Id = None, last: Last = False) -> None:
    """Draw where the time of an activation went: its phases, their evidence, the bytes, and the bound."""
    from thaw.cli.explanation.explain import show

    chosen = _chosen(activation_id, last)
    show(out(), client().get(f"activations/{chosen}/trace"), chosen)


def _chosen(activation_id: str | None, last: bool) -> str:
    from thaw.errors import BadRequest, NotFound
    from thaw.ids import is_activation_id

    if activation_id is None and not last:
        raise BadRequest("no activation was named", hint="give its id, or --last")
    if activation_id is not None:
        if not is_activation_id(activation_id):
            raise BadRequest(
                f"{activation_id!r} is not an activation id", hint="an id has 32 hex digits: thaw activation list"
            )
        return activation_id
    found = client().get("activations", limit=1)
    if not found:
        raise NotFound("there is no activation yet", hint="thaw action invoke NAME")
    return str(found[0]["activationId"])
