"""Remove the function containers that a platform with driver docker may leave when its invoker is killed."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from thaw.host import name_on_machine

_ENGINE_S = 60.0


def owner(host_id: str, run_dir: Path) -> str:
    """The label thaw.owner that a host's invoker writes on its containers (invoker/drivers/docker/driver.py)."""
    return name_on_machine(host_id, str(run_dir.absolute()))


def remove(owners: Sequence[str]) -> None:
    """Best effort: an engine that is away has to be cleaned up by hand (docs/docker.md says how)."""
    try:
        for name in owners:
            command = ["docker", "ps", "-aq", "--filter", f"label=thaw.owner={name}"]
            found = subprocess.run(command, capture_output=True, text=True, timeout=_ENGINE_S).stdout.split()
            if found:
                subprocess.run(["docker", "rm", "-f", *found], capture_output=True, timeout=_ENGINE_S)
    except (OSError, subprocess.TimeoutExpired):
        return
