"""``thaw key create``, ``list`` and ``revoke``: the API keys of an installation, for its operators."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from thaw.cli.context import client, err, say_ok

app = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys (needs an operator's key).")

_PATH = "/api/v1/thaw/keys"


@app.command()
def create(
    namespace: Annotated[str, typer.Option(help="The namespace in which the key deploys and runs.")],
    operator: Annotated[
        bool,
        typer.Option("--operator", help="The key may also drain hosts, make keys and see all usage."),
    ] = False,
) -> None:
    """Make a key and print it.  It is printed this once: the platform stores its hash only."""
    made = client().post(_PATH, {"namespace": namespace, "role": "operator" if operator else "tenant"})
    print(made["key"])
    err().print(
        f"{'an operator' if operator else 'a tenant'}'s key of the namespace {made['namespace']}; it cannot be "
        f"printed again (thaw key revoke {made['id']} ends it)",
        markup=False,
        soft_wrap=True,
    )


@app.command("list")
def list_(
    namespace: Annotated[str | None, typer.Option(help="Only the keys of this namespace.")] = None,
) -> None:
    """List the keys that work: their ids, namespaces and roles."""
    from thaw.cli.output.tables import moment, show, table

    rows = table("id", "namespace", "role", "created")
    found = client().get(_PATH, namespace=namespace)["keys"]
    for key in found:
        rows.add_row(key["id"], key["namespace"], key["role"], moment(key["created_ms"]))
    show(rows, found)


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, which is the part before its colon.")],
) -> None:
    """End a key.  Gateways other than the one that was asked may take it for one more minute."""
    ended = client().delete(f"{_PATH}/{quote(key_id, safe='')}")
    say_ok(f"the key {ended['id']} of {ended['namespace']} is revoked; every gateway refuses it within a minute")
