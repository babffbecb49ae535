"""``thaw activation list|get|logs|result|explain``."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Annotated, Any

import typer

from thaw.cli.context import client, out, print_json, say_ok

app = typer.Typer(no_args_is_help=True, help="What happened: the record of every call.")

Id = Annotated[str | None, typer.Argument(help="activation id, 32 hex digits")]
Last = Annotated[bool, typer.Option("--last", "-l", help="the newest activation")]


@app.command("list")
def list_(
    name: Annotated[str | None, typer.Argument(help="of this action only")] = None,
    limit: Annotated[int, typer.Option("--limit", "-l", help="at most; 0 means 200")] = 30,
    skip: Annotated[int, typer.Option("--skip", "-s", help="leave out the first")] = 0,
    since: Annotated[int | None, typer.Option(help="not older than this, epoch milliseconds")] = None,
    upto: Annotated[int | None, typer.Option(help="not newer than this, epoch milliseconds")] = None,
) -> None:
    """Newest first."""
    from thaw.cli.tables import moment, show, table

    found = client().get("activations", name=name, limit=limit, skip=skip, since=since, upto=upto)
    rows = table("datetime", "activation id", "start", "duration", "status", "action")
    for record in found:
        notes = {a["key"]: a["value"] for a in record.get("annotations", [])}
        rows.add_row(moment(record.get("start")), record["activationId"], _start(notes),
                     f"{record.get('duration', 0)} ms", _status(record), record["name"])  # fmt: skip
    show(rows)


def _start(notes: dict[str, Any]) -> str:
    return str(notes.get("start") or notes.get("startMode") or ("cold" if "initTime" in notes else "warm"))


def _status(record: dict[str, Any]) -> str:
    texts = ("success", "application error", "developer error", "internal error")
    code = record.get("statusCode", 0)
    return texts[code] if isinstance(code, int) and 0 <= code < len(texts) else str(code)


@app.command()
def get(
    activation_id: Id = None,
    last: Last = False,
    wait: Annotated[float, typer.Option("--wait", "-w", help="seconds to wait while it still runs")] = 0.0,
) -> None:
    """The whole record as JSON."""
    found = _ended(_chosen(activation_id, last), wait)
    say_ok(f"got activation {found['activationId']}")
    print_json(found)


def _ended(activation_id: str, wait_s: float) -> dict[str, Any]:
    """The record; it exists once the activation has ended.  The API has no call that waits, so this asks again."""
    from thaw.cli.client import ApiError

    until = time.monotonic() + wait_s
    while True:
        try:
            found: dict[str, Any] = client().get(f"activations/{activation_id}")
            return found
        except ApiError as e:
            if e.http_status != HTTPStatus.NOT_FOUND or time.monotonic() >= until:
                raise
            time.sleep(0.25)


@app.command()
def logs(activation_id: Id = None, last: Last = False) -> None:
    """What the function wrote."""
    for line in client().get(f"activations/{_chosen(activation_id, last)}/logs")["logs"]:
        print(line)


@app.command()
def result(activation_id: Id = None, last: Last = False) -> None:
    """The result alone."""
    print_json(client().get(f"activations/{_chosen(activation_id, last)}/result").get("result"))


@app.command()
def explain(activation_id: Id = None, last: Last = False) -> None:
    """Where the time went: every phase over time, its evidence, the bytes, the bound, and the longest gap."""
    from thaw.cli.explain import show
    from thaw.cli.host_reports import links

    chosen = _chosen(activation_id, last)
    api = client()
    show(out(), api.get(f"activations/{chosen}/trace"), chosen, links(api))


def _chosen(activation_id: str | None, last: bool) -> str:
    from thaw.errors import BadRequest, NotFound
    from thaw.ids import is_activation_id

    if activation_id is None and not last:
        raise BadRequest("which activation?", hint="give its id, or --last")
    if activation_id is not None:
        if not is_activation_id(activation_id):
            raise BadRequest(f"{activation_id!r} is not an activation id", hint="32 hex digits: thaw activation list")
        return activation_id
    found = client().get("activations", limit=1)
    if not found:
        raise NotFound("there is no activation yet", hint="thaw action invoke NAME")
    return str(found[0]["activationId"])
