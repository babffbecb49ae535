"""The table of docs/models.md: the features of each family of models, measured with a tiny random checkpoint of it.

``python -m tests.thaw_runtime.model_table`` measures every family and writes the table anew.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.conftest import ValkeyServer
from tests.thaw_runtime.conftest import ROOT
from tests.thaw_runtime.families import FAMILIES, ONE_STAGE
from tests.thaw_runtime.pipelines import Pipelines

PAGE: Final = ROOT / "docs" / "models.md"
BEGIN: Final = "| family |"
WORKS: Final = ("greedy", "seeded")


@dataclass(frozen=True, slots=True)
class Row:
    """The results of one family.  ``same`` says for each number of stages whether every token equals plain vLLM's.
    ``whole`` says the same for a pipeline of two stages that has become one worker."""

    family: str
    runs_on: str
    same: dict[int, bool]
    whole: bool
    n_distinct: int = 0  # different tokens in the reference's most varied answer
    error: str = ""

    def cells(self) -> tuple[str, ...]:
        if self.family in ONE_STAGE:
            return (f"`{self.family}`", self.runs_on, _mark(self.same.get(1)), "one stage", "")
        answers = [_mark(self.same.get(n)) for n in (1, 2)]
        return (f"`{self.family}`", self.runs_on, *answers, _mark(self.whole if 2 in self.same else None))


def _mark(same: bool | None) -> str:
    return "does not start" if same is None else "yes" if same else "**no**"


def cases(family: str) -> list[dict[str, Any]]:
    """Plain vLLM, one worker, and a pipeline of two whose first stage becomes one worker."""
    one_worker = [
        {"family": family, "n_stages": 0, "works": [*WORKS]},
        {"family": family, "n_stages": 1, "works": [*WORKS]},
    ]
    in_stages = {"family": family, "n_stages": 2, "works": [*WORKS], "full": [0]}
    return one_worker if family in ONE_STAGE else [*one_worker, in_stages]


def measure(families: Iterable[str], url: str) -> Iterator[Row]:
    """Measure each family in a process of its own, so that one that fails does not end the others."""
    for family in families:
        with Pipelines(url) as pipelines:
            yield row_of(family, *pipelines.ask(cases(family)))


def measure_together(families: Sequence[str], pipelines: Pipelines) -> list[Row]:
    """Measure in one process, whose import of vLLM takes longer than a family."""
    found, error = pipelines.ask([case for family in families for case in cases(family)])
    return [row_of(family, [answer for answer in found if answer["family"] == family], error) for family in families]


def row_of(family: str, found: Sequence[dict[str, Any]], error: str) -> Row:
    by_size = {answer["n_stages"]: answer for answer in found}
    if 0 not in by_size:
        return Row(family, "nothing", {}, False, 0, error)
    plain = by_size[0]["answers"]
    same = {n: all(answer["answers"][w] == plain[w] for w in WORKS) for n, answer in by_size.items() if n}
    whole = 2 in by_size and all(by_size[2]["answers"].get(f"{w}, whole") == plain[w] for w in WORKS)
    runs_on = "Transformers" if by_size[0]["on_transformers"] else "vLLM"
    return Row(family, runs_on, same, whole, max(len(set(tokens)) for w in WORKS for tokens in plain[w]), error)


def table(rows: Iterable[Row]) -> str:
    """The table as it stands in the page."""
    heads = ("family", "model code", "one worker", "two stages", "becomes one worker")
    lines = [heads, ("---",) * len(heads), *(row.cells() for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def written() -> str:
    """The table in the page."""
    lines = PAGE.read_text().splitlines(keepends=True)
    begin = next(i for i, line in enumerate(lines) if line.startswith(BEGIN))
    end = next((i for i in range(begin, len(lines)) if not lines[i].startswith("|")), len(lines))
    return "".join(lines[begin:end])


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        relay = ValkeyServer(Path(directory), durable=False)
        relay.start()
        try:
            rows = []
            for row in measure(FAMILIES, relay.url):
                rows.append(row)
                print(*row.cells(), row.n_distinct, row.error[-1500:], flush=True)
        finally:
            relay.kill()
    PAGE.write_text(PAGE.read_text().replace(written(), table(rows)))


if __name__ == "__main__":
    main()
