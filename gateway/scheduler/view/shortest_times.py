"""The best that starts have ever shown: for each phase the least time, for each link the least seconds a byte.

Predictions use the typical times of ``history.py``; the bound of a start (``tracing/bound.py``) is made of these.  A
phase that does not depend on the function (container, context, libraries, the copy to the device) has one minimum for
each kind of device and start mode; model, kv and engine have one for each function and number of stages; a prefill
also for each bucket of prompt lengths; a link for each host.  The paper's times are never used here: a time that no
start has shown is unknown.

The loop feeds ``Best`` and keeps it in the registry (hash ``thaw:best``); ``Best`` does no I/O itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from thaw.instance import StartMode
from thaw.tracing.bound import RUNTIME, SUSTAINED_BYTES, Part, prompt_bucket
from thaw.tracing.start_times import StageTook, StartTook

_EVERY: Final = "*"
"""Stands in place of an action's name.  A real name has a slash."""
_OF_EVERY_ACTION: Final = frozenset((Part.CONTAINER, Part.CONTEXT, Part.LIBRARIES, Part.COPY))
_BUCKETS: Final = tuple(sorted({prompt_bucket(1 << n) for n in range(25)}))
"""The buckets of all prompt lengths."""
_LINK: Final = "link"
_MEMORY: Final = "memory"


@dataclass(frozen=True, slots=True)
class Least:
    """The least value of ``n_starts`` measurements."""

    value: float
    n_starts: int


class Key(NamedTuple):
    """``of``: the action, every action, or the host of a link."""

    what: str
    device_kind: str = ""
    mode: str = ""
    n_stages: int = 0
    prompt_tokens: int = 0
    of: str = _EVERY

    def __str__(self) -> str:
        return "|".join(map(str, self))

    @staticmethod
    def parse(text: str) -> Key | None:
        """Return None for a key that another version wrote."""
        fields = text.split("|", 5)
        if len(fields) != 6 or not (fields[3].isdigit() and fields[4].isdigit()):
            return None
        return Key(fields[0], fields[1], fields[2], int(fields[3]), int(fields[4]), fields[5])


class Best:
    def __init__(self, least: Mapping[Key, Least] | None = None) -> None:
        self._least: dict[Key, Least] = dict(least or {})

    def part(self, part: Part, action: str, device_kind: str, mode: StartMode, n_stages: int) -> Least | None:
        """Return the least seconds of a phase; for ``Part.COPY``, the least seconds a byte."""
        return self._least.get(_key(part, action, device_kind, mode, n_stages))

    def link(self, host: str) -> Least | None:
        """The least seconds a byte that all fetches of one start took together on the link of a host."""
        return self._least.get(Key(_LINK, of=host))

    def memory(self, device_kind: str) -> Least | None:
        """The least seconds a byte from one segment of a host's memory into another."""
        return self._least.get(Key(_MEMORY, device_kind))

    def prefills(self, action: str, device_kind: str, n_stages: int) -> Iterator[tuple[int, Least]]:
        """Yield (bucket of prompt lengths, least seconds)."""
        for bucket in _BUCKETS:
            least = self._least.get(Key(Part.PREFILL, device_kind, "", n_stages, bucket, action))
            if least is not None:
                yield bucket, least

    def learn_start(self, action: str, device_kinds: Sequence[str], took: StartTook) -> dict[Key, Least]:
        """``device_kinds``: the kind of each stage's device; empty where it is not known.  Returns the new least times,
        for the loop to keep."""
        news: dict[Key, Least] = {}
        for stage in took.stages:
            kind = device_kinds[stage.stage] if stage.stage < len(device_kinds) else ""
            if kind and stage.mode:
                news |= self._learn_stage(action, kind, len(device_kinds), stage)
        for host, spent_s in took.fetching_s().items():
            n_bytes = sum(s.link_bytes for s in took.stages if s.host == host)
            if n_bytes >= SUSTAINED_BYTES:
                news |= self._take(Key(_LINK, of=host), spent_s / n_bytes)
        return news

    def learn_prefill(
        self, action: str, device_kind: str, n_stages: int, prompt_tokens: int, seconds: float
    ) -> dict[Key, Least]:
        """Take the prefill of a whole group whose devices are of one kind."""
        bucket = min(prompt_bucket(prompt_tokens), _BUCKETS[-1])
        return self._take(Key(Part.PREFILL, device_kind, "", n_stages, bucket, action), seconds)

    def actions(self) -> set[str]:
        return {key.of for key in self._least if key.what != _LINK} - {_EVERY}

    def forget(self, action: str) -> tuple[Key, ...]:
        """Forget a deleted action; return the keys that must be deleted."""
        gone = tuple(key for key in self._least if key.of == action and key.what != _LINK)
        for key in gone:
            del self._least[key]
        return gone

    def _learn_stage(self, action: str, kind: str, n_stages: int, stage: StageTook) -> dict[Key, Least]:
        """A phase that a start did without counts as 0 s, because other starts may do without it, too."""
        news: dict[Key, Least] = {}
        for part in (*RUNTIME, Part.ENGINE):
            value = stage.seconds(part)
            if part is Part.COPY:
                value = value / stage.part_bytes if stage.part_bytes else math.nan
            news |= self._take(_key(part, action, kind, StartMode(stage.mode), n_stages), value)
        if stage.within_memory:
            news |= self._take(Key(_MEMORY, kind), stage.fetch_s / stage.part_bytes)
        return news

    def _take(self, key: Key, value: float) -> dict[Key, Least]:
        if not (math.isfinite(value) and value >= 0):
            return {}
        old = self._least.get(key)
        new = Least(value, 1) if old is None else Least(min(old.value, value), old.n_starts + 1)
        self._least[key] = new
        return {key: new}


def _key(part: Part, action: str, device_kind: str, mode: StartMode, n_stages: int) -> Key:
    if part in _OF_EVERY_ACTION:
        return Key(part, device_kind, mode)
    return Key(part, device_kind, mode, n_stages, 0, action)
