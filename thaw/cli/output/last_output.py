"""Prints the last stderr output of a function's containers that have ended, and the output of its calls as they end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thaw.cli.context import err, out

if TYPE_CHECKING:
    from thaw.cli.platform_api.client import Client


def show_last_output(api: Client, name: str) -> None:
    from thaw.cli.output.tables import moment
    from thaw.cli.platform_api.client import entity_path

    found = api.get(entity_path("logs", name))
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


def show_calls(api: Client, name: str) -> None:
    """Until Ctrl-C."""
    from thaw.cli.platform_api.following import ended

    parts = name.lstrip("/").split("/")
    bare = "/".join(parts[1:] if name.startswith("/") else parts)
    for record in ended(api, name=bare, passed_over=say_passed_over):
        for line in record["logs"]:
            print(line, flush=True)


def say_passed_over(n_calls: int) -> None:
    err().print(f"note: {n_calls} calls ended too fast to be followed: thaw activation list", markup=False)
