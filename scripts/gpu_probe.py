"""Measure what a GPU host's driver does for a start: contexts, forks, pinning, copies, blocks and graphs.

Needs a CUDA device and a torch that uses it; nothing of Thaw.  Takes about half a minute and 5 GB of host memory.
docs/gpu.md has the results on one device and what follows from them.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, Final

import torch

MIB: Final = 1 << 20
N_BYTES: Final = 1 << 30
PIECE: Final = 64 * MIB
N_BLOCKS, BLOCK_BYTES = 4000, 32 * 1024
MADV_HUGEPAGE, MADV_POPULATE_READ = 14, 22
PORTABLE_READ_ONLY: Final = 0x09
MADE_IN_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

cuda: Any = None  # the driver, set by main()
libc: Any = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = c_void_p
libc.mmap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, ctypes.c_long]
libc.munmap.argtypes = [c_void_p, c_size_t]
libc.madvise.argtypes = [c_void_p, c_size_t, c_int]


class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class CopyAttributes(ctypes.Structure):
    _fields_ = [("order", c_int), ("source", Location), ("target", Location), ("flags", c_uint)]


def must(result: int) -> None:
    if result:
        raise SystemExit(f"gpu_probe: the driver answered {result}")


def ms(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return round((time.perf_counter() - began) * 1e3, 2)


def in_child(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run in a forked process, as a stem cell does: this process never makes a context."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps(run()).encode())
        os._exit(0)
    os.wait()
    os.close(write)
    with os.fdopen(read) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def context() -> dict[str, Any]:
    """Milliseconds of the driver's first calls, without torch."""
    made, memory = c_void_p(), c_uint64()
    return {
        "cuInit_ms": ms(lambda: must(cuda.cuInit(0))),
        "primary_context_ms": ms(lambda: must(cuda.cuDevicePrimaryCtxRetain(byref(made), 0))),
        "allocate_1GiB_ms": ms(
            lambda: must(cuda.cuCtxSetCurrent(made) or cuda.cuMemAlloc_v2(byref(memory), c_size_t(N_BYTES)))
        ),
    }


def first_work() -> dict[str, Any]:
    """Milliseconds of torch's first work in a fork of a process that imported it."""
    found = {
        "init_ms": ms(torch.cuda.init),
        "first_tensor_ms": ms(lambda: synchronised(lambda: torch.zeros(1, device="cuda"))),
    }
    square = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    for name in ("first_product_ms", "second_product_ms"):
        found[name] = ms(lambda: synchronised(lambda: square @ square))
    return found


def synchronised(run: Callable[[], object]) -> None:
    run()
    torch.cuda.synchronize()


def copies() -> dict[str, Any]:
    """GB/s of 1 GiB between host and device, and what pinning it costs."""
    device = torch.empty(N_BYTES, dtype=torch.uint8, device="cuda")
    pageable = torch.ones(N_BYTES, dtype=torch.uint8)
    pinned: list[torch.Tensor] = []
    found = {"allocate_pinned_ms": ms(lambda: pinned.append(torch.empty(N_BYTES, dtype=torch.uint8, pin_memory=True)))}
    for name, to, of in (("pageable", device, pageable), ("pinned", device, pinned[0]), ("back", pinned[0], device)):
        taken = [ms(lambda to=to, of=of: synchronised(lambda: to.copy_(of, non_blocking=True))) for _ in range(3)]  # type: ignore[misc]
        found[f"{name}_gb_per_s"] = round(N_BYTES / statistics.median(taken) / 1e6, 1)
    return found


def pinning() -> dict[str, Any]:
    """GB/s at which threads register, populate, and copy out of, a mapping of memory that is there, by kind of page.

    Each measurement has a new read-only mapping, as an engine has of a segment.
    """
    torch.zeros(1, device="cuda")
    found: dict[str, Any] = {}
    ring = torch.empty(N_BYTES, dtype=torch.uint8, pin_memory=True).data_ptr()
    for kind, flags, advice in (("4 KiB", 0, 0), ("advised huge", 0, MADV_HUGEPAGE), ("hugetlb", os.MFD_HUGETLB, 0)):
        try:
            fd = filled(flags, advice)
        except OSError:
            found[kind] = "this host has no such pages"
            continue
        for n in (1, 2, 4, 8):
            row = {}
            with mapped(fd) as at:
                row["register"] = rate(n, lambda i, at=at: must(register(at, i)))  # type: ignore[misc]
                unregister(at)
            with mapped(fd) as at:
                row["populate"] = rate(n, lambda i, at=at: libc.madvise(at + i * PIECE, PIECE, MADV_POPULATE_READ))  # type: ignore[misc]
                row["register_populated"] = rate(n, lambda i, at=at: must(register(at, i)))  # type: ignore[misc]
                unregister(at)
            with mapped(fd) as at:
                row["copy_to_pinned"] = rate(
                    n, lambda i, at=at: ctypes.memmove(ring + i * PIECE, at + i * PIECE, PIECE)
                )  # type: ignore[misc]
            found[f"{kind}, {n} threads"] = row
        os.close(fd)
    return found


def filled(flags: int, advice: int) -> int:
    fd = os.memfd_create("gpu_probe", flags)
    os.ftruncate(fd, N_BYTES)
    with mmap.mmap(fd, N_BYTES) as memory:
        if advice:
            memory.madvise(advice)
        for at in range(0, N_BYTES, MIB):
            memory[at : at + MIB] = b"\1" * MIB
    return fd


class mapped:
    def __init__(self, fd: int) -> None:
        self._at = libc.mmap(None, N_BYTES, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)

    def __enter__(self) -> int:
        return int(self._at)

    def __exit__(self, *_: object) -> None:
        libc.munmap(self._at, N_BYTES)


def register(at: int, i: int) -> int:
    return int(cuda.cuMemHostRegister_v2(c_void_p(at + i * PIECE), c_size_t(PIECE), PORTABLE_READ_ONLY))


def unregister(at: int) -> None:
    for i in range(N_BYTES // PIECE):
        must(cuda.cuMemHostUnregister(c_void_p(at + i * PIECE)))


def rate(n_threads: int, run: Callable[[int], object]) -> float:
    """GB/s at which threads work through the pieces."""
    current = c_void_p()
    must(cuda.cuCtxGetCurrent(byref(current)))
    pieces, lock = iter(range(N_BYTES // PIECE)), threading.Lock()

    def work() -> None:
        must(cuda.cuCtxSetCurrent(current))
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            run(piece)

    threads = [threading.Thread(target=work) for _ in range(n_threads)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return round(N_BYTES / (time.perf_counter() - began) / 1e9, 1)


def blocks() -> dict[str, Any]:
    """GB/s of KV blocks out of the device in an order without neighbours, by the way they are copied."""
    cache = torch.randint(0, 255, (N_BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device="cuda")
    host = torch.empty(N_BLOCKS, BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
    order = [(i * 7) % N_BLOCKS for i in range(N_BLOCKS)]
    stream = torch.cuda.Stream()
    to = [host.data_ptr() + i * BLOCK_BYTES for i in range(N_BLOCKS)]
    of = [cache.data_ptr() + block * BLOCK_BYTES for block in order]
    picked = torch.tensor(order, device="cuda")

    def one_by_one() -> None:
        for target, source in zip(to, of, strict=True):
            must(
                cuda.cuMemcpyDtoHAsync_v2(
                    c_void_p(target), c_uint64(source), c_size_t(BLOCK_BYTES), c_void_p(stream.cuda_stream)
                )
            )

    array, sizes = c_uint64 * N_BLOCKS, (c_size_t * N_BLOCKS)(*[BLOCK_BYTES] * N_BLOCKS)
    targets, sources, first, failed = array(*to), array(*of), (c_size_t * 1)(0), c_size_t()
    attributes = CopyAttributes(MADE_IN_ORDER, Location(0, 0), Location(0, 0), 0)

    def one_call() -> None:
        must(
            cuda.cuMemcpyBatchAsync(
                targets,
                sources,
                sizes,
                c_size_t(N_BLOCKS),
                byref(attributes),
                first,
                c_size_t(1),
                byref(failed),
                c_void_p(stream.cuda_stream),
            )
        )

    def gathered() -> None:
        host.copy_(cache.index_select(0, picked), non_blocking=True)

    found = {}
    for way in (one_by_one, one_call, gathered):
        taken = [ms(lambda way=way: synchronised(way)) for _ in range(3)]  # type: ignore[misc]
        assert bool((host == cache.index_select(0, picked).cpu()).all()), way.__name__  # noqa: S101
        host.zero_()
        found[f"{way.__name__}_gb_per_s"] = round(N_BLOCKS * BLOCK_BYTES / statistics.median(taken) / 1e6, 2)
    return found


def graphs() -> dict[str, Any]:
    """Milliseconds of 64 layers (a product and an activation), one by one, captured as a graph, and replayed."""
    layers = [torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) / 32 for _ in range(64)]
    found = {}
    for rows in (1, 8, 32, 128):
        given = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)

        def run(given: torch.Tensor = given) -> None:
            for layer in layers:
                given = torch.relu(given @ layer)

        synchronised(run)
        graph = torch.cuda.CUDAGraph()

        def capture(graph: torch.cuda.CUDAGraph = graph, run: Callable[[], None] = run) -> None:
            with torch.cuda.graph(graph):
                run()

        eager = ms(lambda run=run: synchronised(run))  # type: ignore[misc]
        captured = ms(capture)
        replayed = [ms(lambda graph=graph: synchronised(graph.replay)) for _ in range(3)]  # type: ignore[misc]
        found[f"{rows} rows"] = {"eager_ms": eager, "capture_ms": captured, "replay_ms": statistics.median(replayed)}
    return found


def show(name: str, found: dict[str, Any]) -> None:
    print(f"{name}:")
    for key, value in found.items():
        print(f"  {key:<24} {value}", flush=True)


def main(measures: Iterable[Callable[[], dict[str, Any]]]) -> int:
    global cuda
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        must(in_child(lambda: {"result": int(cuda.cuInit(0))})["result"])
    except OSError as e:
        raise SystemExit(f"gpu_probe: no CUDA driver ({e})") from e
    for measure in measures:
        show(measure.__name__, in_child(measure))
    print("this process made a context:", torch.cuda.is_initialized())
    return 0


if __name__ == "__main__":
    sys.exit(main((context, first_work, first_work, copies, pinning, blocks, graphs)))
