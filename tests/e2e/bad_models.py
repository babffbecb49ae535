"""Small checkpoints, ways to damage them, and pictures of a platform that show whether a start left anything."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import requests
from safetensors.numpy import save_file

from relay.clients.fetch import FetchClient
from relay.protocol.messages import Status
from relay.state import redis_link
from relay.state.registry import Registry
from tests.e2e.machine import Machine, processes
from thaw.dev import smollm2
from thaw.dev.layout import Layout

WEIGHTS = "model.safetensors"
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 128, 2, 2, 1, 32, 49_152
SLAB_BYTES = 64 << 20  # fetchd's default, which a development platform uses
HEARTBEAT_S = 2.5  # hosts report more often than this


def tiny_checkpoint(directory: Path, cache: Path) -> Path:
    """A Llama model of two layers and 6 MB with random weights and the demo model's tokenizer."""
    demo = smollm2.obtain(cache)
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo / name, directory)
    config = json.loads((demo / "config.json").read_text()) | {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
    }
    (directory / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(0)
    tensors = {n: (0.05 * draw.standard_normal(shape)).astype(np.float16) for n, shape in _shapes().items()}
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    return directory


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
                "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
                "mlp.gate_proj": (INNER, HIDDEN),
                "mlp.up_proj": (INNER, HIDDEN),
                "mlp.down_proj": (HIDDEN, INNER),
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
            }.items()
        }
    return shapes


# ── damage, in place ──────────────────────────────────────────────────────────────────────────────────────────────


def cut(path: Path, n_bytes: int) -> None:
    """Remove the last ``n_bytes``."""
    os.truncate(path, path.stat().st_size - n_bytes)


def flip_a_bit(path: Path, offset: int) -> None:
    """Flip a bit of the byte at ``offset``, which counts from the end if it is negative."""
    with path.open("r+b") as f:
        f.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 1]))


def change_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the JSON header of a safetensors file.  The data after it stays as it is."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def change_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ── the whole state of a platform ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that a failed start could leave behind.  Two pictures with the same work in progress are equal."""

    processes: dict[str, int]  # the number of processes of each program
    instances: tuple[str, ...]  # the instances in the registry
    reported: tuple[str, ...]  # the instances that the hosts report
    free_bytes: tuple[int, ...]  # the free memory of the hosts' devices, as reported
    plans: tuple[str, ...]
    demand: tuple[str, ...]
    segments: tuple[tuple[str, tuple[str, ...]], ...]  # (uri, holders) of segments that are held or incomplete
    descriptor_sockets: tuple[str, ...]
    fetches: tuple[str, ...]
    lost_bytes: int  # bytes of fetchd's pool that are neither free nor in a segment


class Shop:
    """A platform on which ``chat`` is deployed and warm, with the tools to try bad models.

    ``at_rest`` is its picture when nothing else happens.  After every test the platform has to look like this again.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.known = Layout(machine.state_dir).read_platform()
        assert self.known is not None
        self.fetchd = FetchClient(str(Path(self.known.run_dir) / "host-0" / "fetchd.sock"))
        self.registry = Registry(redis_link.connect(self.known.state_url))
        self.http = requests.Session()
        self.http.auth = self.key = machine.auth()
        assert self.ask("chat").status_code == 200
        self.at_rest = self._settled()

    def close(self) -> None:
        self.http.close()

    def deploy(self, name: str, uri: str, **config: object) -> None:
        body = {
            "exec": {"kind": "llm:vllm", "code": "", "binary": False},
            "config": {
                "kind": "llm:vllm",
                "model": {"uri": uri},
                "engine": {"max_model_len": 128},
                "resources": {"gpu_memory_mb": 256},
                **config,
            },
        }
        url = f"{self.machine.url}/api/v1/namespaces/_/actions/{name}?force=true"  # else most are refused at once
        put = self.http.put(url, json=body, timeout=30)
        assert put.status_code == 200, put.text

    def delete(self, name: str) -> None:
        assert self.http.delete(f"{self.machine.url}/api/v1/namespaces/_/actions/{name}", timeout=30).ok

    def ask(self, name: str, content: str = "Hi", **body: Any) -> requests.Response:
        message = {"model": name, "messages": [{"role": "user", "content": content}], "max_tokens": 2, **body}
        return self.http.post(
            f"{self.machine.url}/v1/chat/completions", json=message, timeout=90, stream=bool(body.get("stream"))
        )

    def record(self, activation_id: str) -> dict[str, Any]:
        """The record, as ``thaw activation get`` prints it."""
        printed = self.machine.thaw("activation", "get", activation_id, "--wait", "20").stdout
        found: dict[str, Any] = json.loads(printed[printed.index("{") :])
        return found

    def picture(self) -> Picture:
        status, reports = self.fetchd.status(), self.registry.live_hosts()
        programs = Counter(_program(line) for pid, line in processes().items() if self.machine.is_ours(pid))
        return Picture(
            processes=dict(programs),
            instances=tuple(sorted(i.instance_id for i in self.registry.instances())),
            reported=tuple(sorted(i for r in reports for i in r.instances)),
            free_bytes=tuple(d.free_bytes for r in reports for d in r.devices),
            plans=tuple(sorted(p.group_id for p in self.registry.plans())),
            demand=tuple(d.activation_id for d in self.registry.demand()),
            segments=tuple(sorted((s.uri, s.holders) for s in status.segments if s.holders or s.end < s.n_bytes)),
            descriptor_sockets=tuple(sorted(self.fetchd.descriptor_sockets())),
            fetches=tuple(f.group_id for f in status.fetches),
            lost_bytes=_lost(status),
        )

    @contextmanager
    def nothing_left_behind(self, deadline_s: float = 60) -> Iterator[None]:
        """Check that the platform soon looks as it does at rest after the block."""
        yield
        until = time.monotonic() + deadline_s
        while (now := self.picture()) != self.at_rest:
            assert time.monotonic() < until, f"left behind:\nat rest {self.at_rest}\nnow     {now}"
            time.sleep(0.1)

    def _settled(self) -> Picture:
        """The picture once ``chat`` is reported and stem cells are ready: it is the same twice, a heartbeat apart."""
        until = time.monotonic() + 60
        before, now = None, self.picture()
        while now != before or len(now.reported) != 1 or now.instances != now.reported or now.demand:
            assert time.monotonic() < until, f"does not settle:\n{before}\n{now}"
            time.sleep(HEARTBEAT_S)
            before, now = now, self.picture()
        return now


def _program(line: str) -> str:
    """The module or program, without arguments that hold paths."""
    words = line.split()
    return " ".join(words[:3]) if words[1:2] == ["-m"] else "".join(words[:1])


def _lost(status: Status) -> int:
    in_segments = sum(-(-s.n_bytes // SLAB_BYTES) * SLAB_BYTES for s in status.segments)
    return status.pool_bytes - status.free_bytes - in_segments
