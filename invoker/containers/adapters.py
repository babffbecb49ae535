"""Adapters on their way into an instance: at the first run that wants one, and again after it has made room.

::

    fetchd:  Inspect ── FetchStart ── grant ── bytes arrive ──┐        cancel, close the descriptor socket
    here:                                       a reader of its own ── POST /adapter ── the run goes on

The bytes stay in fetchd's pool as those of a model do, so an adapter that comes back is not fetched again.  They go
through this process, because a container's descriptor socket keeps what it gave until the container ends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from invoker.containers.adapter_slots import AdapterSlots, Held, Wait, left_s
from invoker.containers.call import ContainerCall
from invoker.containers.fleet import Fleet
from invoker.containers.live import Live
from invoker.containers.turns import Turns
from relay.clients.fetch import DescriptorClient, FetchClient
from relay.protocol.adapter_messages import (
    ADAPTER_HEADER,
    CONFIG_BYTES_HEADER,
    MOST_ADAPTER_BYTES,
    REPLACES_HEADER,
    encoded,
)
from relay.protocol.messages import FetchStart
from relay.protocol.segment import SegmentReader
from thaw import wire
from thaw.checkpoints.checkpoint import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME
from thaw.errors import (
    ErrorInfo,
    InstanceBusy,
    InstanceGone,
    ModelCorrupt,
    ModelUnsupported,
    PlatformError,
    ProtocolError,
    ThawError,
    Throttled,
    TimeLimitExceeded,
    WorkerLost,
    from_info,
)
from thaw.ids import GroupId, InstanceId, random_hex_id
from thaw.logs import Log
from thaw.model import FileRange, ModelFacts
from thaw.plan import PlanModel

LABEL: Final = "adapter"
"""The names of its fetches begin with this: a restarted invoker cancels those of the last one."""
AHEAD_S: Final = 60.0
"""How long the bytes of an adapter may take to come before a run has asked for them."""

FETCHED_AHEAD: Final = 8
"""The most adapters that are fetched ahead at once, for all namespaces together."""

INSPECTIONS: Final = 6
"""A namespace has at most so many adapters inspected at once.  fetchd refuses more than 8 of models and adapters
together (fetchd/places.py)."""

LOOK_S: Final = 5.0

WatchHangup = Callable[[Callable[[], None]], Callable[[], None]]
"""A function that watches the run's client: it calls its argument when the client hangs up, until the function that it
returned is called."""


class Adapters:
    def __init__(self, fleet: Fleet, fetch: FetchClient, log: Log) -> None:
        self._fleet, self._fetch, self._log = fleet, fetch, log
        self._lock = threading.Lock()
        self._inspections = Turns(INSPECTIONS)
        self._ahead: deque[tuple[str, str, float]] = deque()  # URI, namespace, deadline
        self._n_ahead = 0  # threads that fetch them

    @contextmanager
    def using(self, live: Live, uri: str, deadline: float, watch_hangup: WatchHangup) -> Iterator[Held]:
        """While the block runs, the instance has the adapter.  ``deadline`` is monotonic.

        Raises ModelNotFound, ModelCorrupt, ModelUnsupported, StoreUnavailable, TimeLimitExceeded, InstanceBusy when it
        may be there later, InstanceGone when the instance is ending, and ConnectionAbortedError when the client hangs
        up.
        """
        slots = self._slots_of(live, deadline)
        held = slots.pinned(uri) or self._brought(live, slots, uri, Wait(deadline), watch_hangup)
        try:
            yield held
        finally:
            slots.unpin(held)

    def _brought(self, live: Live, slots: AdapterSlots, uri: str, wait: Wait, watch_hangup: WatchHangup) -> Held:
        """Return the pinned adapter.  Its load goes on when the run that wanted it first waits no longer."""
        unwatch = watch_hangup(lambda: slots.hang_up(wait))
        try:
            held, replaces = slots.pin(uri, wait)
            if replaces is None:
                return held
            args = (live, slots, held, replaces, wait.deadline)
            threading.Thread(target=self._bring, args=args, name="adapter", daemon=True).start()
            try:
                slots.wait_loaded(held, wait)
            except BaseException:
                slots.unpin(held)
                raise
            return held
        finally:
            unwatch()

    def _bring(self, live: Live, slots: AdapterSlots, held: Held, replaces: str, deadline: float) -> None:
        began = time.monotonic()
        try:
            name, n_bytes = self._load(live, held.uri, replaces, deadline)
        except Exception as e:  # noqa: BLE001  the edge of a thread: a run waits for the end of the load
            self._look_again(live, slots)
            bug = PlatformError(f"the load of an adapter failed on a bug: {type(e).__name__}: {e}")
            slots.failed(held, e if isinstance(e, ThawError) else bug)
            return
        took_s = round(time.monotonic() - began, 4)
        self._log.event("adapter_loaded", instance_id=live.record.instance_id, n_bytes=n_bytes, s=took_s)
        slots.loaded(held, name)

    def fetch_ahead(self, uris: Sequence[str], namespace: str) -> None:
        """Bring adapters into fetchd's pool while the instance for the requests that want them starts.  An error is not
        reported here: the runs meet it themselves."""
        deadline = time.monotonic() + AHEAD_S
        with self._lock:
            self._ahead.extend((uri, namespace, deadline) for uri in uris)
            n_more = min(FETCHED_AHEAD - self._n_ahead, len(uris))
            self._n_ahead += n_more
        for _ in range(n_more):
            threading.Thread(target=self._fetch_all_ahead, name="adapters-ahead", daemon=True).start()

    def _fetch_all_ahead(self) -> None:
        while True:
            with self._lock:
                if not self._ahead:
                    self._n_ahead -= 1
                    return
                wanted = self._ahead.popleft()
            self._fetch_ahead(*wanted)

    def _inspect(self, uri: str, namespace: str, deadline: float) -> ModelFacts:
        with self._inspections.one_of(namespace, deadline):
            return self._fetch.inspect_adapter(uri, namespace, deadline_s=left_s(deadline))

    def _fetch_ahead(self, uri: str, namespace: str, deadline: float) -> None:
        with suppress(ThawError):
            facts = self._inspect(uri, namespace, deadline)
            request = self._request(facts, GroupId(f"{LABEL}-{random_hex_id()}"), namespace)
            try:
                self._fetch.start(request, deadline_s=left_s(deadline))
                self._fetch.wait(request.group_id, 0, deadline_s=left_s(deadline))
            finally:
                self._quietly(lambda: self._fetch.cancel(request.group_id, self._fleet.epoch))

    def _request(self, facts: ModelFacts, group_id: GroupId, namespace: str) -> FetchStart:
        """Raises ModelCorrupt, ModelUnsupported."""
        for file in (ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME):
            if not facts.files.get(file):
                raise ModelCorrupt(f"{facts.asked_for} has no {file}", hint="push the adapter again")
        if facts.n_bytes > MOST_ADAPTER_BYTES:
            raise ModelUnsupported(
                f"the adapter has {facts.n_bytes} bytes; at most {MOST_ADAPTER_BYTES} are taken",
                hint="merge it into its base model and push the result",
            )
        ranges = tuple(FileRange(file, 0, n_bytes) for file, n_bytes in facts.files.items() if n_bytes)
        model = PlanModel(facts.uri, facts.sha256, facts.etag, facts.n_bytes)
        return FetchStart(group_id, 0, self._fleet.epoch, model, ranges, namespace=namespace)

    def lost(self, live: Live, held: Held) -> None:
        """The container says that it does not have the adapter."""
        slots = live.adapters
        if slots is not None and slots.lose(held):
            self._look_again(live, slots)  # first, so that the place is not taken for a free one
            slots.forget(held)

    def _slots_of(self, live: Live, deadline: float) -> AdapterSlots:
        """The instance's own table.  A restarted invoker asks the container for its adapters."""
        if live.adapters is None:
            config = live.function.config if live.function is not None else None
            n_slots = config.adapter_slots if config is not None else 0
            if not n_slots:
                raise ModelUnsupported("this instance takes no adapters", hint="deploy the function again")
            made = AdapterSlots(n_slots, _asked(live, "GET", "/adapters", "", b"", deadline)["names"])
            with self._lock:
                live.adapters = live.adapters or made  # another first run may have been faster
            if live.exited.is_set():
                live.adapters.close()
        return live.adapters

    def _look_again(self, live: Live, slots: AdapterSlots) -> None:
        """After a failed load it is unknown whether the other adapter was removed to make room.  A load that was given
        up may have ended since."""
        known = slots.names()
        with suppress(ThawError):
            slots.take_over(_asked(live, "GET", "/adapters", "", b"", time.monotonic() + LOOK_S)["names"], known)

    def _load(self, live: Live, uri: str, replaces: str, deadline: float) -> tuple[str, int]:
        """Return the name under which the container has it now, and its bytes."""
        namespace = live.record.action.partition("/")[0]
        try:
            return self._load_for(live, uri, replaces, namespace, deadline)
        except Throttled as e:  # to a client this error means something else: this is the host's own limit
            raise InstanceBusy(e.message, hint=e.hint) from e

    def _load_for(self, live: Live, uri: str, replaces: str, namespace: str, deadline: float) -> tuple[str, int]:
        facts = self._inspect(uri, namespace, deadline)
        name = f"{uri}#{facts.version}"
        with self._fetched(facts, namespace, deadline) as (config, weights):
            headers = (
                f"{ADAPTER_HEADER}: {encoded(name)}\r\n{REPLACES_HEADER}: {encoded(replaces)}\r\n"
                f"{CONFIG_BYTES_HEADER}: {len(config)}\r\n"
            )
            _asked(live, "POST", "/adapter", headers, b"".join((config, weights)), deadline)
        return name, facts.n_bytes

    @contextmanager
    def _fetched(self, facts: ModelFacts, namespace: str, deadline: float) -> Iterator[tuple[memoryview, memoryview]]:
        """The bytes of the two files, while the block runs."""
        mark, fetch = random_hex_id(), self._fetch
        group_id, reader_id = GroupId(f"{LABEL}-{mark}"), InstanceId(f"{LABEL}-{mark[:24]}")
        request = self._request(facts, group_id, namespace)
        try:
            started = fetch.start(request, deadline_s=left_s(deadline))
            path = fetch.open_descriptor_socket(reader_id, deadline_s=left_s(deadline))
            fetch.grant_segment(reader_id, started.segment_id, group_id, 0, deadline_s=left_s(deadline))
            client = DescriptorClient.connect(path, deadline_s=left_s(deadline))
            try:
                reader = client.segment(deadline_s=left_s(deadline))
                try:
                    reader.wait(reader.n_bytes, left_s(deadline))
                    views = (_view(reader, facts, name) for name in (ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME))
                    with next(views) as config, next(views) as weights:
                        yield config, weights
                finally:
                    reader.close()
            finally:
                client.close()
        finally:
            self._quietly(lambda: fetch.close_descriptor_socket(reader_id))
            self._quietly(lambda: fetch.cancel(group_id, self._fleet.epoch))

    @staticmethod
    def _quietly(tell: Callable[[], None]) -> None:
        with suppress(ThawError):  # fetchd is away: it holds nothing when it comes back
            tell()


def _view(reader: SegmentReader, facts: ModelFacts, file: str) -> memoryview:
    return reader.view(reader.locate(file, 0), facts.files[file])


def _asked(live: Live, method: str, path: str, headers: str, body: bytes, deadline: float) -> dict[str, Any]:
    """The container's answer.  Raises the error that it names."""
    if live.handle is None:
        raise InstanceGone("the instance has no container")
    try:
        status, plain = ContainerCall(live.handle.socket_path, left_s(deadline)).ask(method, path, body, headers)
    except TimeoutError as e:
        raise TimeLimitExceeded("the adapter was not loaded within the action's time limit") from e
    except (OSError, ProtocolError) as e:
        raise InstanceGone(f"the container gave no answer: {e}") from e
    if status != 200:
        info = plain.get("info")
        raise from_info(wire.from_plain(ErrorInfo, info)) if info else WorkerLost(f"the container answered {status}")
    return plain
