"""The parts that all commands share: the options that may stand anywhere on the line, the consoles, the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from thaw.cli.client import Client


@dataclass(slots=True)
class _Globals:
    apihost: str | None = None
    auth: str | None = None


globals_ = _Globals()
_VALUED = {"--apihost": "apihost", "--auth": "auth", "-u": "auth"}


def take_global_options(argv: list[str]) -> list[str]:
    """Remove ``--apihost X``, ``--auth X``, ``-u X`` (also ``--apihost=X``) wherever they stand, as wsk allows.

    ``property`` has options of the same names, which mean the file's values, so its line stays unchanged.  So do the
    words after ``--``.
    """
    if argv[:1] == ["property"]:
        return argv
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if word == "--":
            return [*rest, word, *words]
        if name not in _VALUED or (equals and name == "-u"):
            rest.append(word)
            continue
        found = value if equals else next(words, None)
        if found is None:
            return [*rest, word]  # typer says that the value is missing
        setattr(globals_, _VALUED[name], found)
    return rest


def client() -> Client:
    from thaw.cli.client import Client
    from thaw.cli.properties import resolve

    return Client(resolve(globals_.apihost, globals_.auth))


def out() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def err() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def print_json(value: object) -> None:
    """Print JSON as wsk does: indented by four, not ASCII only."""
    import json

    print(json.dumps(value, indent=4, ensure_ascii=False))


def say_ok(text: str) -> None:
    out().print(f"[green]ok:[/green] {text}", markup=True, soft_wrap=True)


def say_aside(text: str) -> None:
    """On stderr, where stdout has data that another program may read."""
    err().print(f"[green]ok:[/green] {text}", markup=True, soft_wrap=True)
