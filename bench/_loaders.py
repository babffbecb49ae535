"""One load in a process of its own: from a checkpoint's file to every tensor in torch, with each page read once.

``python -m bench._loaders NAME DIRECTORY SOCKET PID`` prints a JSON object.  Everything is imported before the clock
runs.  Every loader ends by reading one byte of each page, because mapping a file does not load it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bench._common import cpu_seconds
from relay.clients.fetch import DescriptorClient, FetchClient
from relay.protocol.messages import FetchStart
from relay.protocol.segment import SegmentReader
from thaw.checkpoints import checkpoint
from thaw.ids import GroupId, InstanceId
from thaw.model import FileRange
from thaw.plan import PlanModel

Tensors = dict[str, torch.Tensor]
_PAGE = 4096
_DEADLINE_S = 300.0
_DTYPES = {"BF16": torch.bfloat16}  # the only dtype that write_random writes


def _safetensors(path: Path) -> Callable[[], Tensors]:
    from safetensors.torch import load_file

    return lambda: dict(load_file(path))


def _runai(path: Path) -> Callable[[], Tensors]:
    os.environ.setdefault("RUNAI_STREAMER_MEMORY_LIMIT", "-1")  # it keeps its buffers, and so its tensors stay valid
    from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-not-found]

    def load() -> Tensors:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path))
            return dict(streamer.get_tensors())

    return load


def _fastsafetensors(path: Path) -> Callable[[], Tensors]:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup  # type: ignore[import-not-found]

    def load() -> Tensors:
        loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
        loader.add_filenames({0: [str(path)]})
        buffer = loader.copy_files_to_device()
        return {name: buffer.get_tensor(name) for name in loader.get_keys()}

    return load


class Fetched:
    """Load through fetchd: request the model, get its segment, and take each tensor when it is complete."""

    def __init__(self, directory: Path, socket: str) -> None:
        self._client = FetchClient(socket)
        self._facts = self._client.inspect(directory.as_uri())  # the platform does this when an action is deployed
        self._group, self._instance = GroupId(f"load-{os.getpid()}"), InstanceId(f"load-{os.getpid()}")
        self._reader: SegmentReader | None = None
        self._descriptors: DescriptorClient | None = None

    def load(self) -> Tensors:
        facts = self._facts
        whole = tuple(FileRange(name, 0, n) for name, n in facts.files.items())
        model = PlanModel(facts.uri, facts.sha256, facts.etag, facts.n_bytes)
        started = self._client.start(FetchStart(self._group, 0, 1, model, whole))
        if started.resident:
            raise SystemExit("fetchd had the model in memory: nothing would be measured")
        path = self._client.open_descriptor_socket(self._instance)
        self._client.grant_segment(self._instance, started.segment_id, self._group, 0)
        self._descriptors = DescriptorClient.connect(path)
        self._reader = self._descriptors.segment(deadline_s=_DEADLINE_S)
        return self.tensors(touched=True)

    def tensors(self, *, touched: bool = False) -> Tensors:
        """Take the tensors from the segment, in load order."""
        reader, found = self._reader, Tensors()
        assert reader is not None
        for t in reader.offer.tensors:
            at = reader.locate(t.file, t.offset)
            reader.wait(at + t.n_bytes, _DEADLINE_S)
            made = torch.frombuffer(reader.view(at, t.n_bytes), dtype=_DTYPES[t.dtype]).view(t.shape)
            found[t.name] = made
            if touched:
                touch({t.name: made})
        return found

    def close(self) -> None:
        if self._descriptors is not None:
            self._descriptors.close()
        self._client.close_descriptor_socket(self._instance)
        self._client.cancel(self._group, 1)


def touch(tensors: Mapping[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        int(tensor.view(torch.uint8)[::_PAGE].sum())


def main(name: str, directory: Path, socket: str, daemon: int) -> dict[str, Any]:
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    torch.set_num_threads(1)
    path = directory / checkpoint.WEIGHTS_NAME
    fetched = Fetched(directory, socket) if name == "fetchd" else None
    others = {"safetensors": _safetensors, "runai": _runai, "fastsafetensors": _fastsafetensors}
    load = fetched.load if fetched is not None else others[name](path)
    cpu = time.process_time() + (cpu_seconds(daemon) if fetched else 0.0)
    began = time.perf_counter()
    tensors = load()
    if fetched is None:
        touch(tensors)
    seconds = time.perf_counter() - began
    cpu = time.process_time() + (cpu_seconds(daemon) if fetched else 0.0) - cpu
    n_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
    report = {"seconds": seconds, "cpu_s": cpu, "n_bytes": n_bytes, "n_tensors": len(tensors)}
    if fetched is not None:
        began = time.perf_counter()
        fetched.tensors()
        report["us_per_tensor"] = 1e6 * (time.perf_counter() - began) / len(tensors)
        fetched.close()
    return report


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))))
    sys.stdout.flush()
    os._exit(0)  # some loaders take seconds to release their buffers, and a start does not wait for that
