"""The time per tensor of a resident segment, with the Python reader and with the native reader, in one run.

    .venv/bin/python scripts/tensor_cost.py [--tensors 400] [--rounds 15]

The segment is complete, so nothing waits.  The measured time is the work between the watermark and ``load_weights``,
including the table that is made before the first tensor.  Rounds alternate, and medians are reported.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import statistics
import time
import warnings

from relay.protocol.messages import SegmentOffer
from relay.protocol.segment import ControlPage, SegmentReader, lay_out, segment_bytes
from thaw.model import FileRange, TensorInfo
from thaw_runtime.weights.arriving import arriving
from thaw_runtime.weights.parameter_manager import NativeSegment, start
from thaw_runtime.weights.readable_segment import Segment

SLAB_BYTES = 2 * 1024 * 1024
FILE = "model.safetensors"


def make_segment(n_tensors: int) -> tuple[SegmentOffer, list[int]]:
    """A segment with norms and projections of a small model in turn, with two bytes per element."""
    shapes = [((576,), (576, 1536))[i % 2] for i in range(n_tensors)]
    tensors, at = [], 0
    for i, shape in enumerate(shapes):
        n_bytes = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        tensors.append(TensorInfo(f"layers.{i}.weight", FILE, at, n_bytes, "BF16", shape))
        at += n_bytes
    layout = lay_out([FileRange(FILE, 0, at)])
    n_bytes = segment_bytes(layout)
    n_slabs = -(-n_bytes // SLAB_BYTES)
    fds = [os.memfd_create("tensor_cost") for _ in range(n_slabs + 1)]
    for fd, size in zip(fds, [mmap.PAGESIZE, *[SLAB_BYTES] * n_slabs], strict=True):
        os.ftruncate(fd, size)
    ControlPage(mmap.mmap(fds[0], mmap.PAGESIZE), n_bytes).complete()
    return SegmentOffer("s", n_bytes, SLAB_BYTES, n_slabs, layout, tuple(tensors)), fds


def one_round(segment: Segment) -> tuple[float, float]:
    """(µs per tensor, from the making of the table until the last tensor is taken; the thread's CPU µs per tensor)."""
    tensors = segment.offer.tensors
    gc.collect()
    began, cpu = time.perf_counter(), time.thread_time()
    source = arriving(segment, tensors)
    for i in range(len(tensors)):
        source.wait(i, 1.0)
        tensor = source.take(i)
        del tensor
    return (time.perf_counter() - began) / len(tensors) * 1e6, (time.thread_time() - cpu) / len(tensors) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    manager = start()
    if manager is None:
        raise SystemExit("the native library is not built: make native")
    offer, fds = make_segment(args.tensors)
    readers: dict[str, Segment] = {
        "python": SegmentReader(offer, [os.dup(fd) for fd in fds]),
        "native": NativeSegment(manager, offer, [os.dup(fd) for fd in fds]),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in readers}
    for _ in range(args.rounds):
        for name, reader in readers.items():
            taken[name].append(one_round(reader))
    result = {
        name: {
            "us_per_tensor": round(statistics.median(r[0] for r in rounds), 2),
            "cpu_us_per_tensor": round(statistics.median(r[1] for r in rounds), 2),
        }
        for name, rounds in taken.items()
    }
    print(json.dumps({"tensors": args.tensors, "rounds": args.rounds, **result}))


if __name__ == "__main__":
    main()
