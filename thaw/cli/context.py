"""The parts that all commands share: the options that may stand anywhere on the line, the consoles, the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from thaw.cli.params import PAIRED, WITH_PARAMETERS

if TYPE_CHECKING:
    from rich.console import Console

    from thaw.cli.platform_api.client import Client


@dataclass(slots=True)
class _Globals:
    apihost: str | None = None
    auth: str | None = None
    cert: str | None = None
    key: str | None = None
    insecure: bool = False
    verbose: bool = False
    debug: bool = False
    json: bool = False


globals_ = _Globals()
_VALUED: Final = {"--apihost": "apihost", "--auth": "auth", "-u": "auth", "--cert": "cert", "--key": "key"}
_SWITCHES: Final = {
    "-i": "insecure",
    "--insecure": "insecure",
    "-v": "verbose",
    "--verbose": "verbose",
    "-d": "debug",
    "--debug": "debug",
    "--json": "json",
}
_OWN: Final = {
    ("property",): frozenset(_VALUED),
    ("dev",): frozenset(("-d",)),
    ("activation", "poll"): frozenset(("-d",)),
}
"""Words that mean something else after these: the file's values, dev up --detach, and poll --since-days."""


def take_global_options(argv: list[str]) -> list[str]:
    """Remove the options that may stand anywhere on the line, as in wsk: ``--apihost X``, ``--auth X``, ``-u X``,
    ``--cert X``, ``--key X`` (also ``--apihost=X``), ``-i``, ``-v``, ``-d`` and ``--json``.

    In ``-p KEY VALUE`` neither word is taken, and after ``--`` no word is.
    """
    rest: list[str] = []
    words = iter(argv)
    own: frozenset[str] = frozenset()
    n_paired = 0
    for word in words:
        name, equals, value = word.partition("=")
        if word == "--" and not n_paired:
            return [*rest, word, *words]
        switches = () if n_paired else _switches(word, own)
        for switch in switches:
            setattr(globals_, _SWITCHES[switch], True)
        if switches:
            continue
        if n_paired or name not in _VALUED or name in own or (name == "-u" and equals):
            rest.append(word)
            own = _OWN.get(tuple(rest), own)  # the first words that stay are the noun and the verb
            n_paired = n_paired - 1 if n_paired else 2 if word in PAIRED and rest[0] in WITH_PARAMETERS else 0
            continue
        found = value if equals else next(words, None)
        if found is None:
            return [*rest, word]  # typer says that the value is missing
        setattr(globals_, _VALUED[name], found)
    return rest


def _switches(word: str, own: frozenset[str]) -> tuple[str, ...]:
    """The switches that the word stands for, several of one letter together, too: ``-iv``."""
    letters = [f"-{letter}" for letter in word[1:]] if word[:1] == "-" and word[1:2] != "-" else [word]
    taken = bool(letters) and all(one in _SWITCHES and one not in own for one in letters)
    return tuple(letters) if taken else ()


def client() -> Client:
    from thaw.cli.platform_api.client import Client
    from thaw.cli.platform_api.property_file import resolve

    given = globals_
    target = resolve(given.apihost, given.auth, given.cert, given.key)
    if not (given.verbose or given.debug):
        return Client(target, insecure=given.insecure)
    from thaw.cli.platform_api.exchanges import tell

    return Client(target, insecure=given.insecure, tell=tell)


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
    """Print on stderr, because another program may read the data on stdout."""
    err().print(f"[green]ok:[/green] {text}", markup=True, soft_wrap=True)
