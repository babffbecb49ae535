"""The kind of this host's device: the scheduler learns the times of starts for each kind separately."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_GPUS: Final = Path("/proc/driver/nvidia/gpus")


def kind_of(device: str, gpus: Path = _GPUS) -> str:
    """``cpu``, or the model of the GPU as its driver names it ("NVIDIA H200"); ``cuda`` where it does not say."""
    name, _, index = device.partition(":")
    if name == "cpu":
        return name
    try:
        directories = sorted(gpus.iterdir())  # by bus address, as the container toolkit counts them
        lines = (directories[int(index or 0)] / "information").read_text().splitlines()
    except (OSError, ValueError, IndexError):
        return name
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("Model:")), "") or name
