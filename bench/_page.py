"""docs/benchmarks.md, written from the published results (_results.py) and from their explanations in claims.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench._common import ROOT
from bench._results import ENOUGH_ROUNDS, Figure, newest

CLAIMS: Final = ROOT / "bench" / "claims.toml"
PAGE: Final = ROOT / "docs" / "benchmarks.md"

_HEAD = f"""# Benchmarks

`make bench` runs the programs of `bench/` and writes this page from the JSON lines that they print last
(`bench/results/`) and from what `bench/claims.toml` says of each figure. Every program measures its competitors in the
same run, in turns. A value is the ratio of two medians unless its name ends in a unit or its claim says otherwise. A
link is a shaped network namespace. *Indicative* means fewer than {ENOUGH_ROUNDS} rounds. A `+` behind a commit says
that tracked files differed from it. The load is the machine's load average of one minute as the program began and as it
ended, its own included; `?` was not written down. The path is the one that messages between stages took. What earlier
runs taught is in the [lab log](lab-log.md).

"""
_COLUMNS = "| claim | value | goal | command | commit | load | rounds |\n|---|---|---|---|---|---|---|\n"


class NoClaim(SystemExit):
    """claims.toml does not say what a figure means, so a reader could not understand it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """``says`` is what a figure means.  ``note`` says what its value is made of where its goal is missed."""

    bench: str
    name: str
    says: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Claims:
    """``runs`` has the commands whose figures are published, by program."""

    runs: Mapping[str, tuple[str, ...]]
    claims: tuple[Claim, ...]


def read_claims(path: Path = CLAIMS) -> Claims:
    tables = tomllib.loads(path.read_text())
    runs = {bench: tuple(table["runs"]) for bench, table in tables.items()}
    return Claims(
        runs,
        tuple(
            Claim(bench, name, entry["says"], entry.get("note", ""))
            for bench, table in tables.items()
            for name, entry in table.items()
            if name != "runs"
        ),
    )


def page(claims: Claims, figures: Mapping[tuple[str, str], Figure]) -> str:
    """Raises NoClaim for a figure that claims.toml lacks."""
    unknown = figures.keys() - {(c.bench, c.name) for c in claims.claims}
    if unknown:
        raise NoClaim(f"bench/claims.toml says nothing about {sorted(unknown)}")
    machines = "".join(f"- {m}\n" for m in sorted({f.machine for f in figures.values()}))
    rows = "".join(_row(c, figures.get((c.bench, c.name))) for c in claims.claims)
    made_of = "".join(_made_of(c, figures.get((c.bench, c.name))) for c in claims.claims)
    head = f"{_HEAD}The figures were measured on:\n\n{machines}\n"
    return f"{head}{_COLUMNS}{rows}\n## What the values are made of\n\n{made_of}"


def write() -> None:
    PAGE.write_text(page(read_claims(), newest()))


def _row(claim: Claim, figure: Figure | None) -> str:
    said = f"`{claim.name}`: {claim.says}"
    if figure is None:
        return _cells((said, "not measured", "", "", "", "", ""))
    rounds = str(figure.rounds)
    command = f"`{figure.command}`"
    return _cells((said, _value(figure), _goal(figure), command, _commit(figure), _load(figure), rounds))


def _cells(cells: Iterable[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |\n"


def _value(figure: Figure) -> str:
    judged = "" if figure.ok is None else ", met" if figure.ok else ", **missed**"
    paced = ", paced link" if figure.paced else ""
    path = f", path {figure.path}" if figure.path else ""
    return f"{_number(figure.value)}{judged}{paced}{path}{', *indicative*' if figure.is_indicative else ''}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def _goal(figure: Figure) -> str:
    if figure.goal is None:
        return ""
    return f"{ {'<=': '≤', '>=': '≥', '==': '='}[figure.op] } {_number(figure.goal)}"


def _commit(figure: Figure) -> str:
    return figure.commit + {None: "?", True: "+", False: ""}[figure.dirty]


def _load(figure: Figure) -> str:
    began, ended = ("?" if load is None else f"{load:g}" for load in figure.load_1m)
    return f"{began} → {ended}, {figure.cores} cores"


def _made_of(claim: Claim, figure: Figure | None) -> str:
    if figure is None:
        return ""
    note = claim.note if figure.ok is False else ""
    said = ". ".join(text.rstrip(".") for text in (figure.floor, note) if text)
    return f"- `{claim.name}`{' (missed)' if figure.ok is False else ''}: {said}.\n" if said else ""
