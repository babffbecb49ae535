"""The parameter manager gives an engine a segment's tensors, with the native library if there is one.

::

    start() ─▶ ParameterManager ─▶ open_segment() ─▶ NativeSegment ─▶ load() ─▶ Load ─▶ capsule(i)
              (CUDA context made     (a Segment)                      tensors, in order, each when its bytes are there
               while others import)

It is started before any heavy import and imports neither torch nor vLLM: a tensor leaves as a DLPack capsule, for
``torch.from_dlpack``.  On the CPU a tensor is a view of the segment, whose mapping is kept until the last tensor is
freed; on a CUDA device it is a copy.  Without the library, relay's SegmentReader is used instead, which is logged once.
"""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from typing import Final, Self

from relay.protocol.messages import SegmentOffer
from relay.protocol.segment import Places, SegmentReader
from thaw.errors import ModelCorrupt, ModelUnsupported, ProtocolError, ThawError, Unavailable
from thaw.logs import Log
from thaw.model import TensorInfo
from thaw_runtime.weights import native_library as native
from thaw_runtime.weights.native_library import Library, timeout_ns

_log = Log("parameter_manager")
_WINDOW_BYTES: Final = 2 * 1024**3
"""Device memory for tensors that the engine has not taken yet.  The largest layers in use have under 1.5 GiB."""


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device's description of itself; times and bytes count since the device was opened."""

    name: str
    cuda: bool
    read_only_register: bool
    context_s: float
    registered_bytes: int
    bounced_bytes: int
    copied_bytes: int
    live_bytes: int
    context: int


class ParameterManager:
    """One device of this process.  It must be made after the last fork: a CUDA context does not survive a fork."""

    def __init__(self, library: Library, *, cuda: bool = False, libcuda: str | None = None) -> None:
        """Return at once, while a thread makes the CUDA context.  Raises Unavailable when there is no driver."""
        self.library = library
        self.cuda = cuda
        config = native.DeviceConfig(cuda=cuda, libcuda=libcuda.encode() if libcuda else None)
        self.device = _opened(library, "thaw_device_free", library.call.thaw_device_open, config)

    def ready(self, deadline_s: float) -> None:
        """Wait until the context has been made.  Raises Unavailable when there is no device."""
        self.library.check(self.library.call.thaw_device_ready(self.device, timeout_ns(deadline_s)))

    def state(self) -> DeviceState:
        info = native.DeviceInfo()
        self.library.check(self.library.call.thaw_device_describe(self.device, info))
        return DeviceState(
            info.name.decode(),
            bool(info.cuda),
            bool(info.read_only_register),
            info.context_ns / 1e9,
            info.registered_bytes,
            info.bounced_bytes,
            info.copied_bytes,
            info.live_bytes,
            info.context,
        )


class _Handle(c_void_p):
    """A pointer from the library that is freed with this object."""


def _opened(library: Library, free: str, opener: Callable[..., int], *arguments: object) -> _Handle:
    out = c_void_p()
    library.check(opener(*arguments, ctypes.byref(out)))
    handle = _Handle(out.value)
    # The arguments are kept until after the freeing call, because a copy may still be writing to one of them.
    weakref.finalize(handle, _free, getattr(library.call, free), out.value, arguments).atexit = False
    return handle


def _free(free: Callable[[c_void_p], None], pointer: int | None, keeps: object) -> None:
    free(c_void_p(pointer))


class NativeSegment:
    """A granted segment, read by the native library; it replaces relay.protocol.segment.SegmentReader."""

    def __init__(self, manager: ParameterManager, offer: SegmentOffer, fds: Sequence[int]) -> None:
        """Takes ownership of ``fds`` (control page, slabs).  Raises ProtocolError."""
        self.offer = offer
        self.n_bytes = offer.n_bytes
        self.first_bytes = offer.first_bytes or offer.n_bytes
        self.manager = manager
        self.locate = Places(offer.layout).locate
        library = manager.library
        try:
            if len(fds) != offer.n_slabs + 1:
                raise ProtocolError(f"segment of {offer.n_bytes} bytes came with {len(fds)} descriptors")
            numbers = (ctypes.c_int * len(fds))(*fds)
            self.handle = _opened(
                library,
                "thaw_segment_free",
                library.call.thaw_segment_open,
                numbers,
                len(fds),
                offer.n_bytes,
                offer.slab_bytes,
            )
        finally:
            for fd in fds:
                os.close(fd)
        self.address = int(library.call.thaw_segment_address(self.handle))
        memory = (ctypes.c_ubyte * self.n_bytes).from_address(self.address)
        vars(memory)["keeps"] = self.handle  # a view keeps this object alive, and this object keeps the mapping
        self._view = memoryview(memory).cast("B").toreadonly()
        self._wait = library.call.thaw_segment_wait

    @property
    def end(self) -> int:
        return self.wait(0, 0.0)

    def view(self, segment_offset: int, n_bytes: int) -> memoryview:
        """Read-only bytes, which are meaningful only below :attr:`end`.  The view stays valid after :meth:`close`."""
        if segment_offset < 0 or n_bytes < 0 or segment_offset + n_bytes > self.n_bytes:
            raise ValueError(f"[{segment_offset}, +{n_bytes}) lies outside the segment of {self.n_bytes} bytes")
        return self._view[segment_offset : segment_offset + n_bytes]

    def wait(self, end: int, deadline_s: float) -> int:
        """Sleep until ``[0, end)`` has arrived, and return the current end of the arrived bytes.

        Raises the same errors as SegmentReader.wait, and PlatformError as soon as the segment is closed.
        """
        have = ctypes.c_uint64()
        status = self._wait(self.handle, end, timeout_ns(deadline_s), have)
        if status != native.OK:
            raise self.error(status)
        return have.value

    def error(self, status: int) -> Exception:
        library = self.manager.library
        return library.fetch_error(self.handle) if status == native.FETCH_FAILED else library.error(status)

    def load(self, tensors: Sequence[TensorInfo]) -> Load:
        """Begin to load ``tensors`` in this order.  Raises ModelUnsupported, ModelCorrupt or KeyError."""
        return Load(self, tensors)

    def close(self) -> None:
        """Wake all waiting threads.  The mapping is released with its last view and tensor."""
        self.manager.library.call.thaw_segment_close(self.handle)


class Load:
    """A table of tensors that are being loaded; tensor ``i`` can be taken once, after a ``wait`` for it."""

    def __init__(self, segment: NativeSegment, tensors: Sequence[TensorInfo]) -> None:
        self._segment = segment
        self._library = library = segment.manager.library
        places = [segment.locate(info.file, info.offset) for info in tensors]
        rows = map(_row, tensors, places, range(len(tensors)), repeat(segment.first_bytes))
        table = b"".join(rows)
        self._ends = [place + info.n_bytes for place, info in zip(places, tensors, strict=True)]
        window = _WINDOW_BYTES if segment.manager.cuda else 0
        self._handle = _opened(
            library,
            "thaw_load_free",
            library.call.thaw_load_open,
            segment.manager.device,
            segment.handle,
            table,
            len(tensors),
            window,
        )
        self._seen = -1  # the last known watermark; not used on a device, where ready means copied
        self._views = not segment.manager.cuda

    def wait(self, i: int, deadline_s: float, stream: int | None = None) -> None:
        """Wait until tensor ``i`` can be read by any code or, with ``stream``, by work that is queued on that CUDA
        stream afterwards.  Raises the same errors as the segment's ``wait``.
        """
        if self._views:
            if self._ends[i] > self._seen:
                self._seen = self._segment.wait(self._ends[i], deadline_s)
            return
        call, limit = self._library.call, timeout_ns(deadline_s)
        if stream is None:
            status = call.thaw_load_wait(self._handle, i, limit)
        else:
            status = call.thaw_load_wait_stream(self._handle, i, stream, limit)
        if status != native.OK:
            raise self._segment.error(status)

    def capsule(self, i: int) -> object:
        """Tensor ``i`` for ``torch.from_dlpack``; it can be taken once.  F8 tensors come as bytes.  Raises ValueError
        before a ``wait`` for the tensor.
        """
        capsule: object = self._library.make_capsule(self._handle, i)
        if capsule is None:
            raise ValueError(self._library.error_text)
        return capsule

    def close(self) -> None:
        """Wake all threads that wait for a tensor.  Tensors that were taken stay valid."""
        self._library.call.thaw_load_close(self._handle)


_NO_DIMS: Final = (0,) * native.MAX_DIMS


def _row(info: TensorInfo, offset: int, group: int, first_bytes: int) -> bytes:
    """Row ``group`` of the table.  A tensor that begins at or behind ``first_bytes`` is copied in the background."""
    number, item_bytes = native.DTYPES.get(info.dtype, (0, 0))
    n_dims = len(info.shape)
    if not item_bytes or n_dims > native.MAX_DIMS:
        raise ModelUnsupported(
            f"tensor {info.name} has dtype {info.dtype} and {n_dims} dimensions, which the engine does not have"
        )
    if math.prod(info.shape) * item_bytes != info.n_bytes:
        raise ModelCorrupt(f"tensor {info.name}: shape {list(info.shape)} of {info.dtype} is not {info.n_bytes} bytes")
    return native.TENSOR.pack(
        offset, info.n_bytes, number, n_dims, *info.shape, *_NO_DIMS[n_dims:], group, offset >= first_bytes
    )


class KvBlocks:
    """Copies KV blocks in the background: out of an engine's cache (gather) and into it (scatter)."""

    def __init__(self, manager: ParameterManager, layers: Sequence[Sequence[native.KvPlane]]) -> None:
        """``layers`` holds the planes of each layer; all layers have equally many (K and V, or both in one plane)."""
        self._library = library = manager.library
        planes = [plane for layer in layers for plane in layer]
        table = (native.KvPlane * len(planes))(*planes)
        self._handle = _opened(
            library,
            "thaw_kv_free",
            library.call.thaw_kv_open,
            manager.device,
            table,
            len(layers),
            len(planes) // len(layers),
        )

    def gather(self, layer: int, blocks: Sequence[int], stream: int = 0) -> KvCopy:
        """Copy ``blocks`` out of the cache, plane by plane, in this order, after the CUDA stream's work so far."""
        n_bytes = int(self._library.call.thaw_kv_bytes(self._handle, layer, len(blocks)))
        return self._copy(self._library.call.thaw_kv_gather, layer, blocks, bytearray(n_bytes), stream)

    def scatter(self, layer: int, blocks: Sequence[int], chunk: bytearray, stream: int = 0) -> KvCopy:
        """Copy a chunk that ``gather`` made into ``blocks``."""
        return self._copy(self._library.call.thaw_kv_scatter, layer, blocks, chunk, stream)

    def _copy(
        self, call: Callable[..., int], layer: int, blocks: Sequence[int], chunk: bytearray, stream: int
    ) -> KvCopy:
        numbers = (ctypes.c_uint32 * len(blocks))(*blocks)
        memory = (ctypes.c_ubyte * len(chunk)).from_buffer(chunk)
        handle = _opened(
            self._library,
            "thaw_ticket_free",
            call,
            self._handle,
            layer,
            numbers,
            len(blocks),
            memory,
            len(chunk),
            stream,
        )
        return KvCopy(self._library, handle, chunk)


class KvCopy:
    """A copy that may still be running; dropping this object waits for its end.  The buffer may be used and resized
    after ``wait`` has returned.
    """

    def __init__(self, library: Library, handle: _Handle, chunk: bytearray) -> None:
        self._library, self._chunk = library, chunk
        self._handle: _Handle | None = handle

    def wait(self, deadline_s: float) -> bytearray:
        if self._handle is not None:
            self._library.check(self._library.call.thaw_ticket_wait(self._handle, timeout_ns(deadline_s)))
            self._handle = None
        return self._chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle = None  # freeing the handle waits for the copy


# ── the one of this process ──────────────────────────────────────────────────────────────────────────────────────


@cache
def start() -> ParameterManager | None:
    """The manager of this process, made by the first call; None without the native library.  Never raises."""
    try:
        library = native.find()
    except (OSError, ThawError) as e:
        _log.event("native_library_missing", reason=str(e), instead="the Python reader", hint="make native")
        return None
    if not _wants_cuda():
        return ParameterManager(library)
    try:
        return ParameterManager(library, cuda=True)
    except Unavailable as e:
        _log.event("no_cuda_device", reason=str(e), instead="tensors in host memory")
        return ParameterManager(library)


def _wants_cuda() -> bool:
    """Return whether the installed torch has CUDA.  A CPU build cannot take CUDA tensors, and a context costs some
    hundred MB of GPU memory.

    This function reads torch's version file: the context is to be made while torch is being imported, and reading the
    package metadata takes 20 ms.
    """
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    try:
        return "+cpu" not in Path(torch.origin).with_name("version.py").read_text()
    except OSError:
        return False


def open_segment(offer: SegmentOffer, fds: Sequence[int]) -> NativeSegment | SegmentReader:
    """Open a segment with the native reader if there is one.  Takes ownership of ``fds``.  Raises ProtocolError."""
    manager = start()
    return SegmentReader(offer, fds) if manager is None else NativeSegment(manager, offer, fds)
