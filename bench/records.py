"""How long does a list of a namespace's records take when it has a million of them, and what do they cost?

The records are a Python function's, of a hundred actions and one that ran rarely, written as the recorder writes them:
512 together, with their traces, by relay/state/records.py.  The alternative has the same bytes: a file of SQLite with
an index by time and one by name and time.  Both have each write on disk before they answer, as the platform's state
server does, and are asked the same questions in turns, by one client.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import redis

from bench import _common
from bench._common import figure, judge, percentile, say, start
from relay.state import keys, redis_link
from relay.state.records import Ended, Records
from relay.state.storage import Storage
from thaw import wire
from thaw.activation import Activation, ActivationStatus
from thaw.dev.components import _valkey_server
from thaw.dev.ports import free_ports
from thaw.ids import ActionName, ActivationId, Namespace
from thaw.quotas import Quotas
from thaw.tracing.trace import Phase, event

_GUEST = Namespace("guest")
_ACTIONS = 100
_RARE = 10_000
"""One record in this many belongs to the rare action."""
_TOGETHER = 512
_SPACING_MS = 600
"""The time between two records: a million of them are a week."""
_PAGE = 30
_PHASES = (Phase.RECEIVED, Phase.DISPATCHED, Phase.RUN_BEGIN, Phase.RUN_END, Phase.FINISHED)


@dataclass(frozen=True, slots=True)
class Asked:
    name: str = ""
    since_ms: int | None = None
    upto_ms: int | None = None
    skip: int = 0


class Store(Protocol):
    def write(self, some: Sequence[Ended]) -> None: ...

    def page(self, asked: Asked) -> list[Activation]: ...

    def count(self, asked: Asked) -> int: ...


class StateServer:
    def __init__(self, client: redis.Redis, most: int) -> None:
        quotas = Quotas(10**6, 10**12, 10**12, 10**6, 10**6, 10**6, records=most)
        self._client = client
        self._records = Records(client, storage=Storage(client, lambda _: quotas))

    def write(self, some: Sequence[Ended]) -> None:
        self._records.end_all(some)

    def page(self, asked: Asked) -> list[Activation]:
        return self._records.activations(
            _GUEST, limit=_PAGE, skip=asked.skip, since_ms=asked.since_ms, upto_ms=asked.upto_ms, name=asked.name
        ).whole()

    def count(self, asked: Asked) -> int:
        return self._records.count_activations(_GUEST, since_ms=asked.since_ms, upto_ms=asked.upto_ms, name=asked.name)

    def used(self) -> int:
        memory: Any = self._client.info("memory")
        return int(memory["used_memory"])

    def of_indexes(self) -> int:
        indexes = [
            keys.activations(_GUEST),
            keys.written(_GUEST),
            *self._client.scan_iter(keys.activations_of(_GUEST, "*"), 10_000),
        ]
        return sum(int(self._client.memory_usage(name, samples=100) or 0) for name in indexes)


class SqliteFile:
    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(
            "CREATE TABLE records "
            "(id TEXT PRIMARY KEY, namespace TEXT, name TEXT, start_ms INT, record BLOB, trace BLOB)"
        )
        self._db.execute("CREATE INDEX by_time ON records (namespace, start_ms)")
        self._db.execute("CREATE INDEX by_name ON records (namespace, name, start_ms)")

    def write(self, some: Sequence[Ended]) -> None:
        rows = [
            (
                one.record.activation_id,
                one.record.namespace,
                one.record.action.partition("/")[2],
                one.record.start_ms,
                wire.dumps(one.record),
                b"\n".join(map(wire.dumps, one.events)),
            )
            for one in some
        ]
        with self._db:
            self._db.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)", rows)

    def page(self, asked: Asked) -> list[Activation]:
        where, values = _where(asked)
        query = f"SELECT record FROM records WHERE {where} ORDER BY start_ms DESC LIMIT ? OFFSET ?"
        return [wire.loads(Activation, row) for (row,) in self._db.execute(query, [*values, _PAGE, asked.skip])]

    def count(self, asked: Asked) -> int:
        where, values = _where(asked)
        (n,) = self._db.execute(f"SELECT count(*) FROM records WHERE {where}", values).fetchone()
        return int(n)

    def close(self) -> None:
        self._db.close()


def _where(asked: Asked) -> tuple[str, list[Any]]:
    asked_for = {"name = ?": asked.name or None, "start_ms >= ?": asked.since_ms, "start_ms <= ?": asked.upto_ms}
    chosen = {text: value for text, value in asked_for.items() if value is not None}
    return " AND ".join(("namespace = ?", *chosen)), [_GUEST, *chosen.values()]


def _ended(i: int, begun_ms: int) -> Ended:
    action = "rare" if i % _RARE == 0 else f"tools/action-{i % _ACTIONS}"
    start_ms, activation_id = begun_ms + i * _SPACING_MS, ActivationId(f"{i * 2654435761 % 2**128:032x}")
    record = Activation(
        activation_id,
        _GUEST,
        ActionName(f"guest/{action}"),
        "0.0.1",
        "guest",
        "python:3.11",
        start_ms,
        start_ms + 12,
        ActivationStatus.SUCCESS,
        {"greeting": f"Hello {i}!"},
        (f"2026-01-01T00:00:00.000000Z stdout: said hello to {i}",),
        host="host-0",
        instance_id=f"{i % 16:016x}",
        limits={"timeout": 60_000, "memory": 256, "logs": 10, "concurrency": 1},
    )
    return Ended(record, [event(phase, activation_id=activation_id, host="host-0") for phase in _PHASES])


def fill(store: Store, n: int, begun_ms: int, first: int = 0) -> float:
    """Return how many records a second were written, the time for making them not counted."""
    writing_s, said = 0.0, 0
    for i in range(first, first + n, _TOGETHER):
        if (i - first) * 10 // n > said:
            said = (i - first) * 10 // n
            say(f"{type(store).__name__}: {i - first:,} of {n:,} records are written")
        batch = [_ended(j, begun_ms) for j in range(i, min(first + n, i + _TOGETHER))]
        began = time.perf_counter()
        store.write(batch)
        writing_s += time.perf_counter() - began
    return n / writing_s


def _questions(n: int, begun_ms: int) -> dict[str, Callable[[random.Random, Store], int]]:
    """Return the questions by name.  Each answers how many records it found, and both stores must agree on that."""

    def at(chance: random.Random) -> int:
        return begun_ms + chance.randrange(n) * _SPACING_MS

    def action(chance: random.Random) -> str:
        return f"tools/action-{chance.randrange(1, _ACTIONS)}"

    def window(chance: random.Random, name: str = "") -> Asked:
        since_ms = at(chance)
        return Asked(name, since_ms, since_ms + 3_600_000)

    return {
        "newest": lambda _, store: len(store.page(Asked())),
        "by_name": lambda chance, store: len(store.page(Asked(action(chance)))),
        "by_rare_name": lambda _, store: len(store.page(Asked("rare"))),
        "window": lambda chance, store: len(store.page(window(chance))),
        "name_in_window": lambda chance, store: len(store.page(window(chance, action(chance)))),
        "skip": lambda chance, store: len(store.page(Asked(skip=chance.randrange(n)))),
        "skip_by_name": lambda chance, store: len(store.page(Asked(action(chance), skip=chance.randrange(n // 200)))),
        "count": lambda _, store: store.count(Asked()),
        "count_by_name": lambda chance, store: store.count(Asked(action(chance))),
        "count_window": lambda chance, store: store.count(window(chance)),
    }


def ask(stores: dict[str, Store], n: int, begun_ms: int, times: int) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds, by question and store."""
    took: dict[str, dict[str, list[float]]] = {}
    for question, put in _questions(n, begun_ms).items():
        of = took[question] = {name: [] for name in stores}
        for i in range(times):
            found = set[int]()
            for name in sorted(stores, reverse=bool(i % 2)):
                began = time.perf_counter()
                found.add(put(random.Random(i), stores[name]))
                of[name].append((time.perf_counter() - began) * 1e3)
            if len(found) != 1:
                raise SystemExit(f"{question}: the stores found {found} records")
        say(f"{question}: " + ", ".join(f"{name} {_shown(values)}" for name, values in of.items()))
    return took


def _shown(values: Sequence[float]) -> str:
    return f"{percentile(values, 50):.2f} (p99 {percentile(values, 99):.2f}) ms"


@contextlib.contextmanager
def _state_server(work: Path) -> Iterator[redis.Redis]:
    (port,) = free_ports(1)
    command = [str(_valkey_server()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(work)]
    command += ["--appendonly", "yes", "--appendfsync", "always"]
    program = start(command, work / "state.log", "Ready to accept connections")
    try:
        with redis_link.connect(f"redis://127.0.0.1:{port}/0") as client:
            yield client
    finally:
        program.stop(signal.SIGKILL)


def main() -> int:
    options = _common.options(__doc__ or "", records=(1_000_000, "records of the namespace"))
    n = min(options.records, 100_000) if options.quick else options.records
    times = options.n or 200
    work = Path(tempfile.mkdtemp(prefix="bench-records-"))
    begun_ms = round(time.time() * 1000) - n * _SPACING_MS
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        client = stack.enter_context(_state_server(work))
        server, file = StateServer(client, n), SqliteFile(work / "records.db")
        stack.callback(file.close)
        empty = server.used()
        stores: dict[str, Store] = {"state_server": server, "sqlite": file}
        per_s = {name: round(fill(store, n, begun_ms)) for name, store in stores.items()}
        say(f"written a second: {per_s}")
        used, indexes = server.used() - empty, server.of_indexes()
        on_disk = sum(path.stat().st_size for path in work.glob("records.db*"))
        took = ask(stores, n, begun_ms, times)
        full = fill(server, n // 20, begun_ms, first=n)  # each of them takes the oldest one's place
    p99 = {q: percentile(of["state_server"], 99) for q, of in took.items()}
    slowest = max(p99, key=lambda q: p99[q])
    ratios = {q: percentile(of["state_server"], 50) / percentile(of["sqlite"], 50) for q, of in took.items()}
    floor = "; ".join(f"{q} {percentile(of['state_server'], 50):.2f}" for q, of in took.items()) + " ms (medians)"
    goals = [
        judge("list_p99_ms", p99[slowest], "<=", 50, floor=f"{slowest} is the slowest; {floor}"),
        *(figure(f"{q}_vs_sqlite", ratio) for q, ratio in ratios.items()),
        figure(
            "bytes_a_record",
            used / n,
            floor=f"{indexes / n:.0f} are of the indexes; SQLite has {on_disk / n:.0f} on disk",
        ),
        figure("writes_per_s_vs_sqlite", per_s["state_server"] / per_s["sqlite"]),
        figure("writes_per_s_when_full_vs_filling", full / per_s["state_server"]),
    ]
    ms = {q: {name: json.loads(f"{percentile(v, 50):.3f}") for name, v in of.items()} for q, of in took.items()}
    return _common.report("records", goals, rounds=times, records=n, written_per_s=per_s, median_ms=ms)


if __name__ == "__main__":
    sys.exit(main())
