"""``thaw property get|set|unset``: wsk's property file."""

from __future__ import annotations

from typing import Annotated

import typer

from thaw.cli.context import say_ok

app = typer.Typer(no_args_is_help=True, help="Show and set the target: platform and API key.")

ApiHost = Annotated[bool, typer.Option("--apihost", help="The API host.")]
Auth = Annotated[bool, typer.Option("--auth", "-u", help="The API key.")]
Namespace = Annotated[bool, typer.Option("--namespace", help="The namespace.")]
NewApiHost = Annotated[str | None, typer.Option("--apihost", help="The new API host.")]
NewAuth = Annotated[str | None, typer.Option("--auth", "-u", help="The new API key.")]
NewNamespace = Annotated[str | None, typer.Option("--namespace", help="The new namespace.")]


@app.command()
def get(
    apihost: ApiHost = False,
    auth: Auth = False,
    namespace: Namespace = False,
    all_: Annotated[bool, typer.Option("--all", help="Every property (the default).")] = False,
    output: Annotated[
        str, typer.Option("--output", "-o", help="How to print: std, or raw for only the value.")
    ] = "std",
) -> None:
    """Print properties.  The API key is printed only with --auth."""
    from thaw.cli.platform_api.property_file import effective_file, read_properties, resolve
    from thaw.errors import BadRequest

    wanted = {"apihost": apihost, "auth": auth, "namespace": namespace}
    chosen = [] if all_ else [name for name, asked in wanted.items() if asked]
    if output not in ("std", "raw") or (output == "raw" and len(chosen) != 1):
        raise BadRequest(
            f"--output {output} does not fit here", hint="use std, or raw with one of --apihost, --auth and --namespace"
        )
    target = resolve(None, None)
    found = {
        "apihost": target.apihost,
        "auth": target.auth,
        "namespace": read_properties(effective_file()).get("NAMESPACE", "_"),
    }
    if output == "raw":
        print(found[chosen[0]])
        return
    for name in chosen or found:
        hidden = name == "auth" and not chosen and found[name]
        label = {"apihost": "whisk API host", "auth": "whisk auth", "namespace": "whisk namespace"}[name]
        print(f"{label}\t{'(set; --auth prints it)' if hidden else found[name]}")
    if not chosen:
        print(f"read from\t{target.source}")


@app.command("set")
def set_(
    apihost: NewApiHost = None,
    auth: NewAuth = None,
    namespace: NewNamespace = None,
) -> None:
    """Write properties to the file that WSK_CONFIG_FILE names, else to ~/.wskprops (mode 0600)."""
    from thaw.cli.platform_api.property_file import normal_apihost, read_properties, user_file, write_properties
    from thaw.errors import BadRequest

    given = {n: v for n, v in (("APIHOST", apihost), ("AUTH", auth), ("NAMESPACE", namespace)) if v is not None}
    if not given:
        raise BadRequest("no property was named", hint="thaw property set --apihost HOST --auth UUID:KEY")
    if auth is not None and ":" not in auth:
        raise BadRequest("an API key is UUID:KEY", hint="copy the whole key, the colon included")
    if apihost is not None:
        normal_apihost(apihost)
    write_properties(user_file(), read_properties(user_file()) | given)
    for name in given:
        say_ok(f"{name.lower()} is set in {user_file()}")


@app.command()
def unset(
    apihost: ApiHost = False,
    auth: Auth = False,
    namespace: Namespace = False,
) -> None:
    """Remove properties from that file."""
    from thaw.cli.platform_api.property_file import read_properties, user_file, write_properties
    from thaw.errors import BadRequest

    names = {n for n, wanted in (("APIHOST", apihost), ("AUTH", auth), ("NAMESPACE", namespace)) if wanted}
    if not names:
        raise BadRequest("no property was named", hint="thaw property unset --apihost --auth --namespace")
    write_properties(user_file(), {k: v for k, v in read_properties(user_file()).items() if k not in names})
    for name in sorted(names):
        say_ok(f"{name.lower()} is unset in {user_file()}")
