"""The worker class of this machine's device, for ``worker_cls``.  The module of the other device is not imported."""

from __future__ import annotations

from vllm.platforms import current_platform

if current_platform.is_cpu():
    from thaw_runtime.engine.vllm.worker_on_cpu import LazyKvCpuWorker as DeviceWorker
else:
    from thaw_runtime.engine.vllm.worker_on_gpu import StageGpuWorker as DeviceWorker

WORKER = f"{DeviceWorker.__module__}.{DeviceWorker.__name__}"
