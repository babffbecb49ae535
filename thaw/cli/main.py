"""Entry point of ``thaw``: the tree of commands, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from thaw import __version__
from thaw.cli import actions, activations, chat, dev, hosts, keys, models, packages, properties_cli, rules, triggers
from thaw.cli.context import err, globals_, take_global_options
from thaw.cli.params import join_pairs
from thaw.errors import ThawError

app = typer.Typer(
    name="thaw",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(dev.app, name="dev")
app.add_typer(actions.app, name="action")
app.add_typer(packages.app, name="package")
app.add_typer(triggers.app, name="trigger")
app.add_typer(rules.app, name="rule")
app.add_typer(activations.app, name="activation")
app.add_typer(models.app, name="model")
app.command("chat")(chat.chat)
app.add_typer(hosts.host_app, name="host")
app.add_typer(hosts.namespace_app, name="namespace")
app.add_typer(keys.app, name="key")
app.add_typer(properties_cli.app, name="property")


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
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run container functions and large language models that start from zero.

    Target: the platform that --apihost and --auth name (anywhere on the line). Without them, the one in the file that
    WSK_CONFIG_FILE names, else in ~/.wskprops, else the platform on this machine (thaw dev up).
    """
    globals_.apihost = apihost or globals_.apihost
    globals_.auth = auth or globals_.auth


def exit_code(error: ThawError) -> int:
    """wsk's rule: the HTTP status modulo 256, so 404 is 148."""
    return (error.http_status - 256) % 256


def main() -> None:
    try:
        app(args=join_pairs(take_global_options(sys.argv[1:])))
    except ThawError as e:
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
