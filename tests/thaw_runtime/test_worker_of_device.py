"""A process imports the worker of its own device only: vLLM's CPU worker takes torch's CUDA streams and events away.

Nor does it import torch's compiler, which vLLM would change although nothing is compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
PROBE = """
import sys
from thaw_runtime.engine.vllm import env
env.prepare(1)
import torch
import thaw_runtime.engine.vllm.first_import
from vllm.platforms import current_platform
if sys.argv[1] == "gpu":
    type(current_platform).is_cpu = lambda self: False
    type(current_platform).get_device_total_memory = classmethod(lambda cls, device_id=0: 80 << 30)
before = torch.cuda.Event, torch.cuda.Stream, torch.accelerator.get_memory_info, torch.Tensor.pin_memory
import thaw_runtime.engine.vllm.engine
from thaw_runtime.engine.vllm import configuration
from thaw_runtime.engine.vllm.worker import WORKER
after = torch.cuda.Event, torch.cuda.Stream, torch.accelerator.get_memory_info, torch.Tensor.pin_memory
print(WORKER.rpartition(".")[2], "same" if before == after else "replaced", "vllm.v1.worker.cpu_worker" in sys.modules)
print("torch._inductor.lowering" in sys.modules)
class Config:
    class cache_config:
        gpu_memory_utilization = 0.92
class Plan:
    reserve, kv, kv_blocks = 8 << 30, 1 << 30, 100
configuration.set_memory(Config, Plan, whole=True)
print(Config.cache_config.gpu_memory_utilization, Config.cache_config.kv_cache_memory_bytes)
"""


def found(device: str) -> list[str]:
    env = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'runtime-python'}")
    command = [sys.executable, "-W", "ignore", "-c", PROBE, device]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-3:]


def test_on_a_gpu_torch_keeps_its_streams_and_a_worker_claims_its_own_part_of_the_memory() -> None:
    """vLLM starts only if the claimed share of the device is free, and other workers may hold the rest of it."""
    assert found("gpu") == ["StageGpuWorker same False", "False", f"0.1 {1 << 30}"]


def test_on_a_cpu_the_workers_module_is_imported_with_the_engine() -> None:
    """Its import overlaps the arrival of the weights then.  The share is left as it is."""
    assert found("cpu") == ["LazyKvCpuWorker replaced True", "False", f"0.92 {1 << 30}"]


STAND_INS = {
    "leaves it out": ("try:\n    from torch._inductor import lowering\nexcept ImportError:\n    pass", "True False"),
    "needs it": ("from torch._inductor import lowering", "True True"),
}


@pytest.mark.parametrize("name", STAND_INS)
def test_a_vllm_that_needs_the_compiler_is_imported_with_it(tmp_path: Path, name: str) -> None:
    text, expected = STAND_INS[name]
    for path, content in {"vllm/__init__.py": text, "torch/__init__.py": "", "torch/_inductor/lowering.py": ""}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    (tmp_path / "torch/_inductor/__init__.py").touch()
    probe = """
import sys
import thaw_runtime.engine.vllm.first_import
import vllm
print("vllm" in sys.modules, "torch._inductor.lowering" in sys.modules)
import torch._inductor.lowering
"""
    env = dict(os.environ, PYTHONPATH=f"{tmp_path}:{ROOT}:{ROOT / 'runtime-python'}", THAW_CPU_CEILING="")
    done = subprocess.run(
        [sys.executable, "-c", probe], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == expected
