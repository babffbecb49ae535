"""fetchd as the invoker sees it, in this process.  It records the requests, and ends fetches when a test says so."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from relay.clients.fetch import FetchClient
from relay.protocol.messages import FetchDone, FetchStart, FetchStarted, FetchStatus, SegmentStatus, Status
from thaw.errors import ThawError, Unavailable
from thaw.ids import GroupId, InstanceId
from thaw.model import ModelFacts
from thaw.tracing.trace import Phase, event


class FakeFetchd(FetchClient):
    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory / "none"))
        self._directory = directory
        self.calls: list[str] = []
        self.requests: list[FetchStart] = []
        self.open: set[str] = set()
        self.holders: set[str] = set()  # the holders of its only segment, which takes two slabs
        self.files = {"config.json": 2, "tokenizer.json": 4, "model.safetensors": 4}
        self.failure: ThawError | None = None
        self.fetching: dict[GroupId, FetchStart] = {}
        self.ended = threading.Event()
        self.is_up = threading.Event()  # no fetch begins before this is set
        self.is_up.set()

    def inspect(self, uri: str, namespaces: tuple[str, ...] = (), *, deadline_s: float = 0) -> ModelFacts:
        self.calls.append("inspect")
        return ModelFacts(uri, 10, 8, 1, (4,), 4, "00", "", True, self.files)

    def start(self, request: FetchStart, *, deadline_s: float = 0) -> FetchStarted:
        self.calls.append("start")
        self.requests.append(request)
        assert self.is_up.wait(20)
        self.holders.add(f"fetch:{request.group_id}/{request.stage}")
        self.fetching[request.group_id] = request
        return FetchStarted("segment-1", 10, False)

    def wait(self, group_id: GroupId, stage: int, *, deadline_s: float) -> FetchDone:
        assert self.ended.wait(deadline_s)
        self.fetching.pop(group_id, None)
        if self.failure is not None:
            raise self.failure
        return FetchDone("segment-1", 10, 10, (event(Phase.FETCH_END, group_id=group_id),))

    def cancel(self, group_id: GroupId, epoch: int, *, deadline_s: float = 0) -> None:
        self.calls.append("cancel")
        self.fetching.pop(group_id, None)
        self.holders = {h for h in self.holders if not h.startswith(f"fetch:{group_id}/")}
        if not self.ended.is_set():
            self.failure = Unavailable("the fetch was cancelled")
            self.ended.set()

    def open_descriptor_socket(self, instance_id: InstanceId, *, deadline_s: float = 0) -> str:
        self.calls.append("open_descriptor_socket")
        self.open.add(instance_id)
        path = self._directory / f"door-{instance_id[-6:]}"
        for suffix in (".init", ".feed", ".consolidate"):
            os.mkfifo(f"{path}{suffix}")
        return str(path)

    def grant_segment(
        self, instance_id: InstanceId, segment_id: str, group_id: GroupId, stage: int, *, deadline_s: float = 0
    ) -> None:
        self.calls.append(f"grant {segment_id}")
        self.holders = self.holders - {f"fetch:{group_id}/{stage}"} | {f"door:{instance_id}"}

    def close_descriptor_socket(self, instance_id: InstanceId, *, deadline_s: float = 0) -> None:
        self.calls.append("close_descriptor_socket")
        self.open.discard(instance_id)
        self.holders.discard(f"door:{instance_id}")

    def descriptor_sockets(self, *, deadline_s: float = 0) -> tuple[InstanceId, ...]:
        return tuple(InstanceId(i) for i in self.open)

    def status(self, *, deadline_s: float = 0) -> Status:
        segment = SegmentStatus("segment-1", "u", 10, 10, tuple(self.holders), "v", "its key", 2, True)
        fetches = tuple(FetchStatus(g, r.stage, r.model.uri, 10, 0, 0.0) for g, r in list(self.fetching.items()))
        return Status(1 << 30, 1 << 29, (segment,), fetches, 1e8, 1 << 26)
