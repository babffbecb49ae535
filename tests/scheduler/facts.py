"""The functions, models, hosts and messages that tests of the scheduler have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gateway.scheduler.decisions import StartGroup
from gateway.scheduler.events import ActionFacts
from relay.protocol.messages import DemandAdded
from thaw.errors import ErrorInfo
from thaw.host import Device, HeldSegment, HostReport, PoolReport
from thaw.ids import ActionName, ActivationId, GatewayId, HostId, Namespace
from thaw.instance import InstanceState
from thaw.model import FileRange, ModelFacts, ModelParts

MIB = 1024 * 1024
CHAT, HELLO, OTHER = ActionName("guest/chat"), ActionName("guest/hello"), ActionName("guest/other")
STARTING, READY, GONE = InstanceState.STARTING, InstanceState.READY, InstanceState.GONE
LOST = ErrorInfo("WorkerLost", "killed")
BUSY = ErrorInfo("InstanceBusy", "a request is in flight")
FACTS = ModelFacts("s3://m/x", 100 * MIB, 90 * MIB, 2, (40 * MIB,) * 2, 10 * MIB, "aa", "", True, {"w": 100 * MIB})


def divisible(layer: int, entry: int, n_layers: int, sidecar: int = 700, header: int = 30_536) -> ModelFacts:
    """A checkpoint of one file.  Its head is its embedding, apart from the norm."""
    first = FileRange("model.safetensors", header, entry)
    layers = [FileRange("model.safetensors", header + entry + i * layer, layer) for i in range(n_layers)]
    end = header + entry + n_layers * layer
    norm = FileRange("model.safetensors", end, 1_152)
    parts = ModelParts((first,), tuple((r,) for r in layers), (norm,), (first,))
    files = {"config.json": sidecar, "model.safetensors": end + 1_152}
    total, weights, layers_bytes = sum(files.values()), entry + n_layers * layer + 1_152, (layer,) * n_layers
    return ModelFacts(
        "s3://m/x", total, weights, n_layers, layers_bytes, entry + 1_152, "aa", "", True, files, parts=parts
    )


SMOLLM2 = divisible(layer=7_080_192, entry=56_623_104, n_layers=30, sidecar=3_519_000)
"""SmolLM2-135M: 30 layers of 3,540,096 parameters and a tied embedding of 49,152 x 576, with two bytes each."""


def hello(**fields: Any) -> ActionFacts:
    return replace(ActionFacts(HELLO, "1", "python:3.11", 256 * MIB, 1, 8, 60.0), **fields)


def chat(**fields: Any) -> ActionFacts:
    return replace(ActionFacts(CHAT, "1", "llm:vllm", 1024 * MIB, 8, 8, 60.0, model_uri="s3://m/x"), **fields)


def function(name: str, **fields: Any) -> ActionFacts:
    """A function without a model, of any name."""
    return hello(name=ActionName(name), **fields)


def forced(n: int, **fields: Any) -> ActionFacts:
    """The function of a model that always starts as a group of ``n`` stages."""
    return chat(forced_stages=n, max_stages=8, **fields)


def report(host: str = "h0", memory_mb: int = 4096, used_mb: int = 0, **fields: Any) -> HostReport:
    """A host's report.  The host declares the rate of its link."""
    devices = (Device("cpu", "cpu", memory_mb * MIB, (memory_mb - used_mb) * MIB),)
    plain = HostReport(HostId(host), "boot", "a:1", devices, 2, 1e9, "none", "process", 0, 1_000)
    link = fields.get("network_bytes_per_s", plain.network_bytes_per_s)
    return replace(plain, **{"declared_bytes_per_s": link, **fields})


def demand(activation: str, action: ActionName = HELLO, gateway: str = "g", **fields: Any) -> DemandAdded:
    """The message of a gateway that holds a request."""
    namespace, _, _ = action.partition("/")
    plain = DemandAdded(ActivationId(activation), action, Namespace(namespace), GatewayId(gateway), 0)
    return replace(plain, **fields)


def pool(n_slabs: int, taken: int = 0, seen_ms: int = 1_000, *, slab_mb: int = 64, **fields: Any) -> PoolReport:
    """A pool in which ``taken`` slabs hold something that belongs to no instance of the test."""
    segments = (HeldSegment("other", taken, True),) if taken else ()
    return replace(PoolReport(slab_mb * MIB, n_slabs, seen_ms, segments), **fields)


def pool_after(start: StartGroup, n_slabs: int, held: int, seen_ms: int, *, stage: int = 0) -> PoolReport:
    """The pool of a stage's host once the stage has its part, which takes ``held`` slabs."""
    instance_id = start.stages[stage].instance_id
    return pool(n_slabs, 0, seen_ms, held=(HeldSegment("its", held, True, (instance_id,)),), users=(instance_id,))
