"""Entry point of ``thaw``: the tree of commands, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from thaw import __version__
from thaw.cli import completion
from thaw.cli.commands import (
    actions,
    activations,
    chat,
    dev,
    hosts,
    keys,
    models,
    namespaces,
    packages,
    properties,
    rules,
    scaling,
    top,
    triggers,
)
from thaw.cli.context import err, globals_, take_global_options
from thaw.cli.params import join_pairs
from thaw.cli.platform_api.unreachable import Unreachable
from thaw.cli.unknown import Group, UnknownCommand
from thaw.errors import ThawError

app = typer.Typer(
    name="thaw",
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(dev.app, name="dev", cls=Group)
actions.app.command("warm")(scaling.warm)
actions.app.command("scale")(scaling.scale)
app.add_typer(actions.app, name="action", cls=Group)
app.add_typer(packages.app, name="package", cls=Group)
app.add_typer(triggers.app, name="trigger", cls=Group)
app.add_typer(rules.app, name="rule", cls=Group)
app.add_typer(activations.app, name="activation", cls=Group)
app.add_typer(models.app, name="model", cls=Group)
app.command("chat")(chat.chat)
app.command("top")(top.top)
app.add_typer(hosts.app, name="host", cls=Group)
app.add_typer(namespaces.app, name="namespace", cls=Group)
app.command("list")(namespaces.get)
app.add_typer(keys.app, name="key", cls=Group)
app.add_typer(properties.app, name="property", cls=Group)
app.command("completion")(completion.completion)


def _version(asked: bool) -> None:
    if asked:
        print(f"thaw {__version__}")
        raise typer.Exit


@app.callback()
def root(
    apihost: Annotated[
        str | None, typer.Option(help="API host to use instead of the one in the property file.")
    ] = None,
    auth: Annotated[
        str | None,
        typer.Option("--auth", "-u", help="API key (uuid:key) to use instead of the one in the property file."),
    ] = None,
    cert: Annotated[
        str | None, typer.Option(help="A client's certificate (PEM), for a platform that asks for one.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="The key of that certificate (PEM).")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", "-i", help="Take any certificate from the platform.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print requests and answers on stderr, without the API key.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", "-d", help="As --verbose, and print where in the program an error comes from.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print lists as JSON instead of tables.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run container functions and large language models that start from zero.

    Target: the platform that --apihost and --auth name. Without them, the one in the file that WSK_CONFIG_FILE names,
    else in ~/.wskprops, else the platform on this machine (thaw dev up). The options below may stand anywhere on the
    line.
    """
    # they stand here for the help and for completion; take_global_options has taken all but those in a word with others
    given = {"apihost": apihost, "auth": auth, "cert": cert, "key": key}
    switches = {"insecure": insecure, "verbose": verbose, "debug": debug, "json": json}
    for name, value in (given | switches).items():
        if value:
            setattr(globals_, name, value)


def exit_code(error: ThawError) -> int:
    """wsk's: 2 for an unknown command, 3 when nobody answers, else the HTTP status modulo 256, so 404 is 148."""
    if isinstance(error, UnknownCommand):
        return 2
    if isinstance(error, Unreachable):
        return 3
    return (error.http_status - 256) % 256


def main() -> None:
    if completion.VARIABLE in os.environ:
        completion.prepare()
    try:
        app(args=join_pairs(take_global_options(sys.argv[1:])), prog_name="thaw")
    except ThawError as e:
        if globals_.debug:
            import traceback

            traceback.print_exc()
        err().print(f"[red]error:[/red] {_one_line(e.message)}", markup=True, soft_wrap=True)
        if e.hint:
            err().print(f"hint: {_one_line(e.hint)}", markup=False, soft_wrap=True)
        sys.exit(exit_code(e))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output has closed it, so nothing more can be written
        sys.exit(141)


def _one_line(text: str) -> str:
    from rich.markup import escape

    return escape(" ".join(text.split()))


if __name__ == "__main__":
    main()
