"""Measures the memory that one engine of each model family really holds.  Prints one JSON object, family → Measured.

``python kv_probe.py [--tokens N] [FAMILY …]`` measures these families, or all, in batches of N prompt tokens (2048).

One process imports vLLM and forks a child for each family, as a zygote does.  A child's own memory is its anonymous
memory (libraries are files, the segment is shared memory) less the memory that it had when it was forked.  The kernel
records the peak as VmHWM, which is reset before each measurement.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.thaw_runtime.conftest import llm_init
from tests.thaw_runtime.fake_descriptor_socket import FakeDescriptorSocket
from tests.thaw_runtime.models import read_segment, real_model
from thaw_runtime.engine import main as engine_main
from thaw_runtime.engine.protocol import EngineRequest, Event, Failed, Sampling, Token
from thaw_runtime.engine.registry import find_engine
from thaw_runtime.engine.vllm import env as engine_env
from thaw_runtime.engine.vllm.warm import warm_up

MIB = 1 << 20
ROOM = 1024 * MIB
"""The reserve is the size of the checkpoint's tensors plus this much."""
SEQS = 16
LENGTHS = 48
"""The kernels of the products with so many rows are more than oneDNN may keep."""
PROFILES = 3
"""A batch that finds freed pages still in the heap has a lower peak, by up to 60 MB.  The highest of several counts."""
WAIT_S = 300.0
_MLOCK_ONFAULT = 1  # linux/mman.h

_SMALL = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 1024,
}
FAMILIES: dict[str, dict[str, Any] | None] = {
    "smollm2": None,  # the real model
    "qwen2": {"model_type": "qwen2", **_SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_SMALL, "num_key_value_heads": 4, "head_dim": 128},
    "mistral": {"model_type": "mistral", **_SMALL, "num_key_value_heads": 2, "sliding_window": None},
    "gemma": {"model_type": "gemma", **_SMALL, "num_key_value_heads": 1, "head_dim": 64},
    "opt": {
        "model_type": "opt",
        "vocab_size": 32000,
        "hidden_size": 512,
        "ffn_dim": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "max_position_embeddings": 1024,
        "word_embed_proj_dim": 512,
    },
    "gpt2": {"model_type": "gpt2", "vocab_size": 32000, "n_embd": 512, "n_head": 8, "n_layer": 4, "n_positions": 1024},
}


@dataclass(frozen=True, slots=True)
class Measured:
    """All values are bytes.

    ``not_packed`` is the packed output head that the plan counts and that this processor does not have: oneDNN packs
    bfloat16 on x86 with AVX-512 alone.
    ``peak`` is measured in the worst batches, after every page of the KV cache was touched.  ``vllm_kv`` is the KV
    cache that vLLM's CPU worker grants for the same slice, and ``profiled_kv`` is what the peak of vLLM's own profiling
    batch leaves of the slice.
    """

    reserve: int
    weights: int
    intermediates: int
    kv: int
    loaded: int
    profiled: int
    peak: int
    vllm_kv: int
    profiled_kv: int
    not_packed: int


def resident(*fields: str) -> int:
    """The sum of these fields of this process's status, in bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(status[field].split()[0]) for field in fields)


def anonymous() -> int:
    """The bytes that this process holds now, without files and shared memory."""
    return resident("VmRSS") - resident("RssFile", "RssShmem")


def peak_of(run: Callable[[], object]) -> int:
    """The largest memory of this process while ``run`` ran, without files and shared memory.

    VmHWM counts the pages of files too.  The kernel takes none of them back (keep_file_pages), but the process may map
    a file or release one meanwhile, so the larger of two readings is subtracted.
    """
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("RssFile", "RssShmem")
    run()
    return resident("VmHWM") - max(before, resident("RssFile", "RssShmem"))


def keep_file_pages() -> None:
    """Let the kernel take no page of a mapped file back from this process.

    A page that is taken back between the peak and the reading would count as memory of the engine, as it did on a
    busy machine.  Where the process may not lock so much, the pages stay as they are.
    """
    lock = ctypes.CDLL(None).mlock2
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode, *path = line.split(maxsplit=5)
        if inode != "0" and path and not path[0].startswith("/memfd:"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            lock(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MLOCK_ONFAULT)


def make_checkpoint(config: dict[str, Any], directory: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).to(torch.bfloat16)
    made.save_pretrained(directory)


class Probe:
    """An engine in this process, with its answers."""

    def __init__(self, model: Path, directory: Path, n_tokens: int) -> None:
        self._n_tokens = n_tokens
        self._ended = threading.Semaphore(0)
        self._failed: list[Failed] = []
        self._then: list[EngineRequest] = []
        engine = engine_main.load_cold(find_engine("vllm"))(self._emit)
        descriptor_socket = FakeDescriptorSocket(model, directory / "socket")
        client, segment = read_segment(descriptor_socket)
        tensors = sum(t.n_bytes for t in segment.offer.tensors)
        self.base = anonymous()
        init = llm_init(
            reserve=tensors + ROOM,
            dtype="bfloat16",
            max_model_len=512,
            args={"max_num_seqs": SEQS, "max_num_batched_tokens": n_tokens},
        )
        engine.start(init, segment)
        for closing in (segment, client, descriptor_socket):
            closing.close()
        self.engine: Any = engine
        self.worker = self.engine._core.model_executor.driver_worker.worker

    def measure(self) -> Measured:
        import torch

        from thaw_runtime.engine.vllm.packing import give_back_freed

        keep_file_pages()
        plan = self.engine.memory()
        give_back_freed()  # the engine's own thread may not have finished this
        loaded = anonymous() - self.base
        profiled, vllm_kv = 0, plan["reserve"]
        for _ in range(PROFILES):
            with torch.inference_mode():
                profiled = max(profiled, peak_of(self.worker.model_runner.profile_run) - self.base)
            # include what that batch left in the heap, because vLLM measures the process after its own batch
            vllm_kv = min(vllm_kv, self._granted_by_vllm(plan["reserve"]))
            give_back_freed()  # the next batches run in another thread, which has another heap
        for cache in self.worker.model_runner.kv_caches:
            cache.zero_()
        peak = peak_of(self._worst_batches) - self.base
        return Measured(
            plan["reserve"],
            plan["weights"],
            plan["intermediates"],
            plan["kv"],
            loaded,
            profiled,
            peak,
            vllm_kv,
            plan["reserve"] - profiled,
            self._not_packed(),
        )

    def _not_packed(self) -> int:
        import torch
        import vllm._custom_ops as ops

        config = self.worker.model_config
        try:
            ops.create_onednn_mm(torch.zeros(64, 64, dtype=config.dtype).t(), 1)
        except RuntimeError:  # vLLM falls back to the weights as they are
            return int(config.get_vocab_size() * config.get_hidden_size() * config.dtype.itemsize)
        return 0

    def _granted_by_vllm(self, reserve: int) -> int:
        """Call the unchanged CPUWorker.determine_available_memory.

        It is told that the machine's share is ``reserve`` plus the memory that the process had before the engine.
        """
        import psutil

        process = psutil.Process()
        self.worker.cache_config.kv_cache_memory_bytes = None
        before = process.memory_info().rss - (anonymous() - self.base)
        self.worker.requested_cpu_memory = before + reserve
        return int(self.worker.determine_available_memory())

    def _worst_batches(self) -> None:
        """Run prompts of many lengths, one at a time: oneDNN makes kernels for each.  Then run SEQS sequences that
        sample with every option, with all prompt tokens in one step, and SEQS more of which half come a step later:
        what the first half has freed is too small for both halves.
        """
        for n_tokens in range(1, LENGTHS + 1):
            self._run([EngineRequest(f"n{n_tokens}", (7,) * n_tokens, Sampling(1), 0)])
        requests = [self._request(i) for i in range(SEQS)]
        self._run(requests)
        self._run(requests[: SEQS // 2], requests[SEQS // 2 :])

    def _request(self, i: int) -> EngineRequest:
        sampling = Sampling(
            4,
            temperature=0.9,
            top_p=0.9,
            top_k=50,
            min_p=0.01,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            repetition_penalty=1.1,
            logprobs=20,
        )
        prompt = tuple((i * 131 + j * 7) % 30000 for j in range(self._n_tokens // SEQS))
        return EngineRequest(f"r{i}", prompt, sampling, i)

    def _run(self, first: Sequence[EngineRequest], then: Sequence[EngineRequest] = ()) -> None:
        """Submit ``first`` for one step, and ``then`` for the step after it, however busy the machine is."""
        self._then = list(then)
        with self.engine._changed:  # the engine takes its inbox under this lock
            for request in first:
                self.engine.submit(request)
        for _ in range(len(first) + len(then)):
            assert self._ended.acquire(timeout=WAIT_S), "a request never ended"
        assert not self._failed, self._failed

    def _emit(self, events: Iterable[tuple[str, Event]]) -> None:
        then, self._then = self._then, []  # the engine emits between two steps
        for request in then:
            self.engine.submit(request)
        for _, event in events:
            if isinstance(event, Failed):
                self._failed.append(event)
            if not isinstance(event, Token):
                self._ended.release()


def in_child(run: Callable[[], object]) -> None:
    """Run this in a forked child and wait for it.  If the child fails, so does this process."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            run()
            status = 0
        except BaseException:  # noqa: BLE001  the outermost frame of the child process
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    if os.waitpid(pid, 0)[1] != 0:
        raise SystemExit("a measurement failed; see above")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    asked = parser.parse_args()
    engine_env.prepare(2)
    warm_up()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in asked.families:
            config = FAMILIES[name]
            directory = Path(scratch) / name
            directory.mkdir()
            model = real_model() if config is None else directory / "model"
            if config is not None:
                in_child(lambda config=config, model=model: make_checkpoint(config, model))
            answer = directory / "answer"
            in_child(lambda: answer.write_text(json.dumps(asdict(Probe(model, directory, asked.tokens).measure()))))  # noqa: B023
            found[name] = json.loads(answer.read_text())
    print("MEASURED " + json.dumps(found))


if __name__ == "__main__":
    main()
