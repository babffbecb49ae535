"""Several connections, on which one inspection asks for many small things at once: a model may have 200 shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self, TypeVar

from fetchd.deadline import Deadline
from fetchd.sources.base import Connection, Source

T = TypeVar("T")
R = TypeVar("R")

LANES: Final = 8


class Lanes:
    """``with Lanes(source, deadline) as lanes``: the connections are made when they are needed."""

    def __init__(self, source: Source, deadline: Deadline) -> None:
        self._source, self._deadline = source, deadline
        self._connections: list[Connection] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._open.close()

    def map(self, ask: Callable[[Connection, T], R], items: Sequence[T]) -> list[R]:
        """Return the answers in the order of ``items``.  Raises the first error, after all lanes have ended."""
        n = min(LANES, len(items))
        while len(self._connections) < n:
            connection = self._source.connect()
            self._open.callback(connection.close)
            self._open.enter_context(self._deadline.guarding(connection))
            self._connections.append(connection)

        def run(lane: int) -> list[R]:
            return [ask(self._connections[lane], item) for item in items[lane::n]]

        with ThreadPoolExecutor(max(1, n)) as pool:
            answers = list(pool.map(run, range(n)))
        return [answers[i % n][i // n] for i in range(len(items))]
