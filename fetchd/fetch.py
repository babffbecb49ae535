"""One fetch: it reads the index, and then the bytes into one segment, for all groups that want exactly these bytes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fetchd.catalog import Catalog, Entry
from fetchd.chunk_reader import FetchCancelled, Origin
from fetchd.chunks import plan_chunks
from fetchd.disclosure import disclosed
from fetchd.marks import InterfaceWatch
from fetchd.pacing import NetworkLink, Pacer
from fetchd.read_once import Board
from fetchd.reader_account import less_stops
from fetchd.segments import Segment, fetch_holder
from fetchd.settings import FetchdSettings
from fetchd.standstill import Stop
from fetchd.transfer import Transfer
from relay.protocol.messages import FetchDone, FetchStart, FetchStatus
from thaw.errors import ErrorInfo, ModelChanged, ModelCorrupt, PlatformError, ThawError
from thaw.logs import Log
from thaw.tracing.trace import Phase, TraceEvent, event


@dataclass(frozen=True, slots=True)
class Wishes:
    """The wishes of one stage; ``deadline`` is on the monotonic clock."""

    pace: int | None
    deadline: float
    background: bool
    weight: float


@dataclass(frozen=True, slots=True)
class Machinery:
    """The parts that all fetches of a host share."""

    catalog: Catalog
    link: NetworkLink
    interfaces: InterfaceWatch
    board: Board
    settings: FetchdSettings
    log: Log


@dataclass(eq=False, slots=True)
class Member:
    """One stage of one group in a fetch.  ``resident``: the bytes were there before the stage asked.

    ``done`` is set when the bytes that the stage waits for are there, or when the fetch has failed.  The stage's later
    ranges may still be coming then.
    """

    request: FetchStart
    fetch: Fetch
    begin: TraceEvent
    resident: bool
    wishes: Wishes
    left_out_bytes: int = 0  # the later ranges, if the pool had no room for them
    done: threading.Event = field(default_factory=threading.Event)
    end: TraceEvent | None = None
    stops: tuple[Stop, ...] = ()
    error: ErrorInfo | None = None

    @property
    def holder(self) -> str:
        return fetch_holder(self.request.group_id, self.request.stage)

    def finish(self, host: str, stops: tuple[Stop, ...]) -> None:
        """Record that the member's bytes are here or will never come.  Only the first call counts.

        ``stops`` are the times since the member began in which this process stood still.
        """
        if self.done.is_set():
            return
        self.stops = stops
        request, statistics = self.request, self.fetch.describe(self.resident)
        stopped_s = sum((end.mono_ns - begin.mono_ns) / 1e9 for begin, end in stops)
        statistics = less_stops(statistics, stopped_s) if stops else statistics
        if self.left_out_bytes:
            statistics["left_out_bytes"] = self.left_out_bytes
        self.error = self.fetch.error
        self.end = event(
            Phase.FETCH_END,
            group_id=request.group_id,
            stage=request.stage,
            host=host,
            n_bytes=sum(r.n_bytes for r in request.ranges),
            attrs=statistics,
        )
        self.done.set()

    def report(self) -> FetchDone:
        """Return the member's report.  It must be ``done`` without an ``error``."""
        first = self.fetch.first_byte
        events = [self.begin]
        if first is not None and not self.resident and first.mono_ns >= self.begin.mono_ns:
            events.append(self._own(first))
        events += (self._own(e) for stop in self.stops for e in stop)
        if self.end is not None:
            events.append(self.end)
        segment = self.fetch.segment
        fetched = 0 if self.resident else self.fetch.fetched_bytes
        return FetchDone(segment.segment_id, segment.n_bytes, fetched, tuple(events))

    def _own(self, of_all: TraceEvent) -> TraceEvent:
        begin = self.begin
        return replace(of_all, group_id=begin.group_id, stage=begin.stage, host=begin.host)


class Fetch:
    """One fetch into one segment.  ``members`` belongs to the fetch table and is protected by its lock."""

    def __init__(self, segment: Segment, machinery: Machinery, on_first: Callable[[Fetch], None] | None = None) -> None:
        self.segment = segment
        self.members: list[Member] = []
        self.left_by = ""  # the namespace of the last member that left
        self.error: ErrorInfo | None = None
        self.running = not segment.complete
        self.pacer = Pacer(machinery.link)
        self._machinery = machinery
        self._on_first = on_first
        self._lock = threading.Lock()
        self._transfer: Transfer | None = None
        self._cancelled = False
        self._began_s = time.monotonic()
        self._seconds = 0.0
        self._source = ""

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def first_part_is_here(self) -> bool:
        return self.segment.complete or self.segment.first_is_here

    @property
    def fetched_bytes(self) -> int:
        return self._transfer.progress.statistics.fetched_bytes if self._transfer else 0

    @property
    def copied_bytes(self) -> int:
        return self._transfer.progress.statistics.copied_bytes if self._transfer else 0

    @property
    def source(self) -> str:
        """The kind of store; empty before the first byte was asked for."""
        return self._source

    @property
    def first_byte(self) -> TraceEvent | None:
        return self._transfer.progress.statistics.first_byte if self._transfer else None

    @property
    def bytes_per_s(self) -> float:
        seconds = self._seconds or time.monotonic() - self._began_s
        return self.fetched_bytes / seconds if seconds > 0 else 0.0

    def run(self) -> None:
        """Fill the segment or fail it; never raises a ThawError."""
        key = self.segment.key
        try:
            entry = self._machinery.catalog.planned(key.uri, key.version)
            transfer = self._make_transfer(entry)
            # The fetch joins only now: while it asked the store for the index it must not delay other fetches.
            with self._machinery.link.joined(self.pacer.share):
                transfer.run()
            self.segment.finish()
        except Exception as e:  # noqa: BLE001 - edge of a thread: readers must hear of a defect
            reason = self._reason(e) if isinstance(e, ThawError) else e
            told = disclosed(key.uri, reason, self._machinery.log)
            defect = PlatformError(f"fetch failed: {type(told).__name__}: {told}")
            self.error = (told if isinstance(told, ThawError) else defect).info()
        self._seconds = time.monotonic() - self._began_s
        if self.error is not None:
            self.segment.fail(self.error)

    def _reason(self, error: ThawError) -> ThawError:
        """A model that was pushed again during the start looks damaged; the store's version now tells the two apart."""
        key = self.segment.key
        if isinstance(error, ModelCorrupt):
            try:
                self._machinery.catalog.check_unchanged(key.uri, key.version)
            except ModelChanged as changed:
                return changed
            except ThawError:
                return error  # the store's description is damaged too, or gone: report the first error
        return error

    def cancel(self) -> None:
        self.segment.given_up = True
        with self._lock:
            self._cancelled = True
            if self._transfer is not None:
                self._transfer.cancel()
            else:  # the index is still being read, maybe from a store that hangs: readers need not wait for it
                self.segment.fail(FetchCancelled("the fetch was cancelled").info())

    def apply_wishes(self) -> None:
        """Apply the wishes of the most urgent member: a stage that joins a slow fetch must not be slowed down."""
        wishes = [m.wishes for m in self.members]
        paces = [w.pace for w in wishes if w.pace is not None]
        self.pacer.set(
            pace=max(paces) if paces and len(paces) == len(wishes) else None,
            deadline=min((w.deadline for w in wishes if not w.background), default=math.inf),
            background=all(w.background for w in wishes),
            weight=max((w.weight for w in wishes), default=1.0),
        )

    def status(self, member: Member) -> FetchStatus:
        request = member.request
        n_bytes = sum(r.n_bytes for r in request.ranges)
        later = sum(r.n_bytes for r in self.segment.key.later)
        pending, later_pending = self._transfer.progress.pending_bytes if self._transfer else (n_bytes, later)
        return FetchStatus(
            request.group_id,
            request.stage,
            request.model.uri,
            n_bytes,
            n_bytes - pending,
            round(self.bytes_per_s, 1),
            pending,
            later_pending,
            member.left_out_bytes,
        )

    def describe(self, resident: bool) -> dict[str, object]:
        """Attributes of the end event; they explain a long fetch."""
        statistics = self._transfer.progress.statistics if self._transfer else None
        if resident or statistics is None:
            return {"source": self._source or "memory", "resident": resident}
        return {
            "source": self._source,
            "resident": False,
            "bytes_per_s": round(self.bytes_per_s, 1),
            "cpu_s": round(statistics.cpu_s, 4),
            "connections": self._transfer.connections if self._transfer else 0,
            "retries": statistics.retries,
            "refetched_chunks": statistics.refetched,
            "slow_connections": statistics.slow_connections,
            "fetched_bytes": statistics.fetched_bytes,
            "copied_bytes": statistics.copied_bytes,
            **statistics.last_reader,
        }

    def _make_transfer(self, entry: Entry) -> Transfer:
        segment, settings = self.segment, self._machinery.settings
        chunks = plan_chunks(segment.layout, entry.index, len(segment.key.ranges))
        etags = {name: info.etag for name, info in entry.objects.items()}
        origin = Origin(
            entry.source, etags, entry.learned, self._machinery.board, settings.connections, settings.retries
        )
        transfer = Transfer(origin, segment, chunks, self.pacer, self._first_is_here)
        self._source = entry.source.kind
        self._machinery.interfaces.look(entry.source.host)
        with self._machinery.link.change():
            self.pacer.share.remote = bool(entry.source.host)
        with self._lock:
            if self._cancelled:
                raise FetchCancelled("the fetch was cancelled")
            self._transfer = transfer
        segment.set_index(entry.index.tensors)
        return transfer

    def _first_is_here(self) -> None:
        self.segment.first_is_here = True
        self.pacer.only_later()
        if self._on_first is not None:
            self._on_first(self)
