"""A descriptor socket with a segment, without fetchd.

It has real shared memory and a real control page, and bytes arrive when a test says so.  While bytes are missing, it
sends heartbeats as fetchd does: a reader that waits for bytes would otherwise take fetchd for dead, however long the
test had to wait for a processor.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import struct
import threading
from pathlib import Path

from relay.clients.channel import Channel, ChannelClosed
from relay.protocol.messages import SegmentOffer, to_plain
from relay.protocol.segment import HEARTBEAT_S, ControlPage, SegmentState, lay_out, segment_bytes
from thaw import partition
from thaw.checkpoints.checkpoint import layer_of, parts_of
from thaw.errors import ErrorInfo
from thaw.model import FileRange, ModelParts, TensorInfo

SLAB_BYTES = 2 * 1024 * 1024
WEIGHTS = "model.safetensors"


class FakeDescriptorSocket:
    def __init__(
        self,
        model: Path,
        socket_path: Path,
        *,
        arrived: bool = True,
        layers: tuple[int, int] | None = None,
        full: bool = False,
    ) -> None:
        """The segment of the whole model, or of the stage that has ``layers``.

        The segment of a ``full`` worker has the rest of the model after these layers.
        """
        self.path = str(socket_path)
        self._fill(model, layers, full)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(8)
        self._channels: list[Channel] = []
        self._lock = threading.Lock()
        self._served = threading.Semaphore(0)
        if arrived:
            self.arrive(self.n_bytes)
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._serve, self._beat)]
        for thread in self._threads:
            thread.start()

    def arrive(self, end: int) -> None:
        """Let the first ``end`` bytes be readable."""
        with self._lock:
            if end >= self.n_bytes:
                self._page.complete()
            else:
                self._page.advance(end)

    def wait_served(self, n_clients: int) -> None:
        """Wait until ``n_clients`` more clients have got the segment."""
        for _ in range(n_clients):
            assert self._served.acquire(timeout=20), "no client came"

    def fail(self, error: ErrorInfo) -> None:
        with self._lock:
            self._page.fail(error)

    @property
    def sidecar_bytes(self) -> int:
        """The bytes before the weights."""
        return next(p.segment_offset for p in self.offer.layout if p.file == WEIGHTS)

    def hang_up(self) -> None:
        """End the connections, as the end of fetchd does."""
        for channel in self._channels:
            with contextlib.suppress(OSError):  # the other side has closed it
                channel.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._closed.set()
        self.hang_up()
        for thread in self._threads:
            thread.join()
        for channel in self._channels:  # one of them may have come during the end
            channel.close()
        for fd in self._fds:
            os.close(fd)

    def _fill(self, model: Path, layers: tuple[int, int] | None, full: bool) -> None:
        files = (p for p in sorted(model.rglob("*")) if p.suffix in (".json", ".jinja"))
        blobs = {p.relative_to(model).as_posix(): p.read_bytes() for p in files}
        weights = (model / WEIGHTS).read_bytes()
        (n,) = struct.unpack("<Q", weights[:8])
        data = 8 + n
        ranges = [FileRange(name, 0, len(blob)) for name, blob in blobs.items()]
        tensors = _tensors(weights, data)
        parts = [FileRange(WEIGHTS, data, len(weights) - data)]
        first = parts
        if layers is not None:
            found = model_parts(model)
            first = list(partition.ranges(found, layers))
            whole = partition.ranges(found, (0, len(found.layers)))
            parts = [*first, *(partition.rest(whole, first) if full else ())]
            tensors = tuple(t for p in parts for t in tensors if p.offset <= t.offset < p.offset + p.n_bytes)
        layout = lay_out([*ranges, *parts])
        blobs[WEIGHTS] = weights
        self.n_bytes = segment_bytes(layout)
        self.first_bytes = segment_bytes(lay_out([*ranges, *first]))
        n_slabs = -(-self.n_bytes // SLAB_BYTES)
        # one memfd per slab; a few large slabs would be enough, but several show that they are mapped in order
        slab = SLAB_BYTES if n_slabs < 200 else -(-self.n_bytes // (100 * SLAB_BYTES)) * SLAB_BYTES
        n_slabs = -(-self.n_bytes // slab)
        memory = bytearray(n_slabs * slab)
        for p in layout:
            memory[p.segment_offset : p.segment_offset + p.n_bytes] = blobs[p.file][p.offset : p.offset + p.n_bytes]
        page = os.memfd_create("page")
        os.ftruncate(page, 4096)
        self._page = ControlPage(mmap.mmap(page, 4096), self.n_bytes)
        self._fds = [page]
        for i in range(n_slabs):
            fd = os.memfd_create(f"slab{i}")
            view = memoryview(memory)[i * slab : (i + 1) * slab]
            while view:
                view = view[os.write(fd, view) :]
            self._fds.append(fd)
        self.offer = SegmentOffer("segment", self.n_bytes, slab, n_slabs, layout, tensors, self.first_bytes)

    def _beat(self) -> None:
        filling = True
        while filling and not self._closed.wait(HEARTBEAT_S):
            with self._lock:
                filling = self._page.state is SegmentState.FILLING
                if filling:
                    self._page.beat()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            channel = Channel(sock)
            self._channels.append(channel)
            try:
                channel.receive()
                channel.send(to_plain(self.offer), tuple(self._fds))
                self._served.release()
            except (ChannelClosed, OSError):
                continue  # the container was killed while it used the socket


def model_parts(model: Path) -> ModelParts:
    """The places of the parts of a checkpoint that is one file."""
    tensors = tensors_of(model)
    return parts_of(tensors, 1 + max(layer_of(t.name) or 0 for t in tensors))


def tensors_of(model: Path) -> tuple[TensorInfo, ...]:
    """The tensors of a checkpoint that is one file, in load order."""
    weights = (model / WEIGHTS).read_bytes()
    return _tensors(weights, 8 + int.from_bytes(weights[:8], "little"))


def _tensors(weights: bytes, data: int) -> tuple[TensorInfo, ...]:
    header = json.loads(weights[8:data])
    header.pop("__metadata__", None)
    found = sorted(header.items(), key=lambda item: item[1]["data_offsets"][0])
    return tuple(
        TensorInfo(
            name,
            WEIGHTS,
            data + t["data_offsets"][0],
            t["data_offsets"][1] - t["data_offsets"][0],
            t["dtype"],
            tuple(t["shape"]),
        )
        for name, t in found
    )
