"""Workloads from files: CSV, plain or gzip, ``t_s,function,application,model,input_tokens,output_tokens``.

An invalid row is refused with its line and the reason.  The reader guesses nothing and skips nothing.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.simulation.constants import APPS, MODELS
from bench.simulation.workload import Request, Workload

COLUMNS = ("t_s", "function", "application", "model", "input_tokens", "output_tokens")
_MOST_TOKENS = 1_000_000


class BadWorkload(Exception):
    """The message names file, line and reason."""


def read_workload(path: Path) -> Workload:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", newline="") as lines:
            return Workload(path.name.split(".csv")[0], tuple(_rows(path, lines)))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as e:
        raise BadWorkload(f"{path}: cannot be read: {e}") from e


def read_traces(directory: Path) -> list[Workload]:
    """Every workload file in a directory, in the order of names."""
    found = sorted([*directory.glob("*.csv"), *directory.glob("*.csv.gz")])
    if not found:
        raise BadWorkload(f"{directory}: no *.csv or *.csv.gz in it")
    return [read_workload(path) for path in found]


def _rows(path: Path, lines: Iterable[str]) -> Iterable[Request]:
    reader = csv.reader(lines)
    header = next(reader, None)
    if header is None or tuple(header) != COLUMNS:
        raise BadWorkload(f"{path}:1: the header is {header}, not {','.join(COLUMNS)}")
    before = 0.0
    models: dict[int, str] = {}
    for index, row in enumerate(reader):
        try:
            request = _request(index, row)
            if request.arrival_s < before:
                raise ValueError(f"t_s goes back from {before:g} to {request.arrival_s:g}")
            if models.setdefault(request.function, request.model) != request.model:
                raise ValueError(f"function {request.function} had the model {models[request.function]} before")
        except ValueError as e:
            raise BadWorkload(f"{path}:{reader.line_num}: {e}") from e
        before = request.arrival_s
        yield request


def _request(index: int, row: Sequence[str]) -> Request:
    if len(row) != len(COLUMNS):
        raise ValueError(f"{len(row)} fields, not {len(COLUMNS)}")
    t_s, function, app, model, n_in, n_out = row
    if app not in APPS:
        raise ValueError(f"application {app!r} is none of {', '.join(APPS)}")
    if model not in MODELS:
        raise ValueError(f"model {model!r} is none of {', '.join(MODELS)}")
    return Request(
        index,
        _time(t_s),
        _whole("function", function, 0),
        app,
        model,
        _whole("input_tokens", n_in, 1),
        _whole("output_tokens", n_out, 1),
    )


def _time(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"t_s {text!r} is no number") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"t_s {text!r} is no time")
    return value


def _whole(name: str, text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{name} {text!r} is no whole number") from None
    if not least <= value <= _MOST_TOKENS:
        raise ValueError(f"{name} {value} is not between {least} and {_MOST_TOKENS}")
    return value
