"""One fetch: index, then bytes, into one segment, for every group that wants exactly these bytes."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace

from fetchd.catalog import Catalog, Entry
from fetchd.chunks import plan_chunks
from fetchd.pacing import Pacer, TokenBucket
from fetchd.pipeline import FetchCancelled, Transfer
from fetchd.segments import Segment
from fetchd.settings import FetchdSettings
from relay.messages import FetchDone, FetchStart, FetchStatus
from thaw.errors import ErrorInfo, ModelChanged, ModelCorrupt, PlatformError, ThawError
from thaw.trace import Phase, TraceEvent, event


@dataclass(eq=False, slots=True)
class Member:
    """One stage of one group in a fetch.  ``resident``: the bytes were there before it asked."""

    request: FetchStart
    fetch: Fetch
    begin: TraceEvent
    resident: bool
    pace: int | None
    done: threading.Event = field(default_factory=threading.Event)
    end: TraceEvent | None = None
    error: ErrorInfo | None = None

    @property
    def holder(self) -> str:
        return f"fetch:{self.request.group_id}/{self.request.stage}"

    def finish(self, host: str) -> None:
        request, statistics = self.request, self.fetch.describe(self.resident)
        self.error = self.fetch.error
        self.end = event(Phase.FETCH_END, group_id=request.group_id, stage=request.stage, host=host,
                         n_bytes=sum(r.n_bytes for r in request.ranges), attrs=statistics)  # fmt: skip
        self.done.set()

    def report(self) -> FetchDone:
        """Call after ``done``, without ``error``."""
        first = self.fetch.first_byte
        events = [self.begin]
        if first is not None and not self.resident and first.mono_ns >= self.begin.mono_ns:
            begin = self.begin
            events.append(replace(first, group_id=begin.group_id, stage=begin.stage, host=begin.host))
        if self.end is not None:
            events.append(self.end)
        segment = self.fetch.segment
        fetched = 0 if self.resident else self.fetch.fetched_bytes
        return FetchDone(segment.segment_id, segment.n_bytes, fetched, tuple(events))


class Fetch:
    """``members`` belongs to the fetch table and its lock."""

    def __init__(self, segment: Segment, catalog: Catalog, link: TokenBucket, settings: FetchdSettings,
                 *, background: bool = False) -> None:  # fmt: skip
        self.segment = segment
        self.members: list[Member] = []
        self.error: ErrorInfo | None = None
        self.running = not segment.complete
        self.pacer = Pacer(link, None, background=background)
        self._catalog, self._settings = catalog, settings
        self._lock = threading.Lock()
        self._transfer: Transfer | None = None
        self._cancelled = False
        self._began_s = time.monotonic()
        self._seconds = 0.0
        self._source = ""

    @property
    def fetched_bytes(self) -> int:
        return self._transfer.statistics.fetched_bytes if self._transfer else 0

    @property
    def first_byte(self) -> TraceEvent | None:
        return self._transfer.statistics.first_byte if self._transfer else None

    @property
    def bytes_per_s(self) -> float:
        seconds = self._seconds or time.monotonic() - self._began_s
        return self.fetched_bytes / seconds if seconds > 0 else 0.0

    @property
    def crossed_link(self) -> bool:
        return self._source != "file"

    def run(self) -> None:
        """Fill the segment or fail it; never raises a ThawError."""
        uri, version, _ = self.segment.key
        try:
            entry = self._catalog.planned(uri, version)
            self._make_transfer(entry).run()
            self.segment.finish()
        except ThawError as e:
            self.error = self._reason(e).info()
        except Exception as e:  # noqa: BLE001 - edge of a thread: readers must hear of a defect
            self.error = PlatformError(f"fetch failed: {type(e).__name__}: {e}").info()
        self._seconds = time.monotonic() - self._began_s
        if self.error is not None:
            self.segment.fail(self.error)

    def _reason(self, error: ThawError) -> ThawError:
        """A model that was pushed anew under a start looks damaged; what the store has now tells the two apart."""
        uri, version, _ = self.segment.key
        if isinstance(error, ModelCorrupt):
            try:
                self._catalog.check_unchanged(uri, version)
            except ModelChanged as changed:
                return changed
            except ThawError:
                return error  # the store's description is damaged too, or gone: the first reason is the reason
        return error

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._transfer is not None:
                self._transfer.cancel()
            else:  # the index is still being read, maybe from a store that hangs: readers need not wait for it
                self.segment.fail(FetchCancelled("the fetch was cancelled").info())

    def apply_pace(self) -> None:
        """The fastest member decides: who joins a slow fetch may not be slowed by it."""
        paces = [m.pace for m in self.members if not m.done.is_set()]
        known = [p for p in paces if p is not None]
        self.pacer.set_pace(None if not known or len(known) < len(paces) else max(known))
        self.pacer.background = all(m.request.background for m in self.members)

    def status(self, member: Member) -> FetchStatus:
        request = member.request
        return FetchStatus(request.group_id, request.stage, request.model.uri, self.segment.n_bytes,
                           self.segment.page.end, round(self.bytes_per_s, 1))  # fmt: skip

    def describe(self, resident: bool) -> dict[str, object]:
        """Attributes of the end event: what explains a long fetch."""
        statistics = self._transfer.statistics if self._transfer else None
        if resident or statistics is None:
            return {"source": self._source or "memory", "resident": resident}
        return {
            "source": self._source, "resident": False, "bytes_per_s": round(self.bytes_per_s, 1),
            "cpu_s": round(statistics.cpu_s, 4), "connections": self._transfer.connections if self._transfer else 0,
            "retries": statistics.retries, "refetched_chunks": statistics.refetched,
            "fetched_bytes": statistics.fetched_bytes,
        }  # fmt: skip

    def _make_transfer(self, entry: Entry) -> Transfer:
        chunks = plan_chunks(self.segment.layout, entry.index)
        etags = {name: info.etag for name, info in entry.objects.items()}
        transfer = Transfer(entry.source, self.segment, chunks, etags, entry.learned, self.pacer,
                            connections=self._settings.connections, retries=self._settings.retries)  # fmt: skip
        self._source = entry.source.kind
        with self._lock:
            if self._cancelled:
                raise FetchCancelled("the fetch was cancelled")
            self._transfer = transfer
        self.segment.set_index(entry.index.tensors)
        return transfer
