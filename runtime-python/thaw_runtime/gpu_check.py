"""``python -m thaw_runtime.gpu_check``: measure and check in one run what can be known only on a machine with a GPU.

The program probes the driver directly (register cost, rates by streams and piece size, whether priorities reorder
copies) and through the parameter manager (a load of bytes that have arrived and one of arriving bytes, KV blocks out
and in), and compares every byte.  Without a driver it runs over the fake driver of the native tests: then every number
describes the host's memory, and only the code paths are checked.  The last line is JSON; docs/gpu.md explains it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Final

from relay.protocol.messages import SegmentOffer
from relay.protocol.segment import ControlPage, lay_out, segment_bytes
from thaw.errors import PlatformError, Unavailable
from thaw.model import FileRange, TensorInfo
from thaw_runtime.weights import native_library
from thaw_runtime.weights.parameter_manager import KvBlocks, NativeSegment, ParameterManager

MIB: Final = 1 << 20
FAKE: Final = Path(__file__).parents[2] / "build" / "native" / "plain" / "fake" / "libcuda.so.1"
SLAB_BYTES: Final = 64 * MIB
_PORTABLE, _READ_ONLY = 0x01, 0x08
_NON_BLOCKING, _BLOCKING_SYNC = 0x1, 0x1
_DEADLINE_S: Final = 120.0


class Driver:
    """The driver calls of the probe; they run on this thread, in the manager's context."""

    def __init__(self, path: str, context: int) -> None:
        self._cuda = ctypes.CDLL(path)
        self.call("cuCtxSetCurrent", c_void_p(context))

    def call(self, name: str, *arguments: object) -> None:
        if result := getattr(self._cuda, name)(*arguments):
            raise PlatformError(f"{name}: error {result}")

    def try_call(self, name: str, *arguments: object) -> int:
        return int(getattr(self._cuda, name)(*arguments))

    def priorities(self) -> tuple[int, int]:
        least, greatest = c_int(), c_int()
        self.call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
        return least.value, greatest.value

    @contextmanager
    def stream(self, priority: int) -> Iterator[c_void_p]:
        made = c_void_p()
        self.call("cuStreamCreateWithPriority", byref(made), _NON_BLOCKING, priority)
        try:
            yield made
        finally:
            self.call("cuStreamDestroy_v2", made)

    @contextmanager
    def pinned(self, n_bytes: int) -> Iterator[c_void_p]:
        made = c_void_p()
        self.call("cuMemHostAlloc", byref(made), c_size_t(n_bytes), _PORTABLE)
        try:
            yield made
        finally:
            self.call("cuMemFreeHost", made)

    @contextmanager
    def memory(self, n_bytes: int) -> Iterator[c_uint64]:
        made = c_uint64()
        self.call("cuMemAlloc_v2", byref(made), c_size_t(n_bytes))
        try:
            yield made
        finally:
            self.call("cuMemFree_v2", made)


def _gb_per_s(n_bytes: int, seconds: float) -> float:
    return round(n_bytes / seconds / 1e9, 2)


def _timed(run: Callable[[], object], times: int = 5) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


# ── the driver alone ──────────────────────────────────────────────────────────────────────────────────────────────


def register_cost(driver: Driver, n_bytes: int) -> dict[str, float | int]:
    """Milliseconds to register pages that are in memory: by a mapping without write permission, and by a writable one.

    A negative value is the driver's error code.
    """
    fd = os.memfd_create("gpu_check")
    os.ftruncate(fd, n_bytes)
    writer = mmap.mmap(fd, n_bytes)
    writer.write(b"\1" * n_bytes)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = c_void_p, [c_void_p, c_size_t, c_int, c_int, c_int, ctypes.c_long]
    libc.munmap.argtypes = [c_void_p, c_size_t]
    address = c_void_p(libc.mmap(None, n_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0))
    found: dict[str, float | int] = {"n_bytes": n_bytes}
    for name, at, flags in (
        ("read_only_ms", address, _PORTABLE | _READ_ONLY),
        ("writable_ms", c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(writer))), _PORTABLE),
    ):
        began = time.perf_counter()
        result = driver.try_call("cuMemHostRegister_v2", at, c_size_t(n_bytes), flags)
        found[name] = round((time.perf_counter() - began) * 1e3, 2) if result == 0 else -result
        if result == 0:
            driver.call("cuMemHostUnregister", at)
    libc.munmap(address, n_bytes)
    os.close(fd)
    return found


def rates(driver: Driver, n_bytes: int) -> dict[str, float]:
    """GB/s to the device by number of streams and size of a copy, and GB/s from the device."""
    found = {}
    with driver.pinned(n_bytes) as host, driver.memory(n_bytes) as device:
        for n_streams in (1, 2, 3):
            for piece in (p * MIB for p in (1, 4, 16, 64) if p * MIB <= n_bytes):
                seconds = _timed(lambda n=n_streams, p=piece: _copy(driver, host, device, n_bytes, p, n), 3)  # type: ignore[misc]
                found[f"to_device_{n_streams}x{piece // MIB}MiB"] = _gb_per_s(n_bytes, seconds)
        back = min(16 * MIB, n_bytes)
        found["to_host_1x16MiB"] = _gb_per_s(
            n_bytes, _timed(lambda: _copy(driver, host, device, n_bytes, back, 1, "cuMemcpyDtoHAsync_v2"), 3)
        )
    return found


def _copy(
    driver: Driver,
    host: c_void_p,
    device: c_uint64,
    n_bytes: int,
    piece: int,
    n_streams: int,
    call: str = "cuMemcpyHtoDAsync_v2",
) -> None:
    assert host.value is not None  # noqa: S101  for the type checker: pinned() gave memory
    streams = []
    for _ in range(n_streams):
        made = c_void_p()
        driver.call("cuStreamCreateWithPriority", byref(made), _NON_BLOCKING, 0)
        streams.append(made)
    for i, at in enumerate(range(0, n_bytes, piece)):
        here, there = c_void_p(host.value + at), c_uint64(device.value + at)
        ends = (there, here) if "HtoD" in call else (here, there)
        driver.call(call, *ends, c_size_t(min(piece, n_bytes - at)), streams[i % n_streams])
    for stream in streams:
        driver.call("cuStreamSynchronize", stream)
        driver.call("cuStreamDestroy_v2", stream)


def priorities(driver: Driver, n_bytes: int) -> dict[str, float]:
    """How long a 4 MiB copy on a stream of the highest priority takes: alone, and behind ``n_bytes`` of copies with the
    lowest priority.

    If the second time is near the first, priorities reorder copies, and the manager's own queueing is not needed.
    """
    least, greatest = driver.priorities()
    small = min(4 * MIB, n_bytes)
    found = {}
    with (
        driver.pinned(n_bytes) as host,
        driver.memory(n_bytes) as device,
        driver.pinned(small) as urgent,
        driver.memory(small) as target,
        driver.stream(least) as low,
        driver.stream(greatest) as high,
    ):
        for name, busy in (("alone_ms", False), ("behind_background_ms", True)):
            if busy:
                for at in range(0, n_bytes, small):
                    assert host.value is not None  # noqa: S101
                    driver.call(
                        "cuMemcpyHtoDAsync_v2",
                        c_uint64(device.value + at),
                        c_void_p(host.value + at),
                        c_size_t(min(small, n_bytes - at)),
                        low,
                    )
            began = time.perf_counter()
            driver.call("cuMemcpyHtoDAsync_v2", target, urgent, c_size_t(small), high)
            driver.call("cuStreamSynchronize", high)
            found[name] = round((time.perf_counter() - began) * 1e3, 3)
            driver.call("cuStreamSynchronize", low)
    return found


# ── the parameter manager ─────────────────────────────────────────────────────────────────────────────────────────


class _Resident:
    """A segment of random bytes, and a writer that makes them arrive step by step."""

    def __init__(self, n_bytes: int, n_tensors: int) -> None:
        each = n_bytes // n_tensors
        tensors = tuple(TensorInfo(f"t{i}", "w", i * each, each, "U8", (each,)) for i in range(n_tensors))
        layout = lay_out([FileRange("w", 0, n_bytes)])
        whole = segment_bytes(layout)
        slab = min(SLAB_BYTES, -(-whole // mmap.PAGESIZE) * mmap.PAGESIZE)
        n_slabs = -(-whole // slab)
        self.fds = [os.memfd_create("gpu_check") for _ in range(n_slabs + 1)]
        for fd, size in zip(self.fds, [mmap.PAGESIZE, *[slab] * n_slabs], strict=True):
            os.ftruncate(fd, size)
        for fd in self.fds[1:]:
            for at in range(0, slab, MIB):
                os.pwrite(fd, os.urandom(min(MIB, slab - at)), at)
        self.page = ControlPage(mmap.mmap(self.fds[0], mmap.PAGESIZE), whole)
        self.offer = SegmentOffer("gpu-check", whole, slab, n_slabs, layout, tensors)

    def open(self, manager: ParameterManager) -> NativeSegment:
        return NativeSegment(manager, self.offer, [os.dup(fd) for fd in self.fds])

    def arrive(self, seconds: float, steps: int = 50) -> threading.Thread:
        def run() -> None:
            done = threading.Event()
            for i in range(1, steps):
                done.wait(seconds / steps)
                self.page.advance(self.offer.n_bytes * i // steps)
            self.page.complete()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", c_size_t), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


def _device_address(capsule: object) -> int:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(_DLTensor.from_address(pointer(capsule, b"dltensor")).data)


def _on_device(manager: ParameterManager, address: int, n_bytes: int) -> bytearray:
    """Copy the bytes at a device address to the host, with the code that copies KV blocks."""
    block = 4096
    plane = native_library.KvPlane(address, n_bytes // block, block, block)
    return KvBlocks(manager, [[plane]]).gather(0, range(n_bytes // block)).wait(_DEADLINE_S)


def load(manager: ParameterManager, n_bytes: int, arriving_s: float) -> dict[str, object]:
    """Load a segment to the device and compare every byte.  All bytes are there from the beginning (``arriving_s`` 0),
    or they arrive over ``arriving_s`` seconds.
    """
    resident = _Resident(n_bytes, 16)
    before = manager.state()
    segment = resident.open(manager)
    writer = resident.arrive(arriving_s) if arriving_s else None
    if writer is None:
        resident.page.complete()
    began = time.perf_counter()
    loading = segment.load(resident.offer.tensors)
    capsules = []
    for i in range(len(resident.offer.tensors)):
        loading.wait(i, _DEADLINE_S)
        capsules.append(loading.capsule(i))
    seconds = time.perf_counter() - began
    after = manager.state()  # read before the comparison, which copies every byte back through bounce buffers
    if writer is not None:
        writer.join()
    same = all(
        _on_device(manager, _device_address(capsule), t.n_bytes // 4096 * 4096)
        == segment.view(t.offset, t.n_bytes // 4096 * 4096)
        for capsule, t in zip(capsules, resident.offer.tensors, strict=True)
    )
    del capsules, loading
    resident.close()
    return {
        "n_bytes": n_bytes,
        "seconds": round(seconds, 4),
        "gb_per_s": _gb_per_s(n_bytes, seconds),
        "same_bytes": same,
        "registered_bytes": after.registered_bytes - before.registered_bytes,
        "bounced_bytes": after.bounced_bytes - before.bounced_bytes,
    }


def kv(manager: ParameterManager, driver: Driver, n_blocks: int, block: int) -> dict[str, object]:
    """Copy blocks into (scatter) and out of (gather) device memory, in an order in which few blocks are adjacent."""
    with driver.memory(n_blocks * block) as memory:
        blocks = KvBlocks(manager, [[native_library.KvPlane(memory.value, n_blocks, block, block)]])
        order = [(i * 7) % n_blocks for i in range(n_blocks)] if n_blocks % 7 else list(range(n_blocks))
        chunk = bytearray(os.urandom(n_blocks * block))
        scatter_s = _timed(lambda: blocks.scatter(0, order, chunk).wait(_DEADLINE_S), 3)
        began = time.perf_counter()
        out = blocks.gather(0, order).wait(_DEADLINE_S)
        gather_s = time.perf_counter() - began
        return {
            "same_bytes": out == chunk,
            "scatter_gb_per_s": _gb_per_s(len(chunk), scatter_s),
            "gather_gb_per_s": _gb_per_s(len(chunk), gather_s),
        }


def shared_context(manager: ParameterManager) -> bool | str:
    """Return whether torch works in the context that the manager made, or why this was not tried."""
    try:
        import torch
    except ImportError as e:
        return f"not tried: {e}"
    if not torch.cuda.is_available():
        return "not tried: this torch has no CUDA"
    torch.zeros(1, device="cuda")
    current = c_void_p()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(byref(current))
    return current.value == manager.state().context


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fake", action="store_true", help="over the fake driver, also where there is a real one")
    args = parser.parse_args()
    library = native_library.find()
    fake, path = args.fake, "libcuda.so.1"
    try:
        manager = ParameterManager(library, cuda=True, libcuda=str(FAKE) if fake else None)
        manager.ready(_DEADLINE_S)
    except Unavailable as e:
        print(f"no CUDA device ({e}): running over the fake driver, no number below is a GPU's", file=sys.stderr)
        fake = True
        manager = ParameterManager(library, cuda=True, libcuda=str(FAKE))
        manager.ready(_DEADLINE_S)
    path = str(FAKE) if fake else path
    state = manager.state()
    driver = Driver(path, state.context)
    big = 16 * MIB if fake else 1024 * MIB
    checks: dict[str, object] = {
        "context_s": round(state.context_s, 4),
        "shared_primary_context": "not tried: the fake carries no torch" if fake else shared_context(manager),
        "read_only_register": state.read_only_register,
        "register": register_cost(driver, min(64 * MIB, big)),
        "rates_gb_per_s": rates(driver, min(256 * MIB, big)),
        "priorities": priorities(driver, min(256 * MIB, big)),
        "load_resident": load(manager, big, 0.0),
        "load_arriving": load(manager, big // 4, 1.0),
        "kv": kv(manager, driver, 100 if fake else 4000, 32 * 1024),
    }
    good = all(c.get("same_bytes", True) for c in checks.values() if isinstance(c, dict))
    good = good and checks["shared_primary_context"] is not False
    print(json.dumps({"fake": fake, "device": state.name, "ok": good, **checks}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
